"""Divides a stage value among the devices that hold the same one.

Unless the tokens of the stream are split (sequence parallelism), all devices along tensor hold the
same stage value. If each sends and stores its part alone, links between hosts carry 1/tensor of the
bytes, and the devices of the next stage gather the whole from one another where they use it.
Source: Narayanan et al. 2021, arXiv:2104.04473, section 4.1.
"""

from dataclasses import dataclass

import jax
from jax import Array, lax

from optimus_jax.config.axes import TENSOR
from optimus_jax.mesh.zero import varying_axes
from optimus_jax.pipeline.stage_values import Tree

WHOLE = -1
"""In the place of a dimension: not divided."""


@dataclass(frozen=True)
class StageParts:
    """How the leaves of a stage value, or of its cotangents, are divided over tensor."""

    dims: Tree
    """The divided dimension of each leaf: the first that can be, of those that differ along
    tensor none."""

    @classmethod
    def of(cls, value: Tree) -> "StageParts":
        """That of values like this one, inside `shard_map`."""
        size = jax.sharding.get_abstract_mesh().shape.get(TENSOR, 1)

        def dim(leaf: Array) -> int:
            if size == 1 or TENSOR in varying_axes(leaf):
                return WHOLE
            return next((d for d, n in enumerate(leaf.shape) if n % size == 0), WHOLE)

        return cls(jax.tree.map(dim, value))

    def mine(self, value: Tree) -> Tree:
        """This device's part of a value."""

        def part(dim: int, leaf: Array) -> Array:
            if dim == WHOLE:
                return leaf
            size = leaf.shape[dim] // lax.axis_size(TENSOR)
            return lax.dynamic_slice_in_dim(leaf, lax.axis_index(TENSOR) * size, size, dim)

        return jax.tree.map(part, self.dims, value)

    def whole(self, parts: Tree) -> Tree:
        """The inverse of `mine`."""

        def gathered(dim: int, leaf: Array) -> Array:
            if dim == WHOLE:
                return leaf
            return lax.all_gather(leaf, TENSOR, axis=dim, tiled=True, to="invarying")

        return jax.tree.map(gathered, self.dims, parts)
