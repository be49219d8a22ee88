"""The ZeRO stages, leaf by leaf: what is split over `fsdp`, and the communication that this costs.

Words: a matrix is *whole* when each device along fsdp holds all of it, a *shard* is a device's
part along the matrix's outermost dimension: `embed`, or the rows of a table over the vocabulary.
Shards then lie one after the other in memory, and no gather or scatter transposes anything. Scales
and biases are small and stay whole at every stage.

| stage | parameters | gradient while it is summed | moments | on the wire |
|---|---|---|---|---|
| 0 | whole | whole | whole | all-reduce of the gradient |
| 1 | shard, held whole | whole | shard | gather of parameters, scatter of the gradient |
| 2 | shard, held whole | shard | shard | the same, with a scatter per microbatch and layer |
| 3 | shard | shard | shard | per microbatch and layer: two gathers, a scatter |

*Held whole*: a step begins with a gather in the format of the matmuls, and holds the result until
it ends; the float32 parameters stay in shards. At stages 2 and 3 backward scatters layer by layer,
and stage 3 gathers a layer's matrices in forward and in backward.

Over `data` everything is whole and the gradient is reduced once per step, after its scatter:
data x fsdp is hybrid sharding. A frozen leaf has no gradient and no moments, and is whole below
stage 3: in shards it would be gathered in every step though it never changes. Source: Rajbhandari
et al. 2019, arXiv:1910.02054.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax

from optimus_jax.config import Scatter
from optimus_jax.config.axes import FSDP
from optimus_jax.mesh.axes import BATCH, EMBED, LENGTH
from optimus_jax.mesh.formats import sum_format
from optimus_jax.mesh.leaf import Leaf


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Tracked:
    """A parameter in the loss at stages 1 and 2: the whole matrix is used, and `tracker` gets the
    gradient."""

    whole: Array
    """In the format of the matmuls."""
    tracker: Array
    """float32, whole at stage 1 and a shard at stage 2. Its values are not used."""


@dataclass(frozen=True)
class LeafLayout:
    """How one parameter is laid out on the mesh.

    Every method runs inside the step's `shard_map`, on a device's part of the array.
    """

    leaf: Leaf
    rules: Mapping[str, tuple[str, ...]]
    """Active rules."""
    zero: int
    scatter: Scatter = "sum"

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
    def is_stored_split(self) -> bool:
        """Whether a device has a shard between steps, if fsdp splits the leaf at all."""
        return self.zero >= split_from(self.leaf)

    @property
    def held_dim(self) -> int | None:
        """The dimension along which it is gathered once for a whole step, if it is."""
        return self.fsdp_dim if self.is_stored_split and self.zero < 3 else None

    @property
    def param_spec(self) -> jax.sharding.PartitionSpec:
        """Spec of the parameter between steps, of its moments and of the reduced gradient."""
        return self.spec(split=self.is_stored_split)

    @property
    def summed_axes(self) -> tuple[str, ...]:
        """Mesh axes whose devices hold different parts of this leaf's gradient sum."""
        own = {axis for axes in self.axes(split=False) for axis in axes}
        used_over = (BATCH, LENGTH, *self.leaf.used_over)
        summed = [axis for logical in used_over for axis in self.rules.get(logical, ())]
        return tuple(dict.fromkeys(axis for axis in summed if axis not in own))

    @property
    def is_gathered_by_layer(self) -> bool:
        """Whether a layer's part is gathered whenever the layer is reached."""
        return self.fsdp_dim is not None and self.zero >= 3

    def held(self, param: Array, dtype: jnp.dtype) -> Array:
        """The parameter as a step holds it, from its start: whole at stages 1 and 2."""
        return param if self.held_dim is None else _gathered(self.held_dim, dtype, param)

    def differentiated(self, param: Array, *, sums_by_layer: bool = False) -> Array:
        """The value that the loss is differentiated with respect to, marked as varying so that
        gradients stay local.

        Without the mark, the transpose would reduce the gradient in every microbatch.

        Args:
          sums_by_layer: whether backward sums gradients of the layers' matrices, layer by layer
            (models/layer_loop.py); at stage 1 they are summed after their scatter.
        """
        if sums_by_layer and self.leaf.is_matrix and self.leaf.is_in_layers and self.zero != 1:
            return param
        if self.held_dim is not None and self.zero == 1:
            shape = list(param.shape)
            shape[self.held_dim] *= lax.axis_size(FSDP)
            param = vary(jnp.zeros(shape, param.dtype), sorted(varying_axes(param)))
        return vary(param, self.summed_axes)

    def in_loss(self, differentiated: Array | None, held: Array) -> Array | Tracked:
        """The leaf as the model receives it; `weight` turns it into a matrix. `differentiated` is
        None if the leaf is frozen.
        """
        if differentiated is None:
            return held
        if self.held_dim is None:
            return differentiated
        return Tracked(self.used(held), differentiated)

    def used(self, held: Array) -> Array:
        """The parameter for a use whose gradient the caller sums itself: like `differentiated`, but
        never a shard at stages 1 and 2.
        """
        return vary(held, self.summed_axes)

    def scatter_gradient(self, gradient: Array) -> Array:
        """Scatter the gradient of a matrix as `weight`'s backward does."""
        return (
            gradient
            if self.fsdp_dim is None or self.zero < 2
            else _scatter(gradient, self.fsdp_dim, self.scatter)
        )

    def exchanges(
        self, gradient: Array, varying: Collection[str]
    ) -> tuple[Callable[[Array], Array], ...]:
        """The exchanges, one after the other, after which a layer's gradient is like `weight`'s
        backward gives it, and summed over the mesh axes along which it varies, but for `varying`.
        Their results are float32.
        """
        scatters = self.fsdp_dim is not None and self.zero >= 2
        axes = tuple(sorted(varying_axes(gradient) - set(varying)))
        stages: list[Callable[[Array], Array]] = [self.scatter_gradient] if scatters else []
        if axes:
            stages.append(lambda gradient: lax.psum(gradient.astype(jnp.float32), axes))
        return tuple(stages)

    def weight(self, leaf: Array | Tracked, dtype: jnp.dtype) -> Array:
        """The whole matrix in the format of the matmuls; its gradient is summed in float32.

        For f16 it is float32, and the product that uses it rounds it: a device's part of the
        gradient is then float32 too, and cannot overflow before the sum over devices.
        """
        if isinstance(leaf, Tracked):
            scattered = self.fsdp_dim if self.zero == 2 else None
            return _tracked_use(scattered, dtype, self.scatter, leaf.whole, leaf.tracker)
        if self.is_gathered_by_layer:
            return _gathered_use(self.fsdp_dim, dtype, self.scatter, leaf)
        return leaf.astype(sum_format(dtype))

    def gathered(self, leaf: Array) -> Array:
        """The whole of a leaf as it is stored; for what has no gradient."""
        if self.fsdp_dim is None or self.zero < 3:
            return leaf
        return lax.all_gather(leaf, FSDP, axis=self.fsdp_dim, tiled=True)

    def reduced(self, gradient: Array) -> Array:
        """The gradient summed over all devices, laid out like the moments. What backward has summed
        already does not vary any more.
        """
        axes = tuple(axis for axis in self.summed_axes if axis in varying_axes(gradient))
        if self.fsdp_dim is not None and self.zero >= 1:
            if self.zero == 1:
                gradient = lax.psum_scatter(
                    gradient, FSDP, scatter_dimension=self.fsdp_dim, tiled=True
                )
            axes = tuple(axis for axis in axes if axis != FSDP)
        return lax.psum(gradient, axes) if axes else gradient


