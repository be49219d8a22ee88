"""The ZeRO stages, leaf by leaf: what is split over `fsdp`, and the communication that this costs.

Words: a matrix is *whole* when each device along fsdp holds all of it, a *shard* is a device's
part along the matrix's outermost dimension: `embed`, or the rows of a table over the vocabulary.
Shards then lie one after the other in memory, and no gather or scatter transposes anything. Scales
and biases are small and stay whole at every stage.

| stage | parameters | gradient while it is summed | moments | on the wire |
|---|---|---|---|---|
| 0 | whole | whole | whole | all-reduce of the gradient |
| 1 | whole | whole | shard | reduce-scatter of the gradient, all-gather of new parameters |
| 2 | whole | shard, scattered layer by layer in backward | shard | the same, once per microbatch |
| 3 | shard | shard | shard | per microbatch and layer: gather in forward and backward, scatter |

Over `data` everything is whole and the gradient is reduced once per step, after its scatter:
data x fsdp is hybrid sharding. A frozen leaf is laid out as a parameter and has nothing else of
this. Source: Rajbhandari et al. 2019, arXiv:1910.02054.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax

from optimus_jax.config.axes import FSDP
from optimus_jax.mesh.axes import BATCH, EMBED, LENGTH
from optimus_jax.mesh.formats import sum_format
from optimus_jax.mesh.leaf import Leaf


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Tracked:
    """A parameter in the loss at stage 2: the whole matrix is used, the shard gets the gradient."""

    whole: Array
    shard: Array


@dataclass(frozen=True)
class LeafLayout:
    """How one parameter is laid out on the mesh.

    Every method runs inside the step's `shard_map`, on a device's part of the array.
    """

    leaf: Leaf
    rules: Mapping[str, tuple[str, ...]]
    """Active rules."""
    zero: int

    @property
    def fsdp_dim(self) -> int | None:
        """The dimension that fsdp splits, if any."""
        return self.leaf.stored_dim if FSDP in self.rules.get(EMBED, ()) else None

    def axes(self, *, split: bool) -> tuple[tuple[str, ...], ...]:
        """Mesh axes of every dimension; `split` says whether fsdp splits the leaf."""
        axes = [() if dim == EMBED else self.rules.get(dim, ()) for dim in self.leaf.dims]
        if self.fsdp_dim is not None and split:
            axes[self.fsdp_dim] = (*axes[self.fsdp_dim], FSDP)
        return tuple(axes)

    def spec(self, *, split: bool) -> jax.sharding.PartitionSpec:
        """`axes` as a PartitionSpec."""
        return jax.sharding.PartitionSpec(*(axes or None for axes in self.axes(split=split)))

    @property
    def param_spec(self) -> jax.sharding.PartitionSpec:
        """Spec of the parameter between steps."""
        return self.spec(split=self.zero >= 3)

    @property
    def moment_spec(self) -> jax.sharding.PartitionSpec:
        """Spec of the optimizer's moments and of the reduced gradient."""
        return self.spec(split=self.zero >= 1)

    @property
    def summed_axes(self) -> tuple[str, ...]:
        """Mesh axes whose devices hold different parts of this leaf's gradient sum."""
        own = {axis for axes in self.axes(split=False) for axis in axes}
        used_over = (BATCH, LENGTH, *self.leaf.used_over)
        summed = [axis for logical in used_over for axis in self.rules.get(logical, ())]
        return tuple(dict.fromkeys(axis for axis in summed if axis not in own))

    def differentiated(self, param: Array) -> Array:
        """The value that the loss is differentiated with respect to, marked as varying so that
        gradients stay local.

        Without the mark, the transpose would reduce the gradient in every microbatch.
        """
        if self.fsdp_dim is not None and self.zero == 2:
            param = _shard(param, self.fsdp_dim)
        return vary(param, self.summed_axes)

    def in_loss(self, differentiated: Array | None, param: Array) -> Array | Tracked:
        """The leaf as the model receives it; `weight` turns it into a matrix. `differentiated` is
        None if the leaf is frozen.
        """
        if differentiated is None:
            return param
        if self.fsdp_dim is not None and self.zero == 2:
            return Tracked(vary(param, self.summed_axes), differentiated)
        return differentiated

    def used(self, param: Array) -> Array:
        """The parameter for a use whose gradient the caller sums itself: like `differentiated`, but
        never a shard.
        """
        return vary(param, self.summed_axes)

    def scatter_gradient(self, gradient: Array) -> Array:
        """Scatter the gradient of a matrix, which the caller has summed in float32, as `weight`'s
        backward does.
        """
        return (
            gradient
            if self.fsdp_dim is None or self.zero < 2
            else _scatter(gradient, self.fsdp_dim)
        )

    def weight(self, leaf: Array | Tracked, dtype: jnp.dtype) -> Array:
        """The whole matrix in the format of the matmuls; its gradient is summed in float32.

        For f16 it is float32, and the product that uses it rounds it: a device's part of the
        gradient is then float32 too, and cannot overflow before the sum over devices.
        """
        fsdp_dim = self.fsdp_dim
        if isinstance(leaf, Tracked):
            return _scattered_use(fsdp_dim, dtype, leaf.whole, leaf.shard)
        if fsdp_dim is not None and self.zero >= 3:
            return _gathered_use(fsdp_dim, dtype, leaf)
        return leaf.astype(sum_format(dtype))

    def gathered(self, leaf: Array) -> Array:
        """The whole of a leaf as it is stored; for what has no gradient."""
        if self.fsdp_dim is None or self.zero < 3:
            return leaf
        return lax.all_gather(leaf, FSDP, axis=self.fsdp_dim, tiled=True)

    def reduced(self, gradient: Array) -> Array:
        """The gradient summed over all devices, laid out like the moments."""
        axes = self.summed_axes
        if self.fsdp_dim is not None and self.zero >= 1:
            if self.zero == 1:
                gradient = lax.psum_scatter(
                    gradient, FSDP, scatter_dimension=self.fsdp_dim, tiled=True
                )
            axes = tuple(axis for axis in axes if axis != FSDP)
        return lax.psum(gradient, axes) if axes else gradient

    def updated_part(self, param: Array) -> Array:
        """The part of a parameter that this device updates, laid out like the moments."""
        return (
            _shard(param, self.fsdp_dim)
            if self.fsdp_dim is not None and self.zero in (1, 2)
            else param
        )

    def gather_updated(self, part: Array) -> Array:
        """The inverse of `updated_part`."""
        if self.fsdp_dim is not None and self.zero in (1, 2):
            return lax.all_gather(part, FSDP, axis=self.fsdp_dim, tiled=True, to="invarying")
        return part


