"""The feed-forward block: GELU between two projections, or SwiGLU with a gate.

Shapes: B batch, L length, D embed, F mlp (the device's part).
"""

import jax
from flax import nnx
from jax import Array

from optimus_jax.config import ModelConfig
from optimus_jax.mesh.axes import EMBED, MLP, NORM, PAIR
from optimus_jax.mesh.collectives import Collectives
from optimus_jax.models.families import Family
from optimus_jax.models.layers import add_bias, constant, normal
from optimus_jax.models.products import project, project_back


class FeedForward(nnx.Module):
    """[B, L, D] -> [B, L, D], position by position, in three parts between which a caller may keep
    values.
    """

    def __init__(self, config: ModelConfig, family: Family, *, rngs: nnx.Rngs):
        embed, mlp = config.embed_dim, config.mlp_dim
        self.gated = family.activation == "swiglu"
        if self.gated:
            self.up = normal(rngs, (embed, 2, mlp), (EMBED, PAIR, MLP), config.init_std)
        else:
            self.up = normal(rngs, (embed, mlp), (EMBED, MLP), config.init_std)
        self.down = normal(
            rngs, (embed, mlp), (EMBED, MLP), config.init_std / (2 * config.num_layers) ** 0.5
        )
        self.up_bias = nnx.data(
            constant(0.0, self.up.shape[1:], self.up.out_sharding[1:]) if family.biases else None
        )
        self.down_bias = nnx.data(constant(0.0, (embed,), (NORM,)) if family.biases else None)

    def hidden(self, x_BLD: Array, comm: Collectives) -> Array:
        """[B, L, D] -> [B, L, F] or, gated, [B, L, 2, F]: before the nonlinearity."""
        return add_bias(
            project(comm.fan_out(x_BLD, MLP), comm.weight(self.up), comm.dtype), self.up_bias
        )

    def partial_out(self, hidden: Array, comm: Collectives) -> Array:
        """The nonlinearity and the second projection; each device has a part of the sum over
        `mlp`."""
        if self.gated:
            h_BLF = jax.nn.silu(hidden[:, :, 0]) * hidden[:, :, 1]
        else:
            h_BLF = jax.nn.gelu(hidden, approximate=True)
        return project_back(h_BLF, comm.weight(self.down), comm.dtype, result=comm.sums)

    def combine(self, partial_BLD: Array, comm: Collectives) -> Array:
        """The sum over all devices' parts."""
        return add_bias(comm.sum(partial_BLD, MLP), self.down_bias).astype(comm.dtype)
