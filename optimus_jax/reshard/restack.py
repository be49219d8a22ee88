"""Reorder the layers of a stack from one order of slots (mesh/slots.py) to another, on the same
mesh.

Checkpoints store layers in order; some pipelines keep them in another. A leaf moves in *rounds*,
each a `ppermute` along `pipe` in which every stage sends rows to at most one other stage and
receives from at most one. The rows are known when the program is traced.

Cost per device: between uneven stages, about as many rows are sent as are on a wrong stage; from or
to an interleaved order, one shard. Besides the old and the new shard, a device holds the rows that
stay, that it sends and that it receives: about two shards. A leaf in host memory is copied to the
devices first. (A single all-to-all would be simpler, but it reserves room for the longest message
to every stage: nearly the whole leaf if a stage hands most layers to its neighbour.)
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import NamedSharding
from numpy.typing import NDArray

from optimus_jax.config.axes import PIPE
from optimus_jax.mesh.axes import LAYERS
from optimus_jax.mesh.leaf import leaf_path
from optimus_jax.mesh.slots import EMPTY
from optimus_jax.mesh.zero import vary, varying_axes
from optimus_jax.reshard.edge_colouring import Route, route_rounds
from optimus_jax.reshard.memory_kinds import in_memory_of, on_devices


@dataclass(frozen=True, eq=False)
class RowRound:
    """Rows that move in one `ppermute`."""

    routes: tuple[Route, ...]
    """(sender, receiver) stages; empty if every stage keeps its rows."""
    take: NDArray[np.int32]
    """[stages, K]: rows of a stage's old shard. Stages with fewer than K rows send padding."""
    put: NDArray[np.int32]
    """[stages, K]: where received rows go in a stage's new shard. Rows out of bounds are
    dropped."""


def make_rounds(source: Sequence[int], target: Sequence[int], num_stages: int) -> list[RowRound]:
    """The rounds that turn one order of slots into another order of the same layers."""
    room = len(target) // num_stages
    rows = _rows_by_route(source, target, num_stages)

    def as_round(routes: Collection[Route], sends: bool = True) -> RowRound:
        most = max(len(rows[route]) for route in routes)
        take, put = (
            np.zeros((num_stages, most), np.int32),
            np.full((num_stages, most), room, np.int32),
        )
        for start, end in routes:
            pairs = rows[start, end]
            take[start, : len(pairs)], put[end, : len(pairs)] = zip(*pairs, strict=True)
        return RowRound(tuple(routes) if sends else (), take, put)

    staying = [(start, end) for start, end in rows if start == end]
    # Longest first, so that the routes of a round have about equally many rows and little is
    # padded.
    moving = sorted(rows.keys() - staying, key=lambda route: (-len(rows[route]), route))
    return ([as_round(staying, sends=False)] if staying else []) + [
        as_round([moving[number] for number in numbers]) for numbers in route_rounds(moving)
    ]


def restack(
    tree: Any,
    shardings: Any,
    *,
    source: tuple[int, ...],
    target: tuple[int, ...],
    keep: bool = True,
) -> Any:
    """`tree` with the rows of its stacked leaves in another order.

    Empty slots become zero. Other leaves are not touched.

    Leaves move one at a time, so only one has transient copies. Leaves of the same shape and
    sharding (a parameter and its moments) share a program, compiled on first use.

    Args:
      tree: jax.Arrays; stacked leaves (`is_stacked`) are [len(source), ...].
      shardings: the NamedSharding of every leaf, which the result has too.
      source, target: the layer in each slot; `pipe` divides the length of both.
      keep: whether the given leaves stay valid. If not, each is deleted once it has moved, so that
        at most one exists twice.
    """
    if source == target:
        return tree

    def moved(path: Any, leaf: Array, sharding: NamedSharding) -> Array:
        if not is_stacked(leaf_path(path)):
            return leaf
        # Wait for each leaf: on a CPU, many programs in flight exhaust the threads and deadlock.
        new = _moved(on_devices(leaf), sharding=sharding, source=source, target=target)
        new = jax.block_until_ready(in_memory_of(new, sharding))
        if not keep:
            leaf.delete()
        return new

    return jax.tree_util.tree_map_with_path(moved, tree, shardings)


def is_stacked(path: str) -> bool:
    """Whether the leaf at a path, such as `opt_state/0/mu/layers/mlp/up`, has a row per slot."""
    return LAYERS in path.split("/")


def with_empty_slots_zero(stack: Any, slots: Sequence[int]) -> Any:
    """Leaves [slots, ...], with zeros in slots without a layer."""
    full = np.array(slots) != EMPTY
    if full.all():
        return stack
    return jax.tree.map(
        lambda leaf: jnp.where(
            full.reshape(-1, *[1] * (leaf.ndim - 1)), leaf, jnp.zeros((), leaf.dtype)
        ),
        stack,
    )


@partial(jax.jit, static_argnames=("sharding", "source", "target"))
def _moved(
    leaf: Array, *, sharding: NamedSharding, source: tuple[int, ...], target: tuple[int, ...]
) -> Array:
    """Move the rows of one leaf: [len(source), ...] -> [len(target), ...]."""
    is_split = PIPE in (sharding.spec[0] or ())
    num_stages = sharding.mesh.shape[PIPE] if is_split else 1
    rounds, room = make_rounds(source, target, num_stages), len(target) // num_stages

    def on_device(old: Array) -> Array:
        stage = lax.axis_index(PIPE) if is_split else 0
        new = vary(jnp.zeros((room, *old.shape[1:]), old.dtype), sorted(varying_axes(old)))
        for part in rounds:
            rows = old.at[jnp.asarray(part.take)[stage]].get(mode="promise_in_bounds")
            if part.routes:
                rows = lax.ppermute(rows, PIPE, part.routes)
            new = new.at[jnp.asarray(part.put)[stage]].set(rows, mode="drop")
        return new

    return jax.shard_map(
        on_device, mesh=sharding.mesh, in_specs=sharding.spec, out_specs=sharding.spec
    )(leaf)


def _rows_by_route(
    source: Sequence[int], target: Sequence[int], num_stages: int
) -> dict[Route, list[tuple[int, int]]]:
    """(row of the old shard, row of the new shard) of every layer, by (old stage, new stage)."""
    places = {
        layer: divmod(slot, len(source) // num_stages)
        for slot, layer in enumerate(source)
        if layer != EMPTY
    }
    rows: dict[Route, list[tuple[int, int]]] = {}
    for slot, layer in enumerate(target):
        if layer != EMPTY:
            (start, old), (end, new) = places[layer], divmod(slot, len(target) // num_stages)
            rows.setdefault((start, end), []).append((old, new))
    return rows
