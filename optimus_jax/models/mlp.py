"""The feed-forward block: two projections and a nonlinearity between them, which may be a gate.

Shapes: B batch, L length, D embed, F mlp (this device's part).
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array, lax

from optimus_jax.config import ModelConfig
from optimus_jax.mesh.axes import EMBED, MLP, NORM, PAIR
from optimus_jax.mesh.collectives import Collectives
from optimus_jax.mesh.scopes import FEED_FORWARD
from optimus_jax.models.adapters import AdapterRun, adapted, adapted_input, adapter_of
from optimus_jax.models.families import features_of
from optimus_jax.models.layers import add_bias, constant, normal
from optimus_jax.models.products import project, project_back


@jax.custom_jvp
def exact_gelu(x: Array) -> Array:
    """`x` times the normal distribution function of `x`; same shape and dtype as `x`.

    The value of `jax.nn.gelu(x, approximate=False)`. Its derivative is written out: that of
    `lax.erfc` cannot be traced inside `shard_map` by jax 0.12.0.
    """
    return x * _normal_cdf(x)


def _normal_cdf(x: Array) -> Array:
    return 0.5 * lax.erfc(-x * np.sqrt(0.5).astype(x.dtype))


@exact_gelu.defjvp
def _exact_gelu_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    (x,), (tangent,) = primals, tangents
    cdf = _normal_cdf(x)
    density = jnp.exp(-0.5 * x * x) * np.sqrt(0.5 / np.pi).astype(x.dtype)
    return x * cdf, tangent * (cdf + x * density)


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "gelu": exact_gelu,
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
    "tanh": jnp.tanh,
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
        self.up = normal(rngs, shape, dims, config.init_std, "matrix", "mlp")
        out_std = config.init_std / (2 * config.num_layers) ** 0.5
        self.down = normal(rngs, (embed, mlp), (EMBED, MLP), out_std, "matrix_back", "mlp")
        self.up_bias = nnx.data(
            constant(0.0, shape[1:], dims[1:], "bias", "mlp") if "up" in biases else None
        )
        self.down_bias = nnx.data(
            constant(0.0, (embed,), (NORM,), "bias", "mlp") if "down" in biases else None
        )
        adapter = partial(adapter_of, config.tuning, used_over=MLP, rngs=rngs)
        self.gate_adapter = nnx.data(adapter("gate", embed, (mlp,), (MLP,)) if self.gated else None)
        self.up_adapter = nnx.data(adapter("up", embed, (mlp,), (MLP,)))
        self.down_adapter = nnx.data(adapter("down", embed, (mlp,), (MLP,)))

    @jax.named_scope(FEED_FORWARD)
    def hidden(self, x_BLD: Array, comm: Collectives, keys_B: Array | None = None) -> Array:
        """[B, L, D], fanned out over `mlp` -> values before the nonlinearity: [B, L, F], or
        [B, L, 2, F] with a gate.

        `keys_B`: keys of the layer's adapters, for their dropout.
        """
        hidden = add_bias(project(x_BLD, comm.weight(self.up), comm.dtype), self.up_bias)
        run, gate, up = AdapterRun(comm, keys_B), self.gate_adapter, self.up_adapter
        if not self.gated:
            return adapted(up, hidden, x_BLD, run)
        if gate is None and up is None:
            return hidden
        pair = (
            adapted(adapter, hidden[:, :, place], x_BLD, run)
            for place, adapter in enumerate((gate, up))
        )
        return jnp.stack(tuple(pair), 2)

    @jax.named_scope(FEED_FORWARD)
    def partial_out(self, hidden: Array, comm: Collectives, keys_B: Array | None = None) -> Array:
        """The nonlinearity and the second projection; gives this device's part of the sum over
        `mlp`."""
        activate = ACTIVATIONS[self.activation]
        if self.gated:
            h_BLF = activate(hidden[:, :, 0]) * hidden[:, :, 1]
        else:
            h_BLF = activate(hidden)
        h_BLF = adapted_input(self.down_adapter, h_BLF)
        out_BLD = project_back(h_BLF, comm.weight(self.down), comm.dtype, result=comm.sums)
        return adapted(self.down_adapter, out_BLD, h_BLF, AdapterRun(comm, keys_B))

    @jax.named_scope(FEED_FORWARD)
    def combine(self, partial_BLD: Array, comm: Collectives) -> Array:
        """The sum of all devices' parts, plus the bias."""
        return self.with_bias(comm.sum_stream(partial_BLD, MLP), comm)

    @jax.named_scope(FEED_FORWARD)
    def with_bias(self, sum_BLD: Array, comm: Collectives) -> Array:
        """The sum of all devices' parts, with the bias."""
        return add_bias(sum_BLD, self.down_bias).astype(comm.dtype)