def vary(x: Array, axes: Sequence[str]) -> Array:
    """`x`, marked as varying over mesh axes that it does not vary over yet (the identity on
    data)."""
    missing = tuple(axis for axis in axes if axis not in varying_axes(x))
    return lax.pcast(x, missing, to="varying") if missing else x


def varying_axes(x: Array) -> frozenset[str]:
    """Mesh axes over which `x` may differ from device to device, inside `shard_map`."""
    return frozenset(jax.typeof(x).mat.varying)


def _shard(whole: Array, dim: int) -> Array:
    size = whole.shape[dim] // lax.axis_size(FSDP)
    return lax.dynamic_slice_in_dim(whole, lax.axis_index(FSDP) * size, size, dim)


def _scatter(cotangent: Array, dim: int) -> Array:
    return lax.psum_scatter(cotangent.astype(jnp.float32), FSDP, scatter_dimension=dim, tiled=True)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _gathered_use(dim: int, dtype: jnp.dtype, shard: Array) -> Array:
    """Cast, then gather: half the bytes in bf16; the gradient's scatter sums in float32. What is
    stored in bf16 is gathered as it is.
    """
    sent = shard if shard.dtype == jnp.bfloat16 else shard.astype(dtype)
    return lax.all_gather(sent, FSDP, axis=dim, tiled=True).astype(sum_format(dtype))


_gathered_use.defvjp(
    lambda dim, dtype, shard: (_gathered_use(dim, dtype, shard), None),
    lambda dim, dtype, _, cotangent: (_scatter(cotangent, dim),),
)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _scattered_use(dim: int, dtype: jnp.dtype, whole: Array, shard: Array) -> Array:
    """Forward uses the whole matrix; backward scatters its gradient to the shard."""
    del shard
    return whole.astype(sum_format(dtype))


_scattered_use.defvjp(
    lambda dim, dtype, whole, shard: (whole.astype(sum_format(dtype)), None),
    lambda dim, dtype, _, cotangent: (None, _scatter(cotangent, dim)),
)
