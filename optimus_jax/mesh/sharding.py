"""Shardings of a model's leaves and of a batch, from their logical names and rules."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from optimus_jax.config import Scatter
from optimus_jax.mesh.axes import BATCH
from optimus_jax.mesh.zero import LeafLayout

RuleTable = Mapping[str, tuple[str, ...]]
"""Logical axis -> mesh axes."""


def layouts_of(leaves: Any, rules: RuleTable, zero: int, scatter: Scatter = "sum") -> Any:
    """A LeafLayout for every Leaf of a tree.

    Args:
      rules: those that are active (`Plan.active_rules`).
      zero: ZeRO stage, 0 to 3.
      scatter: how gradients are scattered over fsdp.
    """
    return jax.tree.map(lambda leaf: LeafLayout(leaf, rules, zero, scatter), leaves)


def map_trained(function: Callable[..., Any], layouts: Any, *trees: Any) -> Any:
    """`function(layout, *leaves)` of trained leaves, and None in the place of frozen ones.

    Args:
      layouts: the LeafLayout of every leaf.
      trees: trees of all leaves, or of the trained ones.
    """
    return jax.tree.map(
        lambda layout, *leaves: function(layout, *leaves) if layout.leaf.trained else None,
        layouts,
        *trees,
    )


def batch_spec(rules: RuleTable) -> PartitionSpec:
    """Spec of every array of a batch: rows over data and fsdp."""
    axes = rules.get(BATCH)
    return PartitionSpec(axes) if axes else PartitionSpec()


def named(mesh: Mesh, specs: Any) -> Any:
    """NamedShardings of a tree of specs."""
    return jax.tree.map(
        lambda spec: NamedSharding(mesh, spec),
        specs,
        is_leaf=lambda node: isinstance(node, PartitionSpec),
    )


def local_rows(sharding: NamedSharding, global_batch: int) -> np.ndarray:
    """The rows of the global batch, ascending, that this process's devices hold."""
    slices = sharding.addressable_devices_indices_map((global_batch,)).values()
    rows = np.arange(global_batch)
    return np.unique(np.concatenate([rows[index] for index in slices]))


def zeros_on(device: Any, shape: Sequence[int], dtype: Any) -> jax.Array:
    """Zeros that are made on the device where they stay. `jnp.zeros(device=...)` makes them on the
    first device and copies them.
    """
    with jax.default_device(device):
        return jnp.zeros(tuple(shape), dtype)


def put_batch(
    batch: dict[str, np.ndarray], sharding: NamedSharding, global_batch: int
) -> dict[str, jax.Array]:
    """This process's rows, in the order of `local_rows`, as global arrays."""
    return {
        name: jax.make_array_from_process_local_data(
            sharding, rows, (global_batch, *rows.shape[1:])
        )
        for name, rows in batch.items()
    }
