"""Adapters: what is trained beside the projections of a layer while these are frozen.

LoRA (Hu et al. 2021, arXiv:2106.09685) adds a product of two narrow matrices to a projection. IA3
(Liu et al. 2022, arXiv:2205.05638) scales keys, values and the hidden values of the feed-forward.
Arithmetic and initial values are those of PEFT's layers of these names.

An adapter needs no collective of its own. Where devices share a projection's columns, each has all
of A, and its own columns of B. Where they share its rows, each has its own rows of A, and their
results are parts of the sum that follows the projection.

Shapes: B batch, L length, D embed, R rank.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import get_args

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax

from optimus_jax.config.tuning import Projection, Tuning
from optimus_jax.mesh.axes import EMBED, RANK
from optimus_jax.mesh.collectives import Collectives
from optimus_jax.models.layers import constant, keep_mask, parameter, scaled
from optimus_jax.models.products import project, project_back

ROW_PARALLEL: tuple[Projection, ...] = ("out", "down")
"""The projections that lead back to the residual stream: devices share their rows."""
SITES: tuple[Projection, ...] = get_args(Projection)
"""The place of a projection says which dropout mask its adapter draws."""
STREAM = 2**31 - 1
"""Separates the random numbers of adapters from those of a layer's other parameters, which draw
with small counts."""


@dataclass(frozen=True)
class AdapterRun:
    """The inputs of an adapter in a forward pass besides activations."""

    comm: Collectives
    keys_B: Array | None = None
    """Dropout key of every example, for the adapters of one layer; None: no dropout."""
    own: Callable[[Array], Array] = lambda leaf: leaf
    """The part of a leaf [..., heads, head_dim] that this device's results need."""


class LowRank(nnx.Module):
    """LoRA: y + scale * B A x, beside a projection of x with result y.

    Args:
      embed: width of the residual stream.
      shape, dims: the projection's other dimensions, and their logical axes.
      used_over: logical axis over whose devices the projection is split.
    """

    def __init__(
        self,
        tuning: Tuning,
        projection: Projection,
        embed: int,
        shape: Sequence[int],
        dims: Sequence[str],
        *,
        used_over: str,
        rngs: nnx.Rngs,
    ):
        self.scale, self.dropout, self.axis = tuning.scale, tuning.dropout, used_over
        self.is_row_parallel, self.site = projection in ROW_PARALLEL, SITES.index(projection)
        narrow = (embed, tuning.rank), (EMBED, RANK)
        wide = (tuning.rank, *shape), (RANK, *dims)
        (first, first_dims), (second, second_dims) = (
            (wide, narrow) if self.is_row_parallel else (narrow, wide)
        )
        role = "matrix_back" if self.is_row_parallel else "matrix"
        bound = (prod(shape) if self.is_row_parallel else embed) ** -0.5
        drawn = jax.random.uniform(rngs.adapters(), first, jnp.float32, -bound, bound)
        self.a = parameter(drawn, first_dims, role, "adapter", (used_over,))
        self.b = constant(0.0, second, second_dims, role, "adapter", used_over=(used_over,))

    def input(self, x: Array) -> Array:
        """What the projection multiplies, given its input."""
        return x

    def result(self, y: Array, x: Array, run: AdapterRun) -> Array:
        """[B, L, ...] of the projection with this adapter, given its result `y` of `x`."""
        comm = run.comm
        a, b = comm.weight(self.a), run.own(comm.weight(self.b))
        if self.is_row_parallel:
            inner = project_back(self._dropped(x, run), a, comm.dtype, result=comm.sums)
            # In f16, a part of a sum stays float32 (mesh/formats.py).
            return y + project_back(inner * self.scale, b, comm.sums)
        inner = project(self._dropped(x, run), a, comm.dtype, result=comm.sums)
        return y + project(inner * self.scale, b, comm.dtype, result=y.dtype)

    def _dropped(self, x: Array, run: AdapterRun) -> Array:
        """The input after dropout; each example has its own mask, whichever device has it."""
        if run.keys_B is None or not self.dropout:
            return x
        keys = jax.vmap(jax.random.fold_in, (0, None))(run.keys_B, self.site)
        tokens, size, *others = x.shape[1:]
        if not self.is_row_parallel:
            keep = keep_mask(keys, (tokens, size), self.dropout)
        else:
            whole = (tokens, run.comm.size(size, self.axis), *others)
            first = run.comm.offset(size, self.axis)
            keep = lax.dynamic_slice_in_dim(keep_mask(keys, whole, self.dropout), first, size, 2)
        return jnp.where(keep, x / (1 - self.dropout), jnp.zeros_like(x))


class Scaling(nnx.Module):
    """IA3: a factor for every element of a projection's result, or of its input if it leads back to
    the residual stream. The arguments are those of `LowRank`.
    """

    def __init__(
        self, projection: Projection, shape: Sequence[int], dims: Sequence[str], *, used_over: str
    ):
        self.is_row_parallel = projection in ROW_PARALLEL
        self.scale = constant(1.0, shape, dims, "scale", "adapter", used_over=(used_over,))

    def input(self, x: Array) -> Array:
        """As `LowRank.input`."""
        return scaled(x, self.scale[...]) if self.is_row_parallel else x

    def result(self, y: Array, x: Array, run: AdapterRun) -> Array:
        """As `LowRank.result`."""
        return y if self.is_row_parallel else scaled(y, run.own(self.scale[...]))


Adapter = LowRank | Scaling


def adapter_of(
    tuning: Tuning,
    projection: Projection,
    embed: int,
    shape: Sequence[int],
    dims: Sequence[str],
    *,
    used_over: str,
    rngs: nnx.Rngs,
) -> Adapter | None:
    """The adapter of a projection, if it has one; arguments are those of `LowRank`."""
    if not tuning.adapts(projection):
        return None
    if tuning.method == "ia3":
        return Scaling(projection, shape, dims, used_over=used_over)
    return LowRank(tuning, projection, embed, shape, dims, used_over=used_over, rngs=rngs)


def adapted_input(adapter: Adapter | None, x: Array) -> Array:
    """What a projection multiplies, given its input."""
    return x if adapter is None else adapter.input(x)


def adapted(adapter: Adapter | None, y: Array, x: Array, run: AdapterRun) -> Array:
    """The result of a projection with its adapter, given its result `y` of `x`."""
    return y if adapter is None else adapter.result(y, x, run)


def block_rngs(tuning: Tuning, key: Array) -> nnx.Rngs:
    """The random numbers of a layer's parameters. Those of a seed do not depend on adapters."""
    if not tuning.has_adapters:
        return nnx.Rngs(params=key)
    return nnx.Rngs(params=key, adapters=jax.random.fold_in(key, STREAM))
