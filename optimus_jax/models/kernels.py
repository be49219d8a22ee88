"""The core of attention, softmax(scale q k) v, and the kernels that compute it.

`xla` is implemented here: queries are processed in blocks, and a block skips all keys after its
last query, so that about half of the masked work is never done. Forward saves the attention weights
for backward, which needs no mask. `cudnn` is NVIDIA's fused kernel, called through JAX.

Shapes: B batch, L length of queries, T length of keys, H query heads, G key/value heads, K
head_dim, R rows of a key/value head's queries (its query heads one after the other). H and G count
this device's heads only.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from optimus_jax.config import AttentionKernel, Config, Precision
from optimus_jax.devices.accelerators import AMPERE, HOPPER
from optimus_jax.errors import PlanError, explain
from optimus_jax.mesh.topology import Topology
from optimus_jax.models.families import features_of
from optimus_jax.models.layers import keep_mask

MASKED = -1e30
"""Score of a key that a query may not see: exp() of it is zero in every format, without NaN."""

CUDNN_HEAD_DIM, CUDNN_HEAD_DIM_HOPPER = 128, 256
"""Widest heads of cuDNN's kernel before Hopper, and from it on."""
MAX_BLOCKS, MIN_BLOCK = 8, 64
"""More blocks skip more of the masked half, but smaller blocks make matmuls inefficient."""


def choose_kernel(config: Config, topology: Topology, precision: Precision) -> AttentionKernel:
    """The attention kernel to use. Raises PlanError if the requested one cannot run."""
    wanted, obstacle = config.parallel.attention, _cudnn_obstacle(config, topology, precision)
    if wanted == "cudnn" and obstacle:
        raise PlanError(
            explain(
                "the cuDNN attention kernel cannot run here",
                given=obstacle,
                do="use --set parallel.attention=xla",
            )
        )
    if wanted == "auto":
        return "xla" if obstacle else "cudnn"
    return wanted


def _cudnn_obstacle(config: Config, topology: Topology, precision: Precision) -> str | None:
    """Why JAX's cuDNN kernel cannot run in training; None: it can."""
    capability, model = topology.compute_capability, config.model
    if topology.platform not in ("gpu", "cuda"):
        return f"it runs on GPUs, and this platform is {topology.platform}"
    if capability is None or capability < AMPERE:
        return (
            f"it needs compute capability {_dotted(AMPERE)} or higher, and that of"
            f" {topology.device_kind} is {_dotted(capability) if capability else 'not known'}"
        )
    if precision == "f32":
        return "it computes in bf16 or f16, and the precision is f32"
    if model.dropout:
        return f"it has no dropout on attention weights, and model.dropout is {model.dropout}"
    widest = CUDNN_HEAD_DIM_HOPPER if capability >= HOPPER else CUDNN_HEAD_DIM
    if model.head_dim % 8 or model.head_dim > widest:
        return (
            f"its heads are multiples of 8 up to {widest} wide on this GPU, and head_dim is"
            f" {model.head_dim}"
        )
    if features_of(model).attention_softcap:
        return f"it has no cap on scores, and {model.name} has one"
    if (config.data.respect_documents or features_of(model).window) and config.seq_len % 2:
        return (
            "with documents or windows it computes even numbers of tokens, and data.seq_len is"
            f" {config.seq_len}"
        )
    return None


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


@dataclass(frozen=True)
class Visibility:
    """Which keys a query sees: those not after it, with a window the nearest of them and, with
    documents, those of its own document."""

    segments_BL: Array | None = None
    """Document of every position, int32 [B, L]; None: each example is one document."""
    query_offset: Array | int = 0
    """Position of the first query among the keys (above 0 when a cache holds earlier keys)."""
    window: Array | None = None
    """Keys that a query sees, its own included, int32 scalar; None: all."""

    def mask(self, queries: slice, num_keys: int) -> Array:
        """bool [B or 1, L, T]: which of the first `num_keys` keys each query in `queries` sees."""
        length = queries.stop - queries.start
        query = (
            self.query_offset
            + queries.start
            + lax.broadcasted_iota(jnp.int32, (1, length, num_keys), 1)
        )
        key = lax.broadcasted_iota(jnp.int32, (1, length, num_keys), 2)
        visible = query >= key
        if self.window is not None:
            visible = visible & (query - key < self.window)
        if self.segments_BL is not None:
            visible = visible & (
                self.segments_BL[:, queries, None] == self.segments_BL[:, None, :num_keys]
            )
        return visible


