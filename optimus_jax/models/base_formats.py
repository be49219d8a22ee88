"""Parameters of a model without adapters, in the formats in which another run stores them."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec

from optimus_jax.config.axes import PIPE
from optimus_jax.mesh.leaf import Leaf
from optimus_jax.mesh.quantised import decoded, encoded, quantised_format
from optimus_jax.models.shapes import ModelShapes, Params


def stored_alike(base: Params, target: ModelShapes) -> Params:
    """The parameters without adapters as a model stores them. What is stored so already stays as it
    is; what is quantised otherwise is decoded to float32 in between.

    Args:
      base: of the same model, perhaps without its head; matrices may be floats or codes.
      target: the model, whose adapters do not matter.
    """
    leaves, likes = (
        {name: part for name, part in tree.items() if name in base}
        for tree in (target.base.leaves, target.without_adapters.params)
    )
    return jax.tree.map(_as, leaves, base, likes)


def encoded_on_mesh(matrices: Array, leaf: Leaf, target: Any) -> Any:
    """The codes of a stack of matrices, which is deleted; computed one layer at a time, so that
    little memory is used beside both.

    Args:
      leaf: the row of the stack in the leaf table.
      target: shape, dtype and sharding of the codes.
    """
    kind = quantised_format(target)

    @partial(jax.jit, out_shardings=jax.tree.map(lambda like: like.sharding, target))
    @partial(
        jax.shard_map,
        mesh=target["codes"].sharding.mesh,
        in_specs=PartitionSpec(PIPE),
        out_specs=PartitionSpec(PIPE),
        axis_names={PIPE},
    )
    def encode(stack: Array) -> Any:
        return lax.map(lambda matrix: encoded(matrix, leaf.last(matrix.ndim), kind), stack)

    codes = jax.block_until_ready(encode(matrices))
    matrices.delete()
    return codes


def _as(leaf: Leaf, stored: Any, like: Any) -> Any:
    """A leaf: an array, or the codes of one.

    Args:
      leaf: its row of the leaf table where it is not quantised.
      like: arrays, or their shapes, whose formats it gets.
    """
    formats = jax.tree.map(lambda array: array.dtype, (stored, like))
    if formats[0] == formats[1]:
        return stored
    values = decoded(stored, leaf, jnp.float32) if isinstance(stored, dict) else stored
    if isinstance(like, dict):
        return encoded(values, leaf, quantised_format(like))
    return values.astype(like.dtype)
