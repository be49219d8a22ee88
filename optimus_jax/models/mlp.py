"""The feed-forward block: two projections and a nonlinearity between them, which may be a gate.

Shapes: B batch, L length, D embed, F mlp (this device's part).
"""

from collections.abc import Callable
from functools import partial

import jax
from flax import nnx
from jax import Array

from optimus_jax.config import ModelConfig
from optimus_jax.mesh.axes import EMBED, MLP, NORM, PAIR
from optimus_jax.mesh.collectives import Collectives
from optimus_jax.models.families import features_of
from optimus_jax.models.layers import add_bias, constant, normal
from optimus_jax.models.products import project, project_back

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
}


class FeedForward(nnx.Module):
    """Feed-forward block, [B, L, D] -> [B, L, D], applied to each position by itself.

    It has three methods, to be called in order, so that a caller chooses which values between them
    are kept for backward.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        embed, mlp, features = config.embed_dim, config.mlp_dim, features_of(config)
        biases = features.biases or ()
        self.gated, self.activation = bool(features.gated), str(features.activation)
        if self.gated:
            shape, dims = (embed, 2, mlp), (EMBED, PAIR, MLP)
        else:
            shape, dims = (embed, mlp), (EMBED, MLP)
        self.up = normal(rngs, shape, dims, config.init_std, "matrix")
        out_std = config.init_std / (2 * config.num_layers) ** 0.5
        self.down = normal(rngs, (embed, mlp), (EMBED, MLP), out_std, "matrix_back")
        self.up_bias = nnx.data(
            constant(0.0, shape[1:], dims[1:], "bias") if "up" in biases else None
        )
        self.down_bias = nnx.data(
            constant(0.0, (embed,), (NORM,), "bias") if "down" in biases else None
        )

    def hidden(self, x_BLD: Array, comm: Collectives) -> Array:
        """[B, L, D], fanned out over `mlp` -> values before the nonlinearity: [B, L, F], or
        [B, L, 2, F] with a gate.
        """
        return add_bias(project(x_BLD, comm.weight(self.up), comm.dtype), self.up_bias)

    def partial_out(self, hidden: Array, comm: Collectives) -> Array:
        """The nonlinearity and the second projection; gives this device's part of the sum over
        `mlp`."""
        activate = ACTIVATIONS[self.activation]
        if self.gated:
            h_BLF = activate(hidden[:, :, 0]) * hidden[:, :, 1]
        else:
            h_BLF = activate(hidden)
        return project_back(h_BLF, comm.weight(self.down), comm.dtype, result=comm.sums)

    def combine(self, partial_BLD: Array, comm: Collectives) -> Array:
        """The sum of all devices' parts, plus the bias."""
        return self.with_bias(comm.sum_stream(partial_BLD, MLP), comm)

    def with_bias(self, sum_BLD: Array, comm: Collectives) -> Array:
        """The sum of all devices' parts, with the bias."""
        return add_bias(sum_BLD, self.down_bias).astype(comm.dtype)