def split_from(leaf: Leaf) -> int:
    """The stage from which a leaf that fsdp splits lies in shards between steps. Below stage 3 a
    step holds it whole.
    """
    return 1 if leaf.trained else 3


def vary(x: Array, axes: Sequence[str]) -> Array:
    """`x`, marked as varying over mesh axes that it does not vary over yet (the identity on
    data)."""
    missing = tuple(axis for axis in axes if axis not in varying_axes(x))
    return lax.pcast(x, missing, to="varying") if missing else x


def varying_axes(x: Array) -> frozenset[str]:
    """Mesh axes over which `x` may differ from device to device, inside `shard_map`."""
    return frozenset(jax.typeof(x).mat.varying)


def _scatter(cotangent: Array, dim: int, how: Scatter) -> Array:
    """A device's shard of the sum of all devices' gradients, float32. What is exchanged has the
    format of the given gradient, so that nothing is rounded that was not before.
    """
    if how == "sum":
        return lax.psum_scatter(
            cotangent.astype(jnp.float32), FSDP, scatter_dimension=dim, tiled=True
        )
    parts = lax.all_to_all(cotangent, FSDP, dim, dim, tiled=True)
    num_devices = lax.axis_size(FSDP)
    shard = parts.shape[dim] // num_devices
    by_device = parts.reshape(*parts.shape[:dim], num_devices, shard, *parts.shape[dim + 1 :])
    return by_device.sum(dim, dtype=jnp.float32)


def _gathered(dim: int, dtype: jnp.dtype, shard: Array) -> Array:
    """Cast, then gather: half the bytes in bf16. What is stored in bf16 is gathered as it is."""
    sent = shard if shard.dtype == jnp.bfloat16 else shard.astype(dtype)
    return lax.all_gather(sent, FSDP, axis=dim, tiled=True)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _gathered_use(dim: int, dtype: jnp.dtype, how: Scatter, shard: Array) -> Array:
    """Forward gathers the matrix; backward scatters its gradient, summed in float32."""
    del how
    return _gathered(dim, dtype, shard).astype(sum_format(dtype))


_gathered_use.defvjp(
    lambda dim, dtype, how, shard: (_gathered_use(dim, dtype, how, shard), None),
    lambda dim, dtype, how, _, cotangent: (_scatter(cotangent, dim, how),),
)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _tracked_use(
    dim: int | None, dtype: jnp.dtype, how: Scatter, whole: Array, tracker: Array
) -> Array:
    """Forward uses the whole matrix; backward gives its gradient to the tracker, in float32, and
    scattered along `dim`.
    """
    del how, tracker
    return whole.astype(sum_format(dtype))


_tracked_use.defvjp(
    lambda dim, dtype, how, whole, tracker: (_tracked_use(dim, dtype, how, whole, tracker), None),
    lambda dim, dtype, how, _, cotangent: (
        None,
        cotangent.astype(jnp.float32) if dim is None else _scatter(cotangent, dim, how),
    ),
)
