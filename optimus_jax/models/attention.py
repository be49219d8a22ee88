"""Attention with grouped heads: the projections around its core (models/kernels.py).

Shapes: B batch, L length, D embed, H query heads, G key/value heads, K head_dim. H and G count this
device's heads only.
"""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from optimus_jax.config import ModelConfig
from optimus_jax.mesh.axes import EMBED, HEAD_DIM, HEADS, KV_HEADS, NORM, PAIR
from optimus_jax.mesh.collectives import Collectives
from optimus_jax.mesh.scopes import ATTENTION
from optimus_jax.models.adapters import AdapterRun, adapted, adapter_of
from optimus_jax.models.families import features_of
from optimus_jax.models.layers import Norm, add_bias, constant, normal
from optimus_jax.models.products import project, project_back
from optimus_jax.models.rotary import rotate


class Attention(nnx.Module):
    """The projections to queries, keys and values, and the output projection."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        features = features_of(config)
        embed, heads, kv_heads, head_dim = (
            config.embed_dim,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
        )
        out_std = config.init_std / (2 * config.num_layers) ** 0.5
        self.num_heads_per_kv_head = heads // kv_heads
        self.interleaved = features.rope_pairs == "interleaved"
        self.scale = features.attention_scale or head_dim**-0.5
        self.softcap = features.attention_softcap or 0.0
        shape, dims = (heads, head_dim), (HEADS, HEAD_DIM)
        kv_shape, kv_dims = (2, kv_heads, head_dim), (PAIR, KV_HEADS, HEAD_DIM)
        # Key/value heads that devices share are used by the query heads of each.
        shared = {"used_over": (HEADS,)}
        self.query = normal(
            rngs, (embed, *shape), (EMBED, *dims), config.init_std, "matrix", "attention"
        )
        self.key_value = normal(
            rngs,
            (embed, *kv_shape),
            (EMBED, *kv_dims),
            config.init_std,
            "matrix",
            "attention",
            **shared,
        )
        self.out = normal(
            rngs, (embed, *shape), (EMBED, *dims), out_std, "matrix_back", "attention"
        )

        biases = set(features.biases or ())

        def bias(
            names: str, shape: tuple[int, ...], dims: tuple[str, ...], but_not: str = ""
        ) -> nnx.Param | None:
            """The bias that projections share, if all of these have one, and others have not."""
            exists = set(names.split()) == biases & {*names.split(), *but_not.split()}
            used = shared if KV_HEADS in dims else {}
            return nnx.data(
                constant(0.0, shape, dims, "bias", "attention", **used) if exists else None
            )

        self.query_bias = bias("query", shape, dims)
        self.key_value_bias = bias("key value", kv_shape, kv_dims)
        self.value_bias = bias("value", kv_shape[1:], kv_dims[1:], "key")
        self.out_bias = bias("out", (embed,), (NORM,))

        def qk_norm(count: int, axis: str) -> Norm | None:
            shape, dims = ((count, head_dim), (axis, HEAD_DIM))
            if features.qk_norm == "head":
                shape, dims = shape[1:], dims[1:]
            kind = features.norm if features.norm == "rms_plus_one" else "rms"
            return nnx.data(
                None
                if features.qk_norm == "none"
                else Norm(kind, shape, config.norm_epsilon, dims, **shared)
            )

        self.query_norm, self.key_norm = qk_norm(heads, HEADS), qk_norm(kv_heads, KV_HEADS)
        adapter = partial(adapter_of, config.tuning, used_over=HEADS, rngs=rngs)
        kv = (kv_heads, head_dim), (KV_HEADS, HEAD_DIM)
        self.query_adapter = nnx.data(adapter("query", embed, shape, dims))
        self.key_adapter = nnx.data(adapter("key", embed, *kv))
        self.value_adapter = nnx.data(adapter("value", embed, *kv))
        self.out_adapter = nnx.data(adapter("out", embed, shape, dims))

    def project(
        self, x_BLD: Array, comm: Collectives, keys_B: Array | None = None
    ) -> tuple[Array, Array, Array]:
        """Queries [B, L, H, K], keys and values [B, L, G, K] of this device's heads.

        `x_BLD` has been fanned out over `heads`. When training in f16, keys and values that
        several query heads share are float32: `attend` rounds them.

        `keys_B`: keys of the layer's adapters, for their dropout.
        """
        q_BLHK = self.queries(x_BLD, comm, keys_B)
        return q_BLHK, *self.keys_and_values(x_BLD, q_BLHK.shape[2], comm, keys_B)

    @jax.named_scope(ATTENTION)
    def queries(self, x_BLD: Array, comm: Collectives, keys_B: Array | None = None) -> Array:
        """Queries [B, L, H, K] of this device's heads; the arguments are those of `project`."""
        q_BLHK = add_bias(project(x_BLD, comm.weight(self.query), comm.dtype), self.query_bias)
        return adapted(self.query_adapter, q_BLHK, x_BLD, AdapterRun(comm, keys_B))

    @jax.named_scope(ATTENTION)
    def keys_and_values(
        self, x_BLD: Array, num_local_heads: int, comm: Collectives, keys_B: Array | None = None
    ) -> tuple[Array, Array]:
        """Keys and values [B, L, G, K] that this device's query heads need.

        Args:
          num_local_heads: number of these query heads.
          x_BLD, comm, keys_B: as for `project`.
        """
        needed = {"num_local_heads": num_local_heads, "group": self.num_heads_per_kv_head}
        # Query heads that share a key/value head may be on several devices; each device then has
        # one part of that head's gradient.
        shared = self.num_heads_per_kv_head > 1
        kv_BLPGK = project(
            x_BLD,
            comm.kv_heads_needed(comm.weight(self.key_value), dim=2, **needed),
            comm.dtype,
            result=comm.sums if shared else None,
        )
        if (bias_PGK := self._key_value_bias()) is not None:
            bias_PGK = comm.kv_heads_needed(bias_PGK, dim=1, **needed)
            kv_BLPGK = (kv_BLPGK.astype(jnp.float32) + bias_PGK[None, None]).astype(kv_BLPGK.dtype)
        run = AdapterRun(
            comm, keys_B, lambda leaf: comm.kv_heads_needed(leaf, dim=leaf.ndim - 2, **needed)
        )
        return (
            adapted(self.key_adapter, kv_BLPGK[:, :, 0], x_BLD, run),
            adapted(self.value_adapter, kv_BLPGK[:, :, 1], x_BLD, run),
        )

    def _key_value_bias(self) -> Array | None:
        """The bias [2, G, K] of keys and values: zeros of keys, if only values have one."""
        if self.value_bias is not None:
            return jnp.pad(self.value_bias[...][None], ((1, 0), (0, 0), (0, 0)))
        return None if self.key_value_bias is None else self.key_value_bias[...]

    @jax.named_scope(ATTENTION)
    def normed(self, q_BLHK: Array, k_BLGK: Array, comm: Collectives) -> tuple[Array, Array]:
        """Queries and keys after their norms, if the family has these."""
        if self.query_norm is None or self.key_norm is None:
            return q_BLHK, k_BLGK
        scale = self.key_norm.scale[...]
        if scale.ndim == 2:
            scale = comm.kv_heads_needed(
                scale, dim=0, num_local_heads=q_BLHK.shape[2], group=self.num_heads_per_kv_head
            )
        q_BLHK = _normed(self.query_norm, self.query_norm.scale[...], q_BLHK, comm)
        return q_BLHK, _normed(self.key_norm, scale, k_BLGK, comm)

    @jax.named_scope(ATTENTION)
    def rotated(
        self, q_BLHK: Array, k_BLGK: Array, cos_sin: tuple[Array, Array] | None
    ) -> tuple[Array, Array]:
        """Queries and keys, rotated if `cos_sin` is given."""
        if cos_sin is None:
            return q_BLHK, k_BLGK
        return (
            rotate(q_BLHK, cos_sin, interleaved=self.interleaved),
            rotate(k_BLGK, cos_sin, interleaved=self.interleaved),
        )

    @jax.named_scope(ATTENTION)
    def partial_out(
        self, heads_BLHK: Array, comm: Collectives, keys_B: Array | None = None
    ) -> Array:
        """The output projection [B, L, D]; gives this device's part of the sum over `heads`."""
        out_BLD = project_back(heads_BLHK, comm.weight(self.out), comm.dtype, result=comm.sums)
        return adapted(self.out_adapter, out_BLD, heads_BLHK, AdapterRun(comm, keys_B))

    @jax.named_scope(ATTENTION)
    def combine(self, partial_BLD: Array, comm: Collectives) -> Array:
        """The sum of all devices' parts, plus the bias."""
        return add_bias(comm.sum_stream(partial_BLD, HEADS), self.out_bias).astype(comm.dtype)


def _normed(norm: Norm, scale: Array, x_BLHK: Array, comm: Collectives) -> Array:
    """Queries or keys, normed by head, or over all heads, of which this device has a part."""
    if scale.ndim == 1:
        return norm(x_BLHK)

    def mean(y_BLHK: Array) -> Array:
        # Devices that share a key head count it equally often.
        total = comm.sum(y_BLHK.sum((-2, -1), keepdims=True), HEADS)
        return total / (comm.size(y_BLHK.shape[-2], HEADS) * y_BLHK.shape[-1])

    return norm(x_BLHK, scale=scale, mean=mean)
