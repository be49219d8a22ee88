"""Causal self-attention with grouped heads: the projections around its core (models/kernels.py).

Shapes: B batch, L length, D embed, H query heads, G key/value heads, K head_dim. H and G count this
device's heads only.
"""

import jax.numpy as jnp
from flax import nnx
from jax import Array

from optimus_jax.config import ModelConfig
from optimus_jax.mesh.axes import EMBED, HEAD_DIM, HEADS, KV_HEADS, NORM, PAIR
from optimus_jax.mesh.collectives import Collectives
from optimus_jax.models.families import Family
from optimus_jax.models.layers import add_bias, constant, normal
from optimus_jax.models.products import project, project_back
from optimus_jax.models.rotary import rotate


class Attention(nnx.Module):
    """The projections to queries, keys and values, and the output projection."""

    def __init__(self, config: ModelConfig, family: Family, *, rngs: nnx.Rngs):
        embed, heads, kv_heads, head_dim = (
            config.embed_dim,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
        )
        out_std = config.init_std / (2 * config.num_layers) ** 0.5
        self.num_heads_per_kv_head = heads // kv_heads
        self.query = normal(
            rngs, (embed, heads, head_dim), (EMBED, HEADS, HEAD_DIM), config.init_std
        )
        self.key_value = normal(
            rngs, (embed, 2, kv_heads, head_dim), (EMBED, PAIR, KV_HEADS, HEAD_DIM), config.init_std
        )
        self.out = normal(rngs, (embed, heads, head_dim), (EMBED, HEADS, HEAD_DIM), out_std)
        biases = family.biases
        self.query_bias = nnx.data(
            constant(0.0, (heads, head_dim), (HEADS, HEAD_DIM)) if biases else None
        )
        self.key_value_bias = nnx.data(
            constant(0.0, (2, kv_heads, head_dim), (PAIR, KV_HEADS, HEAD_DIM)) if biases else None
        )
        self.out_bias = nnx.data(constant(0.0, (embed,), (NORM,)) if biases else None)

    def project(
        self, x_BLD: Array, comm: Collectives, cos_sin: tuple[Array, Array] | None
    ) -> tuple[Array, Array, Array]:
        """Queries [B, L, H, K], keys and values [B, L, G, K] of this device's heads.

        Queries and keys are rotated if `cos_sin` is given. When training in f16, keys and values
        that several query heads share are float32: `attend` rounds them.
        """
        x_BLD = comm.fan_out(x_BLD, HEADS)
        q_BLHK = add_bias(project(x_BLD, comm.weight(self.query), comm.dtype), self.query_bias)
        needed = {"num_local_heads": q_BLHK.shape[2], "group": self.num_heads_per_kv_head}
        # Query heads that share a key/value head may be on several devices; each device then has
        # one part of that head's gradient.
        shared = self.num_heads_per_kv_head > 1
        kv_BLPGK = project(
            x_BLD,
            comm.kv_heads_needed(comm.weight(self.key_value), dim=2, **needed),
            comm.dtype,
            result=comm.sums if shared else None,
        )
        if self.key_value_bias is not None:
            bias_PGK = comm.kv_heads_needed(self.key_value_bias[...], dim=1, **needed)
            kv_BLPGK = (kv_BLPGK.astype(jnp.float32) + bias_PGK[None, None]).astype(kv_BLPGK.dtype)
        k_BLGK, v_BLGK = kv_BLPGK[:, :, 0], kv_BLPGK[:, :, 1]
        if cos_sin is not None:
            q_BLHK, k_BLGK = rotate(q_BLHK, cos_sin), rotate(k_BLGK, cos_sin)
        return q_BLHK, k_BLGK, v_BLGK

    def partial_out(self, heads_BLHK: Array, comm: Collectives) -> Array:
        """The output projection [B, L, D]; gives this device's part of the sum over `heads`."""
        return project_back(heads_BLHK, comm.weight(self.out), comm.dtype, result=comm.sums)

    def combine(self, partial_BLD: Array, comm: Collectives) -> Array:
        """The sum of all devices' parts, plus the bias."""
        return add_bias(comm.sum(partial_BLD, HEADS), self.out_bias).astype(comm.dtype)