def attend(
    q_BLHK: Array,
    k_BTGK: Array,
    v_BTGK: Array,
    visibility: Visibility,
    *,
    kernel: AttentionKernel | Literal["traced_cudnn"],
    scale: float | None = None,
    softcap: float = 0.0,
    dropout: float = 0.0,
    keys_BH: Array | None = None,
) -> Array:
    """Attention of every query to the keys it sees, [B, L, H, K]; the softmax is in float32.

    Args:
      k_BTGK: keys; like values, they are rounded to the format of the queries, but their gradient
        has their own format.
      kernel: how it is computed; `traced_cudnn` computes nothing and saves what cuDNN's kernel
        saves, to be traced on machines without cuDNN.
      scale: factor of scores; None: 1 / sqrt(K).
      softcap: scaled scores s become c tanh(s / c) (kernel xla only); 0: no cap.
      dropout: probability that a weight is zeroed (kernel xla only).
      keys_BH: dropout key of every example and head; None: no dropout.
    """
    length, num_keys = q_BLHK.shape[1], k_BTGK.shape[1]
    factor: float = q_BLHK.shape[-1] ** -0.5 if scale is None else scale
    if kernel in ("cudnn", "traced_cudnn"):
        assert length == num_keys, (
            "this kernel knows no cache: its causal mask begins at the first key"
        )
        mask = (
            None
            if visibility.segments_BL is None and visibility.window is None
            else visibility.mask(slice(0, length), num_keys)[:, None]
        )
        k_BTGK, v_BTGK = k_BTGK.astype(q_BLHK.dtype), v_BTGK.astype(q_BLHK.dtype)
        if kernel == "traced_cudnn":
            bias = None if mask is None else jnp.where(mask, 0, MASKED).astype(q_BLHK.dtype)
            return _traced_cudnn(q_BLHK, k_BTGK, v_BTGK, bias)
        return jax.nn.dot_product_attention(
            q_BLHK,
            k_BTGK,
            v_BTGK,
            mask=mask,
            scale=factor,
            is_causal=True,
            implementation="cudnn",
        )
    heads, groups = q_BLHK.shape[2], k_BTGK.shape[2]
    q_BHLK, k_BGTK, v_BGTK = (x.transpose(0, 2, 1, 3) for x in (q_BLHK, k_BTGK, v_BTGK))
    size = block_size(length) if length == num_keys else length
    masks, keys = [], []
    for start in range(0, length, size):
        seen = start + size if length == num_keys else num_keys
        masks.append(
            _repeat_rows(visibility.mask(slice(start, start + size), seen), heads // groups)
        )
        keys.append(
            None
            if keys_BH is None or not dropout
            else jax.vmap(jax.vmap(jax.random.fold_in, (0, None)), (0, None))(keys_BH, start)
        )
    how = _Core(dropout, k_BTGK.dtype, factor, softcap)
    out_BHLK: Any = _attend_in_blocks(how, q_BHLK, k_BGTK, v_BGTK, masks, keys)
    return out_BHLK.transpose(0, 2, 1, 3)


@jax.custom_vjp
def _traced_cudnn(q_BLHK: Array, k_BTGK: Array, v_BTGK: Array, bias: Array | None) -> Array:
    return _traced_cudnn_forward(q_BLHK, k_BTGK, v_BTGK, bias)[0]


def _traced_cudnn_forward(
    q_BLHK: Array, k_BTGK: Array, v_BTGK: Array, bias: Array | None
) -> tuple[Array, tuple]:
    """cuDNN saves a float32 for every query and head, from which backward computes the weights
    again (arXiv:2205.14135).
    """
    out_BLHK, statistics_BHL = _fused_forward(q_BLHK, k_BTGK, v_BTGK)
    return out_BLHK, (q_BLHK, k_BTGK, v_BTGK, bias, statistics_BHL, out_BLHK)


def _traced_cudnn_backward(saved: tuple, d_out_BLHK: Array) -> tuple:
    q_BLHK, k_BTGK, v_BTGK, bias, statistics_BHL, out_BLHK = saved
    d_bias = None if bias is None else jnp.zeros_like(bias)
    return *_fused_backward(q_BLHK, k_BTGK, v_BTGK, statistics_BHL, out_BLHK, d_out_BLHK), d_bias


def _fused_forward(q_BLHK: Array, k_BTGK: Array, v_BTGK: Array) -> tuple[Array, Array]:
    # Both directions use all that the kernel does, so that no part of it is taken for unused.
    out_BLHK = q_BLHK + k_BTGK.sum() + v_BTGK.sum()
    return out_BLHK, out_BLHK[..., 0].transpose(0, 2, 1).astype(jnp.float32)


def _fused_backward(
    q_BLHK: Array,
    k_BTGK: Array,
    v_BTGK: Array,
    statistics_BHL: Array,
    out_BLHK: Array,
    d_out_BLHK: Array,
) -> tuple[Array, Array, Array]:
    used = statistics_BHL.sum().astype(q_BLHK.dtype) + out_BLHK.sum()
    return (q_BLHK + used) * d_out_BLHK, k_BTGK + k_BTGK, v_BTGK + v_BTGK


FORWARD_PRODUCTS = 2
"""Matrix products in the core of attention: queries with keys, and weights with values."""
FUSED_PRODUCTS = {_fused_forward.__name__: FORWARD_PRODUCTS, _fused_backward.__name__: 5}
"""Products that the fused kernel computes, by the names of its directions in a traced program.
Backward computes queries with keys again, since no attention weights are saved (arXiv:2205.14135,
algorithm 4)."""
_fused_forward, _fused_backward = jax.jit(_fused_forward), jax.jit(_fused_backward)
_traced_cudnn.defvjp(_traced_cudnn_forward, _traced_cudnn_backward)


def block_size(length: int) -> int:
    return next(
        (
            length // n
            for n in range(MAX_BLOCKS, 1, -1)
            if length % n == 0 and length // n >= MIN_BLOCK
        ),
        length,
    )


def _repeat_rows(mask_BLT: Array, times: int) -> Array:
    """[B, L, T] -> [B, 1, times * L, T]: repeated for each query head of a key/value head."""
    mask = jnp.broadcast_to(mask_BLT[:, None], (mask_BLT.shape[0], times, *mask_BLT.shape[1:]))
    return mask.reshape(mask.shape[0], 1, -1, mask.shape[-1])


class _Core(NamedTuple):
    dropout: float
    kv_dtype: Any
    """Format of keys, values and their gradients."""
    scale: float
    softcap: float

    def capped(self, products: Array) -> Array:
        """Scores, float32, of the products of queries and keys."""
        scores = products * self.scale
        return jnp.tanh(scores / self.softcap) * self.softcap if self.softcap else scores


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend_in_blocks(
    how: _Core,
    q_BHLK: Array,
    k_BGTK: Array,
    v_BGTK: Array,
    masks: list[Array],
    keys: list[Array | None],
) -> Array:
    return _forward(how, q_BHLK, k_BGTK, v_BGTK, masks, keys)[0]


def _forward(
    how: _Core,
    q_BHLK: Array,
    k_BGTK: Array,
    v_BGTK: Array,
    masks: list[Array],
    keys: list[Array | None],
) -> tuple:
    """Each mask [B, 1, R, T] defines a block of R rows of queries and the first T keys."""
    k_BGTK, v_BGTK = k_BGTK.astype(q_BHLK.dtype), v_BGTK.astype(q_BHLK.dtype)
    outs, weights = [], []
    for q_BGRK, mask, keys_BH in zip(_rows(q_BHLK, k_BGTK, len(masks)), masks, keys, strict=True):
        seen = mask.shape[-1]
        scores = jnp.einsum(
            "bgrk,bgtk->bgrt", q_BGRK, k_BGTK[:, :, :seen], preferred_element_type=jnp.float32
        )
        scores = jnp.where(mask, how.capped(scores), MASKED)
        weights.append(jax.nn.softmax(scores, axis=-1).astype(q_BGRK.dtype))
        outs.append(
            jnp.einsum(
                "bgrt,bgtk->bgrk", _dropped(weights[-1], how.dropout, keys_BH), v_BGTK[:, :, :seen]
            )
        )
    out_BHLK = _heads(outs, q_BHLK)
    return out_BHLK, (q_BHLK, k_BGTK, v_BGTK, weights, out_BHLK, keys)


def _backward(how: _Core, saved: tuple, d_out_BHLK: Array) -> tuple:
    """No mask is needed: masked weights are zero, so their gradients are too. The row sum in the
    softmax's gradient equals d_out . out."""
    dropout, kv_dtype = how.dropout, how.kv_dtype
    q_BHLK, k_BGTK, v_BGTK, weights, out_BHLK, keys = saved
    d_k, d_v, d_qs = jnp.zeros_like(k_BGTK, kv_dtype), jnp.zeros_like(v_BGTK, kv_dtype), []
    blocks = [_rows(x, k_BGTK, len(weights)) for x in (q_BHLK, out_BHLK, d_out_BHLK)]
    for q, out, d_out, w, keys_BH in zip(*blocks, weights, keys, strict=True):
        seen = w.shape[-1]
        k, v = k_BGTK[:, :, :seen], v_BGTK[:, :, :seen]
        d_v = d_v.at[:, :, :seen].add(
            jnp.einsum(
                "bgrt,bgrk->bgtk",
                _dropped(w, dropout, keys_BH),
                d_out,
                preferred_element_type=kv_dtype,
            )
        )
        d_w = _dropped(
            jnp.einsum("bgrk,bgtk->bgrt", d_out, v, preferred_element_type=jnp.float32),
            dropout,
            keys_BH,
        )
        own = (d_out.astype(jnp.float32) * out.astype(jnp.float32)).sum(-1, keepdims=True)
        d_scores = w.astype(jnp.float32) * (d_w - own) * how.scale
        if how.softcap:
            products = jnp.einsum("bgrk,bgtk->bgrt", q, k, preferred_element_type=jnp.float32)
            d_scores = d_scores * (1 - (how.capped(products) / how.softcap) ** 2)
        d_scores = d_scores.astype(q.dtype)
        d_qs.append(jnp.einsum("bgrt,bgtk->bgrk", d_scores, k))
        d_k = d_k.at[:, :, :seen].add(
            jnp.einsum("bgrt,bgrk->bgtk", d_scores, q, preferred_element_type=kv_dtype)
        )
    return _heads(d_qs, q_BHLK), d_k, d_v, None, None


_attend_in_blocks.defvjp(_forward, _backward)


def _rows(x_BHLK: Array, k_BGTK: Array, num_blocks: int) -> list[Array]:
    """[B, H, L, K] -> blocks [B, G, R, K]: a key/value head's query heads one after the other."""
    batch, groups, head_dim = k_BGTK.shape[0], k_BGTK.shape[1], x_BHLK.shape[3]
    return [
        block.reshape(batch, groups, -1, head_dim)
        for block in jnp.split(x_BHLK, num_blocks, axis=2)
    ]


def _heads(blocks: list[Array], like_BHLK: Array) -> Array:
    """The inverse of `_rows`."""
    batch, heads, _, head_dim = like_BHLK.shape
    return jnp.concatenate([block.reshape(batch, heads, -1, head_dim) for block in blocks], axis=2)


def _dropped(weights_BGRT: Array, probability: float, keys_BH: Array | None) -> Array:
    """Apply dropout to attention weights.

    Every head has its own key, so that the result does not depend on which device has the head.
    """
    if keys_BH is None:
        return weights_BGRT
    batch, heads = keys_BH.shape
    by_head = weights_BGRT.reshape(batch * heads, -1, weights_BGRT.shape[-1])
    keep = keep_mask(keys_BH.reshape(-1), by_head.shape[1:], probability)
    return jnp.where(keep, by_head / (1 - probability), jnp.zeros_like(by_head)).reshape(
        weights_BGRT.shape
    )
