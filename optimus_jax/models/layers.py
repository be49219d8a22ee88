"""The small parts of a model: parameters with logical axes, norms, biases, dropout, the embedding.

Shapes: B batch, L length, D embed, V vocab (this device's part).
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from optimus_jax.config.tuning import ParameterGroup, Tuning
from optimus_jax.mesh.axes import EMBED, LENGTH, NORM, VOCAB
from optimus_jax.mesh.collectives import Collectives
from optimus_jax.mesh.formats import COMPUTE_DTYPES
from optimus_jax.mesh.leaf import Leaf, Role
from optimus_jax.mesh.quantised import QuantisedMatrix


def normal(
    rngs: nnx.Rngs,
    shape: Sequence[int],
    dims: Sequence[str],
    std: float,
    role: Role,
    group: ParameterGroup,
    *,
    used_over: Sequence[str] = (),
) -> nnx.Param:
    """A float32 parameter drawn from N(0, std^2). The other arguments are those of `Leaf`."""
    value = jax.random.normal(rngs.params(), tuple(shape), jnp.float32) * std
    return parameter(value, dims, role, group, used_over)


def constant(
    value: float,
    shape: Sequence[int],
    dims: Sequence[str],
    role: Role,
    group: ParameterGroup,
    *,
    used_over: Sequence[str] = (),
) -> nnx.Param:
    """A float32 parameter that is initially `value` everywhere. The other arguments are those of
    `Leaf`.
    """
    return parameter(jnp.full(tuple(shape), value, jnp.float32), dims, role, group, used_over)


def parameter(
    value: Array, dims: Sequence[str], role: Role, group: ParameterGroup, used_over: Sequence[str]
) -> nnx.Param:
    """A parameter with a value. The other arguments are those of `Leaf`; `freeze` may say later
    that it is not trained.
    """
    return Leaf(tuple(dims), role, group, tuple(used_over)).variable(value)


def freeze(module: nnx.Module, tuning: Tuning) -> None:
    """Mark the parameters that a run does not train, and store matrices among them in the format
    that it asks for.
    """
    modules = dict(nnx.iter_graph(module))
    for path, node in modules.items():
        if not isinstance(node, nnx.Param) or tuning.trains((leaf := Leaf.of(node)).group):
            continue
        node.set_metadata(trained=False)
        if not leaf.is_matrix:
            continue
        stored = tuning.stored_format(leaf.group)
        if stored == "nf4" or stored == "int8":
            setattr(modules[path[:-1]], str(path[-1]), QuantisedMatrix(node, stored))
        else:
            node.set_value(node.get_value().astype(COMPUTE_DTYPES[stored]))


class Norm(nnx.Module):
    """LayerNorm (with bias) or RMSNorm (without) over the last dimensions, computed in float32.

    Args:
      kind: `layer`, `rms`, or `rms_plus_one`, whose scale is stored minus one.
      shape, dims: dimensions that are normed, the last ones of the input, and their logical axes.
      used_over: as in `Leaf`.
    """

    def __init__(
        self,
        kind: str,
        shape: Sequence[int],
        epsilon: float,
        dims: Sequence[str] = (NORM,),
        *,
        used_over: Sequence[str] = (),
    ):
        self.centre, self.plus_one = kind == "layer", kind == "rms_plus_one"
        self.epsilon = epsilon
        first = 0.0 if self.plus_one else 1.0
        self.scale = constant(first, shape, dims, "scale", "norm", used_over=used_over)
        self.bias = nnx.data(
            constant(0.0, shape, dims, "bias", "norm", used_over=used_over) if self.centre else None
        )

    def __call__(
        self,
        x: Array,
        dtype: jnp.dtype | None = None,
        *,
        scale: Array | None = None,
        mean: Callable[[Array], Array] | None = None,
    ) -> Array:
        """[..., *shape] -> the same in `dtype`; None: the dtype of the input.

        A device that has only a part of the normed dimensions gives its part of the scale, and
        `mean`, the mean over all of them, kept with size 1.
        """
        scale = self.scale[...] if scale is None else scale
        if mean is None:
            dims = tuple(range(-scale.ndim, 0))
            mean = lambda y: y.mean(dims, keepdims=True)  # noqa: E731
        y = x.astype(jnp.float32)
        if self.centre:
            y = y - mean(y)
        y = y * jax.lax.rsqrt(mean(y * y) + self.epsilon)
        scale = scale.reshape((1,) * (y.ndim - scale.ndim) + scale.shape)
        y = y * (1 + scale if self.plus_one else scale)
        if self.bias is not None:
            y = y + _broadcastable(self.bias, y.ndim)
        return y.astype(x.dtype if dtype is None else dtype)


def add_bias(x: Array, bias: nnx.Param | None) -> Array:
    """`x` plus a bias over its last dimensions, or `x` if the bias is None.

    Added in float32, so that the bias's gradient is a float32 sum over tokens; in bf16 a sum over
    a few hundred tokens loses 3%.
    """
    return (
        x
        if bias is None
        else (x.astype(jnp.float32) + _broadcastable(bias, x.ndim)).astype(x.dtype)
    )


def scaled(x: Array, scale: Array) -> Array:
    """`x` times a scale over its last dimensions; in float32, as `add_bias` adds."""
    scale = scale.reshape((1,) * (x.ndim - scale.ndim) + scale.shape)
    return (x.astype(jnp.float32) * scale).astype(x.dtype)


def _broadcastable(param: nnx.Param, ndim: int) -> Array:
    value = param[...]
    return value.reshape((1,) * (ndim - value.ndim) + value.shape)


class Embedding(nnx.Module):
    """Table with one vector per token id; also the output head of a model with tied weights."""

    def __init__(
        self,
        rows: int,
        dim: int,
        std: float,
        group: ParameterGroup,
        *,
        vocab_size: int,
        rngs: nnx.Rngs,
    ):
        table = normal(rngs, (rows, dim), (VOCAB, EMBED), std, "table", group)
        # Padding rows are zero and stay zero: no token selects them and the loss masks them.
        table[...] = jnp.where(jnp.arange(rows)[:, None] < vocab_size, table[...], 0)
        self.table = table

    def __call__(self, tokens_BL: Array, comm: Collectives) -> Array:
        """int32 [B, L] -> [B, L, D]: the sum over devices; each looks up only the rows it holds."""
        table_VD = self.table[...]
        num_rows = table_VD.shape[0]
        local = tokens_BL - comm.offset(num_rows, VOCAB)
        if VOCAB not in comm.rules:
            return rows_of(table_VD, local, comm.dtype)
        here = (local >= 0) & (local < num_rows)
        x_BLD = rows_of(table_VD, jnp.clip(local, 0, num_rows - 1), comm.dtype)
        # Each row comes from one shard and is zero on the others, so this sum cannot overflow.
        return comm.sum_stream(jnp.where(here[..., None], x_BLD, jnp.zeros_like(x_BLD)), VOCAB)


def rows_of(table_VD: Array, index_BL: Array, dtype: jnp.dtype) -> Array:
    """[V, D], int32 [B, L] -> [B, L, D] in `dtype`.

    The gradient of a row is summed in float32 over its uses, whatever `dtype` is.
    """
    return jnp.take(table_VD.astype(jnp.float32), index_BL, axis=0).astype(dtype)


def sinusoids(positions_BL: Array, dim: int) -> Array:
    """Sines, then cosines, float32 [B, L, dim], of every position (arXiv:1706.03762); one cosine
    more if `dim` is odd."""
    rates = 10_000.0 ** -(np.arange(-(-dim // 2)) / max(1, (dim - 1) // 2))
    angle = positions_BL[..., None].astype(jnp.float32) * rates.astype(np.float32)[None, None]
    return jnp.concatenate((jnp.sin(angle[..., : dim // 2]), jnp.cos(angle)), -1)


def dropout(
    x_BLD: Array,
    probability: float,
    keys_B: Array | None,
    site: Array | int,
    comm: Collectives,
) -> Array:
    """Zero entries of `x_BLD` with `probability` and scale the rest; each example has its own key.

    Args:
      x_BLD: the residual stream, or this device's tokens of it.
      keys_B: one key per example, or None for no dropout.
      site: number of the place in the model; every place draws its own mask.
    """
    if keys_B is None or probability == 0:
        return x_BLD
    _, tokens, width = x_BLD.shape
    # The mask of all tokens is drawn, so that it does not depend on which device has which.
    keep_BLD = comm.local_tokens(
        keep_mask(
            jax.vmap(jax.random.fold_in, (0, None))(keys_B, site),
            (comm.size(tokens, LENGTH), width),
            probability,
        )
    )
    return jnp.where(keep_BLD, x_BLD / (1 - probability), jnp.zeros_like(x_BLD))


def keep_mask(keys: Array, shape: tuple[int, ...], probability: float) -> Array:
    """Dropout masks, bool [len(keys), *shape], False with `probability`."""
    return jax.vmap(lambda key: jax.random.bernoulli(key, 1 - probability, shape))(keys)
