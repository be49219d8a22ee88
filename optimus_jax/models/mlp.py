"""The feed-forward block: GELU between two projections, or SwiGLU with a gate.

Shapes: B batch, L length, D embed, F mlp (the device's part).
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from optimus_jax.config import ModelConfig
from optimus_jax.mesh.axes import EMBED, MLP, NORM, PAIR
from optimus_jax.mesh.collectives import Collectives
from optimus_jax.models.families import Family
from optimus_jax.models.layers import add_bias, constant, normal


class FeedForward(nnx.Module):
    """[B, L, D] -> [B, L, D], position by position."""

    def __init__(self, config: ModelConfig, family: Family, *, rngs: nnx.Rngs):
        embed, mlp = config.embed_dim, config.mlp_dim
        self.gated = family.activation == "swiglu"
        if self.gated:
            self.up = normal(rngs, (embed, 2, mlp), (EMBED, PAIR, MLP), config.init_std)
        else:
            self.up = normal(rngs, (embed, mlp), (EMBED, MLP), config.init_std)
        self.down = normal(rngs, (mlp, embed), (MLP, EMBED), config.init_std / (2 * config.num_layers) ** 0.5)
        self.up_bias = nnx.data(constant(0.0, self.up.shape[1:], self.up.out_sharding[1:]) if family.biases else None)
        self.down_bias = nnx.data(constant(0.0, (embed,), (NORM,)) if family.biases else None)

    def __call__(self, x_BLD: Array, comm: Collectives) -> Array:
        """Split over `mlp` between the two projections, summed after the second."""
        x_BLD = comm.fan_out(x_BLD, MLP)
        if self.gated:
            both_BLPF = add_bias(jnp.einsum("bld,dpf->blpf", x_BLD, self.up[...]), self.up_bias)
            h_BLF = jax.nn.silu(both_BLPF[:, :, 0]) * both_BLPF[:, :, 1]
        else:
            h_BLF = jax.nn.gelu(add_bias(x_BLD @ self.up[...], self.up_bias), approximate=True)
        return add_bias(comm.sum(h_BLF @ self.down[...], MLP), self.down_bias)
