"""Causal self-attention with grouped heads, and the kernels that can compute its core.

Shapes: B batch, L length of queries, T length of keys, D embed, H query heads, G key/value heads,
N query heads per key/value head, K head_dim. Heads are the device's part.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax

from optimus_jax.config import AttentionKernel, ModelConfig, Precision
from optimus_jax.errors import PlanError, explain
from optimus_jax.mesh.axes import EMBED, HEAD_DIM, HEADS, KV_HEADS, NORM, PAIR
from optimus_jax.mesh.collectives import Collectives
from optimus_jax.models.families import Family
from optimus_jax.models.layers import add_bias, constant, dropout, normal
from optimus_jax.models.rotary import rotate

MASKED = -1e30
"""Score of a key that a query may not see: exp() of it is zero in every format, without NaN."""


def choose_kernel(wanted: AttentionKernel, *, platform: str, precision: Precision, model: ModelConfig) -> AttentionKernel:
    """The kernel that will run. Raises PlanError if the one asked for cannot."""
    obstacles = [
        f"it runs on GPUs, and this platform is {platform}" if platform not in ("gpu", "cuda") else "",
        f"it computes in bf16 or f16, and the precision is {precision}" if precision == "f32" else "",
        f"it has no dropout on attention weights, and model.dropout is {model.dropout}" if model.dropout else "",
        f"its heads are multiples of 8 up to 128 wide, and head_dim is {model.head_dim}"
        if model.head_dim % 8 or model.head_dim > 128 else "",
    ]
    obstacle = next(filter(None, obstacles), None)
    if wanted == "cudnn" and obstacle:
        raise PlanError(explain("the cuDNN attention kernel cannot run here", given=obstacle, do="use --set parallel.attention=xla"))
    if wanted == "auto":
        return "xla" if obstacle else "cudnn"
    return wanted


@dataclass(frozen=True)
class Visibility:
    """Which keys a query sees: those not after it and, with documents, those of its own document."""

    segments_BL: Array | None = None
    """Document of every position, int32; None: one document an example."""
    query_offset: Array | int = 0
    """Position of the first query among the keys (above 0 when a cache holds earlier keys)."""

    def mask(self, length: int, num_keys: int) -> Array:
        """bool [B or 1, L, T]."""
        queries = self.query_offset + lax.broadcasted_iota(jnp.int32, (1, length, num_keys), 1)
        visible = queries >= lax.broadcasted_iota(jnp.int32, (1, length, num_keys), 2)
        if self.segments_BL is not None:
            visible = visible & (self.segments_BL[:, :, None] == self.segments_BL[:, None, :])
        return visible


def attend(q_BLHK: Array, k_BTGK: Array, v_BTGK: Array, visibility: Visibility, *, kernel: AttentionKernel,
           dropout_probability: float = 0.0, keys_BH: Array | None = None) -> Array:
    """softmax(q k / sqrt(K)) v over the visible keys, [B, L, H, K]; softmax in float32."""
    batch, length, heads, head_dim = q_BLHK.shape
    num_keys, groups = k_BTGK.shape[1:3]
    mask_BLT = visibility.mask(length, num_keys)
    if kernel == "cudnn":
        mask = None if visibility.segments_BL is None else mask_BLT[:, None]
        return jax.nn.dot_product_attention(q_BLHK, k_BTGK, v_BTGK, mask=mask, is_causal=True, implementation="cudnn")
    q_BLGNK = q_BLHK.reshape(batch, length, groups, heads // groups, head_dim)
    scores = jnp.einsum("blgnk,btgk->bgnlt", q_BLGNK, k_BTGK, preferred_element_type=jnp.float32)
    scores = jnp.where(mask_BLT[:, None, None], scores * head_dim**-0.5, MASKED)
    weights = jax.nn.softmax(scores, axis=-1).astype(q_BLHK.dtype)
    if keys_BH is not None and dropout_probability:
        per_head = weights.reshape(batch * heads, length, num_keys)
        weights = dropout(per_head, dropout_probability, keys_BH.reshape(-1), site=0).reshape(weights.shape)
    return jnp.einsum("bgnlt,btgk->blgnk", weights, v_BTGK).reshape(batch, length, heads, head_dim)


class Attention(nnx.Module):
    """Projections to queries, keys and values, the core, and the projection back."""

    def __init__(self, config: ModelConfig, family: Family, *, rngs: nnx.Rngs):
        embed, heads, kv_heads, head_dim = config.embed_dim, config.num_heads, config.num_kv_heads, config.head_dim
        out_std = config.init_std / (2 * config.num_layers) ** 0.5
        self.num_heads_per_kv_head = heads // kv_heads
        self.query = normal(rngs, (embed, heads, head_dim), (EMBED, HEADS, HEAD_DIM), config.init_std)
        self.key_value = normal(rngs, (embed, 2, kv_heads, head_dim), (EMBED, PAIR, KV_HEADS, HEAD_DIM), config.init_std)
        self.out = normal(rngs, (heads, head_dim, embed), (HEADS, HEAD_DIM, EMBED), out_std)
        biases = family.biases
        self.query_bias = nnx.data(constant(0.0, (heads, head_dim), (HEADS, HEAD_DIM)) if biases else None)
        self.key_value_bias = nnx.data(
            constant(0.0, (2, kv_heads, head_dim), (PAIR, KV_HEADS, HEAD_DIM)) if biases else None)
        self.out_bias = nnx.data(constant(0.0, (embed,), (NORM,)) if biases else None)

    def project(self, x_BLD: Array, comm: Collectives, cos_sin: tuple[Array, Array] | None) -> tuple[Array, Array, Array]:
        """Queries [B, L, H, K], keys and values [B, L, G, K] of this device's heads, rotated where asked."""
        x_BLD = comm.fan_out(x_BLD, HEADS)
        q_BLHK = add_bias(jnp.einsum("bld,dhk->blhk", x_BLD, self.query[...]), self.query_bias)
        needed = {"num_local_heads": q_BLHK.shape[2], "group": self.num_heads_per_kv_head}
        key_value = comm.kv_heads_needed(self.key_value[...], dim=2, **needed)
        kv_BLPGK = jnp.einsum("bld,dpgk->blpgk", x_BLD, key_value)
        if self.key_value_bias is not None:
            kv_BLPGK = kv_BLPGK + comm.kv_heads_needed(self.key_value_bias[...], dim=1, **needed)[None, None]
        k_BLGK, v_BLGK = kv_BLPGK[:, :, 0], kv_BLPGK[:, :, 1]
        if cos_sin is not None:
            q_BLHK, k_BLGK = rotate(q_BLHK, cos_sin), rotate(k_BLGK, cos_sin)
        return q_BLHK, k_BLGK, v_BLGK

    def combine(self, heads_BLHK: Array, comm: Collectives) -> Array:
        """The heads' results back into the residual's width, summed over all devices' heads."""
        return add_bias(comm.sum(jnp.einsum("blhk,hkd->bld", heads_BLHK, self.out[...]), HEADS), self.out_bias)
