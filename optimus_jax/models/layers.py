"""The small parts of a model: parameters with logical axes, norms, biases, dropout, the embedding.

Shapes: B batch, L length, D embed, V vocab (this device's part).
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from optimus_jax.mesh.axes import EMBED, NORM, VOCAB
from optimus_jax.mesh.collectives import Collectives


def normal(rngs: nnx.Rngs, shape: Sequence[int], names: Sequence[str], std: float) -> nnx.Param:
    """A float32 parameter drawn from N(0, std^2), with logical axes `names`."""
    return nnx.Param(
        jax.random.normal(rngs.params(), tuple(shape), jnp.float32) * std, out_sharding=tuple(names)
    )


def constant(value: float, shape: Sequence[int], names: Sequence[str]) -> nnx.Param:
    """A float32 parameter with logical axes `names` that is initially `value` everywhere."""
    return nnx.Param(jnp.full(tuple(shape), value, jnp.float32), out_sharding=tuple(names))


class Norm(nnx.Module):
    """LayerNorm (with bias) or RMSNorm (without) over the last dimension, computed in float32."""

    def __init__(self, kind: str, dim: int, epsilon: float):
        self.centre = kind == "layer"
        self.epsilon = epsilon
        self.scale = constant(1.0, (dim,), (NORM,))
        self.bias = nnx.data(constant(0.0, (dim,), (NORM,)) if self.centre else None)

    def __call__(self, x_BLD: Array, dtype: jnp.dtype | None = None) -> Array:
        """[..., D] -> [..., D] in `dtype`; None: the dtype of the input."""
        x = x_BLD.astype(jnp.float32)
        if self.centre:
            x = x - x.mean(-1, keepdims=True)
        x = x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + self.epsilon)
        x = x * _broadcastable(self.scale, x.ndim)
        if self.bias is not None:
            x = x + _broadcastable(self.bias, x.ndim)
        return x.astype(x_BLD.dtype if dtype is None else dtype)


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


def _broadcastable(param: nnx.Param, ndim: int) -> Array:
    value = param[...]
    return value.reshape((1,) * (ndim - value.ndim) + value.shape)


class Embedding(nnx.Module):
    """Table with one vector per token id; also the output head of a model with tied weights."""

    def __init__(self, rows: int, dim: int, std: float, *, vocab_size: int, rngs: nnx.Rngs):
        table = normal(rngs, (rows, dim), (VOCAB, EMBED), std)
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
        return comm.sum(jnp.where(here[..., None], x_BLD, jnp.zeros_like(x_BLD)), VOCAB)


def rows_of(table_VD: Array, index_BL: Array, dtype: jnp.dtype) -> Array:
    """[V, D], int32 [B, L] -> [B, L, D] in `dtype`.

    The gradient of a row is summed in float32 over its uses, whatever `dtype` is.
    """
    return jnp.take(table_VD.astype(jnp.float32), index_BL, axis=0).astype(dtype)


def dropout(x: Array, probability: float, keys_B: Array | None, site: Array | int) -> Array:
    """Zero entries of `x` with `probability` and scale the rest; each example has its own key.

    Args:
      x: [B, ...].
      keys_B: one key per example, or None for no dropout.
      site: number of the place in the model; every place draws its own mask.
    """
    if keys_B is None or probability == 0:
        return x
    keep = keep_mask(
        jax.vmap(jax.random.fold_in, (0, None))(keys_B, site), x.shape[1:], probability
    )
    return jnp.where(keep, x / (1 - probability), jnp.zeros_like(x))


def keep_mask(keys: Array, shape: tuple[int, ...], probability: float) -> Array:
    """Dropout masks, bool [len(keys), *shape], False with `probability`."""
    return jax.vmap(lambda key: jax.random.bernoulli(key, 1 - probability, shape))(keys)
