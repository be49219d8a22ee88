"""Collectives by logical axis: the interface between a model and the mesh.

A model never sees a mesh axis or a size. It names the logical axis that a matmul contracts or a
reduction runs over; the plan's rules turn that into `psum`, a gather, a slice or nothing. With no
rules (one device, or a logical axis kept whole) every method is the identity, so the same model
code is its own reference.

Collectives are written once, in the forward direction; the varying-axis types of `shard_map`
derive the backward ones. `fan_out` and `sum_stream` are Megatron's conjugate pair f and g
(arXiv:1909.08053, figure 3). If the tokens of the residual stream are split (sequence parallelism),
they become its other pair: gather and scatter (arXiv:2205.05198, figure 5).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax

from optimus_jax.config import Scatter
from optimus_jax.mesh.axes import HEADS, KV_HEADS, LENGTH
from optimus_jax.mesh.formats import sum_format
from optimus_jax.mesh.leaf import Leaf
from optimus_jax.mesh.quantised import QuantisedMatrix
from optimus_jax.mesh.zero import LeafLayout, Tracked, vary

TOKENS = 1
"""The dimension of tokens in the residual stream."""


@dataclass(frozen=True)
class Collectives:
    """Logical-axis operations under one plan, for use inside the step's `shard_map`."""

    dtype: jnp.dtype
    """Format of activations and of weights in matmuls."""
    rules: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Active rules; empty means one device."""
    zero: int = 0
    """ZeRO stage (mesh/zero.py)."""
    scatter: Scatter = "sum"
    """How gradients are scattered over fsdp."""

    @property
    def sums(self) -> jnp.dtype:
        """Format of the arguments of `sum`, and of those of `fan_out`, whose gradients are
        summed."""
        return sum_format(self.dtype)

    @property
    def on_whole_matrices(self) -> "Collectives":
        """These for layers whose matrices are `ready` already."""
        return replace(self, zero=0)

    def fan_out(self, x: Array, over: str) -> Array:
        """`x` [B, L, ...] of the residual stream, about to be used by every shard of logical axis
        `over`; backward sums the shards' gradients.

        If the stream's tokens are split, they are gathered. Call it once per value, before the
        first use: each implicit fan-out is one more all-reduce.
        """
        x = vary(x, self.rules.get(over, ()))
        split = self.rules.get(LENGTH, ())
        # Last, so that backward scatters first, and sums over other axes this device's tokens only.
        return lax.all_gather(x, split, axis=TOKENS, tiled=True) if split else x

    def sum_stream(self, x: Array, over: str) -> Array:
        """`sum` of partial results [B, L, ...] for the residual stream: if its tokens are split,
        of this device's tokens.
        """
        axes, split = self.rules.get(over, ()), self.rules.get(LENGTH, ())
        if split:
            x = lax.psum_scatter(x, split, scatter_dimension=TOKENS, tiled=True)
            axes = tuple(axis for axis in axes if axis not in split)
        return lax.psum(x, axes) if axes else x

    def splits_alike(self, one: str, other: str) -> bool:
        """Whether the same devices share two logical axes, so that one collective serves both."""
        return self.rules.get(one, ()) == self.rules.get(other, ())

    def local_tokens(self, x: Array) -> Array:
        """This device's tokens, as the residual stream has them, of a value [B, L, ...] that has
        all.
        """
        split = self.rules.get(LENGTH, ())
        if not split:
            return x
        size = x.shape[TOKENS] // math.prod(map(lax.axis_size, split))
        return lax.dynamic_slice_in_dim(x, lax.axis_index(split) * size, size, TOKENS)

    def all_tokens(self, x: Array) -> Array:
        """A value [B, L, ...] of all tokens, of one that has this device's as the residual stream
        has them. The inverse of `local_tokens`; backward sums the devices' gradients.
        """
        split = self.rules.get(LENGTH, ())
        return lax.all_gather(x, split, axis=TOKENS, tiled=True) if split else x

    def sum(self, x: Array, over: str) -> Array:
        """The sum of the shards' partial results: a matmul contracted `over`, or a reduction ran
        along it.
        """
        axes = self.rules.get(over, ())
        return lax.psum(x, axes) if axes else x

    def max(self, x: Array, over: str) -> Array:
        """The largest of the shards' partial maxima. Has no gradient."""
        axes = self.rules.get(over, ())
        return lax.pmax(x, axes) if axes else x

    def gathered(self, x: Array, over: str) -> Array:
        """The whole of `x`, whose last dimension is split over logical axis `over`, on each of its
        devices. Has no gradient.
        """
        axes = self.rules.get(over, ())
        if not axes:
            return x
        return lax.all_gather(x, axes, axis=x.ndim - 1, tiled=True, to="invarying")

    def offset(self, local_size: int, over: str) -> Array | int:
        """Global index along logical axis `over` of a device's first element, given its number of
        elements.
        """
        axes = self.rules.get(over, ())
        return lax.axis_index(axes) * local_size if axes else 0

    def size(self, local_size: int, over: str) -> int:
        """Global size of logical axis `over`, given a device's part of it."""
        return local_size * math.prod(map(lax.axis_size, self.rules.get(over, ())))

    def kv_heads_needed(
        self, weight: Array, *, dim: int, num_local_heads: int, group: int
    ) -> Array:
        """The key/value heads that a device's query heads attend to.

        If key/value heads are split like query heads, a device needs all that it has. If they are
        fewer than the devices, every device has all and takes its own: slicing the weight, not the
        activations, keeps the projection's work and its collectives at a shard's share.

        Args:
          weight: key/value weight with its kv_heads at `dim`.
          num_local_heads: query heads on this device.
          group: query heads that share one key/value head.
        """
        if KV_HEADS in self.rules or HEADS not in self.rules:
            return weight
        count = max(1, num_local_heads // group)
        first = self.offset(num_local_heads, HEADS) // group
        return lax.dynamic_slice_in_dim(weight, first, count, dim)

    def weight(self, param: nnx.Variable | QuantisedMatrix) -> Array:
        """A matrix in the form that matmuls use: whole along fsdp and in `dtype` (f16: in float32,
        which `project` rounds).

        Call it where the matrix is used, inside the part that backward recomputes: the matrix is
        then gathered again instead of kept.

        Args:
          param: parameter of a module, or of one layer of a stack (whose value has lost the leading
            `layers` dimension that its names still carry), or what stands for one in codes, which
            are gathered as they are stored.
        """
        if isinstance(param, QuantisedMatrix):
            return param.values(self._gathered_codes, self.sums)
        return self._layout(param).weight(param.get_raw_value(), self.dtype)

    def _gathered_codes(self, param: nnx.Variable) -> Array:
        """A part of a matrix's codes, whole along fsdp."""
        return self._layout(param).gathered(param.get_value())

    def _layout(self, param: nnx.Variable) -> LeafLayout:
        """The layout of a parameter, or of its part in one layer."""
        value = param.get_raw_value()
        ndim = (value.tracker if isinstance(value, Tracked) else value).ndim
        return LeafLayout(Leaf.of(param).last(ndim), self.rules, self.zero, self.scatter)

    def layout_in_layer(self, param: nnx.Variable) -> LeafLayout:
        """The layout of one layer's part of a stack."""
        leaf = Leaf.of(param)
        return LeafLayout(leaf.last(len(leaf.dims) - 1), self.rules, self.zero, self.scatter)

    def ready(self, value: Array | Tracked, layout: LeafLayout) -> Array:
        """A leaf as the matmuls of a layer use it; they gather and cast nothing then. It varies
        over all devices that have a part of its gradient. Codes stay codes.
        """
        if not isinstance(value, Tracked):
            if not layout.leaf.is_matrix:
                return value
            if jnp.issubdtype(value.dtype, jnp.integer):
                return layout.gathered(value)
        return vary(layout.weight(value, self.dtype), layout.summed_axes)

    def weights(self, params: nnx.State) -> nnx.State:
        """`weight` of every matrix of a part of the model that is used more than once; vectors stay
        as they are.
        """

        def ready(param: nnx.Variable) -> nnx.Variable:
            return param.replace(self.weight(param)) if Leaf.of(param).is_matrix else param

        return jax.tree.map(ready, params, is_leaf=lambda node: isinstance(node, nnx.Variable))
