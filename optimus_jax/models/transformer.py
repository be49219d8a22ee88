"""The decoder: embedding, a scanned stack of blocks, a final norm and the head's matrix.

One class serves every family; `models/families.py` lists the differences. The stack is one set of
parameters with a leading `layers` dimension, so that compile time does not grow with depth.

Shapes: B batch, L length, T cached length, D embed, V vocab (this device's part), G key/value
heads and K head_dim.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from optimus_jax.config import AttentionKernel, ModelConfig, RematPolicy
from optimus_jax.mesh.axes import EMBED, HEADS, LAYERS, MLP, POSITIONS, TABLE, VOCAB
from optimus_jax.mesh.collectives import Collectives
from optimus_jax.mesh.sums import Sums
from optimus_jax.models import rotary
from optimus_jax.models.attention import Attention
from optimus_jax.models.families import features_of, has_window, table_width
from optimus_jax.models.head import Head
from optimus_jax.models.kernels import Visibility, attend
from optimus_jax.models.layers import Embedding, Norm, constant, dropout, normal, rows_of, sinusoids
from optimus_jax.models.mlp import FeedForward
from optimus_jax.models.products import project, project_back

LAYER_INPUT = "layer input"
"""Checkpoint name of a layer's input, used to offload it to host memory."""
SITES_PER_LAYER = 4
"""Places in a layer that draw a dropout mask: attention weights, two residual branches, one
spare."""


@dataclass(frozen=True, kw_only=True)
class ForwardContext:
    """The inputs of a forward pass besides parameters and tokens."""

    comm: Collectives
    kernel: AttentionKernel | Literal["traced_cudnn"] = "xla"
    remat: RematPolicy = "none"
    offload: bool = False
    """Whether layer inputs are kept in host memory until backward; needs remat="full", which saves
    nothing else."""
    visibility: Visibility = field(default_factory=Visibility)
    keys_B: Array | None = None
    """Dropout key of every example; None: no dropout."""

    def recomputed(self, part: Callable) -> Callable:
        """Wrap a part of a layer so that only its arguments are saved for backward.

        Meant for a matmul with cheap arithmetic beside it. Computing the arithmetic again, or
        gathering the matrix again, is better than saving it; the matmul itself is not computed
        again. Policies that recompute more apply to the layer as a whole (`_rematerialised`).
        """
        return (
            jax.checkpoint(part, prevent_cse=False) if self.remat in ("none", "selective") else part
        )


def windowed_layers(config: ModelConfig) -> Array | bool:
    """Whether layers have a window: of all alike, or bool [layers] where they differ."""
    windowed = np.array(has_window(config))
    return jnp.asarray(windowed) if windowed.any() and not windowed.all() else bool(windowed.any())


class LayersOutput(NamedTuple):
    """What a block gives, or a stack of them."""

    x_BLD: Array
    """The residual stream after it."""
    auxiliary: Sums
    """This device's shares (mesh/sums.py) of sums over the tokens, which a task may add to its
    loss, such as one that balances experts. Of a stack: added over its layers."""
    cache: tuple[Array, Array] | None
    """Keys and values, if some were given."""


class Block(nnx.Module):
    """Attention and feed-forward, each normed and added to the residual."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        features = features_of(config)
        self.dropout = config.dropout
        self.parallel, self.post = bool(features.parallel), features.norm_place == "post"

        def norm(*places: str) -> Norm | None:
            return nnx.data(
                Norm(str(features.norm), (config.embed_dim,), config.norm_epsilon)
                if features.norm_place in places
                else None
            )

        self.attention_norm = norm("pre", "sandwich")
        self.attention = Attention(config, rngs=rngs)
        self.attention_out_norm = norm("post", "sandwich", "output")
        self.mlp_norm = nnx.data(None) if self.parallel else norm("pre", "sandwich")
        self.mlp = FeedForward(config, rngs=rngs)
        self.mlp_out_norm = norm("post", "sandwich", "output")

    def __call__(
        self,
        x_BLD: Array,
        layer: Array,
        run: ForwardContext,
        cos_sin: tuple[Array, Array] | None,
        cache: tuple[Array, Array] | None = None,
    ) -> LayersOutput:
        """[B, L, D] -> [B, L, D].

        `cache`: earlier keys and values [B, T, G, K]; returned with those of this pass added.
        """
        comm, site, recomputed = run.comm, layer * SITES_PER_LAYER + 1, run.recomputed
        q, k, v, hidden = self._projected(x_BLD, run, cos_sin)
        if cache is not None:
            start = (0, run.visibility.query_offset, 0, 0)
            longer = [
                lax.dynamic_update_slice(old, new.astype(old.dtype), start)
                for old, new in zip(cache, (k, v), strict=True)
            ]
            k, v = cache = longer[0], longer[1]
        head_keys = self._head_keys(run, site, q.shape[2])

        def core(q: Array, k: Array, v: Array) -> Array:
            return attend(
                q,
                k,
                v,
                run.visibility,
                kernel=run.kernel,
                scale=self.attention.scale,
                softcap=self.attention.softcap,
                dropout=self.dropout,
                keys_BH=head_keys,
            )

        heads = (jax.checkpoint(core) if run.remat == "selective" else core)(q, k, v)
        if hidden is not None:
            out_BLD = recomputed(
                lambda heads, hidden: (
                    self.attention.partial_out(heads, comm) + self.mlp.partial_out(hidden, comm)
                )
            )(heads, hidden)
            out_BLD = self.mlp.with_bias(self.attention.combine(out_BLD, comm), comm)
            return LayersOutput(x_BLD + out_BLD, {}, cache)
        out_BLD = self.attention.combine(
            recomputed(lambda h: self.attention.partial_out(h, comm))(heads), comm
        )
        before_BLD = x_BLD
        x_BLD = self._added(x_BLD, out_BLD, self.attention_out_norm, run, site + 1)
        mlp_norm = self.attention_norm if self.parallel else self.mlp_norm
        hidden = recomputed(
            lambda x: self.mlp.hidden(comm.fan_out(_normed(mlp_norm, x, comm), MLP), comm)
        )(before_BLD if self.parallel else x_BLD)
        out_BLD = self.mlp.combine(
            recomputed(lambda h: self.mlp.partial_out(h, comm))(hidden), comm
        )
        x_BLD = self._added(x_BLD, out_BLD, self.mlp_out_norm, run, site + 2)
        return LayersOutput(x_BLD, {}, cache)

    def _projected(
        self, x_BLD: Array, run: ForwardContext, cos_sin: tuple[Array, Array] | None
    ) -> tuple[Array, Array, Array, Array | None]:
        """Queries, keys, values, and the feed-forward's hidden values if both branches of a
        parallel block share their input and their result: then one collective gathers the stream
        for both, and one sums what both give. Dropout needs each branch's own result.

        Backward computes what leads to the products again, and what follows: rotations keep
        nothing, so they are part of the first; norms of queries and keys need the product.
        """
        comm, attention = run.comm, self.attention
        is_joint = (
            self.parallel
            and (run.keys_B is None or self.dropout == 0)
            and comm.splits_alike(HEADS, MLP)
        )
        rotates_at_once = attention.query_norm is None

        def projected(x_BLD: Array) -> tuple[Array, Array, Array, Array | None]:
            x_BLD = comm.fan_out(_normed(self.attention_norm, x_BLD, comm), HEADS)
            q, k, v = attention.project(x_BLD, comm)
            if rotates_at_once:
                q, k = attention.rotated(q, k, cos_sin)
            return q, k, v, self.mlp.hidden(x_BLD, comm) if is_joint else None

        q, k, v, hidden = run.recomputed(projected)(x_BLD)
        if not rotates_at_once:
            q, k = run.recomputed(
                lambda q, k: attention.rotated(*attention.normed(q, k, comm), cos_sin)
            )(q, k)
        return q, k, v, hidden

    def _added(
        self, x_BLD: Array, out_BLD: Array, norm: Norm | None, run: ForwardContext, site: Array
    ) -> Array:
        """The residual with a sublayer's output added."""
        if norm is not None and not self.post:
            out_BLD = norm(out_BLD)
        x_BLD = x_BLD + dropout(out_BLD, self.dropout, run.keys_B, site, run.comm)
        return norm(x_BLD) if norm is not None and self.post else x_BLD

    def _head_keys(self, run: ForwardContext, site: Array, num_local_heads: int) -> Array | None:
        """Dropout keys [B, H] per example and local head; independent of which device has it."""
        if run.keys_B is None or self.dropout == 0:
            return None
        heads = run.comm.offset(num_local_heads, HEADS) + jnp.arange(num_local_heads)
        per_head = jax.vmap(jax.random.fold_in, in_axes=(None, 0))
        return jax.vmap(lambda key: per_head(jax.random.fold_in(key, site), heads))(run.keys_B)


def _normed(norm: Norm | None, x_BLD: Array, comm: Collectives) -> Array:
    """The residual as a sublayer reads it."""
    return x_BLD.astype(comm.sums) if norm is None else norm(x_BLD, comm.sums)


class Decoder(nnx.Module):
    """Tokens to final hidden states; the loss (or generation) applies the head's matrix itself."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        vocab_rows: int,
        slots: tuple[int, ...] | None = None,
        rngs: nnx.Rngs,
    ):
        """`slots`: the layer that each slot of the stack holds; None: all layers in order
        (`mesh/slots.py`)."""
        features = features_of(config)
        self.config = config
        self.scale_embedding = config.embed_dim**0.5 if features.scale_embedding else None
        table_dim = table_width(config)
        table = partial(
            Embedding, vocab_rows, table_dim, config.init_std, vocab_size=config.vocab_size
        )
        self.embedding = table(rngs=rngs)
        rows = config.max_length + (features.position_offset or 0)
        self.positions = nnx.data(
            normal(rngs, (rows, config.embed_dim), (POSITIONS, EMBED), config.init_std, "table")
            if features.positions == "learned"
            else None
        )
        self.position_offset = features.position_offset or 0
        between = (config.embed_dim, table_dim), (EMBED, TABLE)
        self.table_in = nnx.data(
            normal(rngs, *between, config.init_std, "matrix_back") if features.table_dim else None
        )

        @nnx.vmap(in_axes=(0,), out_axes=0, transform_metadata={nnx.PARTITION_NAME: LAYERS})
        def stack(key: Array) -> Block:
            return Block(config, rngs=nnx.Rngs(params=key))

        keys = jax.random.split(rngs.params(), config.num_layers)
        self.layers = stack(keys if slots is None else keys[np.maximum(slots, 0)])
        self.final_norm = nnx.data(
            Norm(str(features.norm), (config.embed_dim,), config.norm_epsilon)
            if features.final_norm
            else None
        )
        self.head = nnx.data(None if config.tied else table(rngs=rngs))
        self.table_out = nnx.data(
            normal(rngs, *between, config.init_std, "matrix") if features.table_dim else None
        )
        self.head_bias = nnx.data(
            constant(0.0, (vocab_rows,), (VOCAB,), "bias") if features.head_bias else None
        )

    def embed(self, tokens_BL: Array, positions_BL: Array, run: ForwardContext) -> Array:
        """int32 [B, L] -> [B, L, D]."""
        x_BLD = self.embedding(tokens_BL, run.comm)
        if self.table_in is not None:
            x_BLD = project_back(x_BLD, self.table_in[...], run.comm.dtype)
        if self.scale_embedding is not None:
            x_BLD = x_BLD * jnp.asarray(self.scale_embedding, x_BLD.dtype)
        if self.positions is not None:
            offset = self.position_offset
            rows_BL = positions_BL + offset if offset else positions_BL
            rows_BL = run.comm.local_tokens(rows_BL)
            x_BLD = x_BLD + rows_of(self.positions[...], rows_BL, run.comm.dtype)
        elif features_of(self.config).positions == "sinusoid":
            local_BL = run.comm.local_tokens(positions_BL)
            x_BLD = x_BLD + sinusoids(local_BL, x_BLD.shape[-1]).astype(run.comm.dtype)
        return dropout(x_BLD, self.config.dropout, run.keys_B, 0, run.comm)

    def run_layers(
        self,
        x_BLD: Array,
        positions_BL: Array,
        run: ForwardContext,
        cache: tuple[Array, Array] | None = None,
    ) -> LayersOutput:
        """Run the stack. `cache`: keys and values [layers, B, T, G, K], or None in training."""
        layer, stacked = self._layer(positions_BL, run)
        slots = jnp.arange(self.config.num_layers)
        x_BLD, (auxiliary, cache) = lax.scan(layer, x_BLD, (stacked, slots, cache))
        return LayersOutput(x_BLD, _over_layers(auxiliary), cache)

    def run_some_layers(
        self,
        x_BLD: Array,
        positions_BL: Array,
        run: ForwardContext,
        slots: Array,
        *,
        all_full: bool,
    ) -> LayersOutput:
        """Run the layers of a stack in the order of its slots, some of which may be empty.

        An empty slot is computed like the others and its results are dropped. This costs no time,
        as its pipeline stage would otherwise wait for a longer one, and all devices take the same
        branch.

        Args:
          slots: int32, the layer that each slot holds, -1 if it is empty.
          all_full: whether no slot is empty on any device.
        """
        layer, stacked = self._layer(positions_BL, run)

        def if_full(x_BLD: Array, slot: tuple) -> tuple[Array, tuple[Sums, None]]:
            is_full = slot[1] >= 0
            after_BLD, (auxiliary, _) = layer(x_BLD, slot)
            auxiliary = jax.tree.map(lambda part: jnp.where(is_full, part, 0), auxiliary)
            return jnp.where(is_full, after_BLD, x_BLD), (auxiliary, None)

        x_BLD, (auxiliary, _) = lax.scan(
            layer if all_full else if_full, x_BLD, (stacked, slots, None)
        )
        return LayersOutput(x_BLD, _over_layers(auxiliary), None)

    def _layer(self, positions_BL: Array, run: ForwardContext) -> tuple[Callable, nnx.State]:
        """The body of a scan over layers, and the stacked parameters to scan over."""
        features, windowed = features_of(self.config), windowed_layers(self.config)
        each_windowed = None if isinstance(windowed, bool) else windowed

        def angles(*, is_windowed: bool) -> tuple[Array, Array] | None:
            return (
                rotary.angles(self.config, positions_BL, is_windowed=is_windowed)
                if features.positions == "rotary"
                else None
            )

        cos_sin = angles(is_windowed=windowed is True)
        windowed_cos_sin = (
            angles(is_windowed=True)
            if each_windowed is not None and features.window_rope_theta
            else None
        )
        if windowed is not False:
            run = replace(run, visibility=replace(run.visibility, window=features.window))
        graphdef, stacked = nnx.split(self.layers)

        def body(x_BLD: Array, layer: tuple) -> tuple[Array, tuple[Sums, Any]]:
            params, index, layer_cache = layer
            own, own_cos_sin = run, cos_sin
            if each_windowed is not None:
                is_windowed = each_windowed[jnp.maximum(index, 0)]
                own = replace(run, visibility=replace(run.visibility, is_windowed=is_windowed))
                if windowed_cos_sin is not None:
                    own_cos_sin = jax.tree.map(
                        partial(jnp.where, is_windowed), windowed_cos_sin, cos_sin
                    )
            block: Block = nnx.merge(graphdef, params)
            out = block(x_BLD, index, own, own_cos_sin, layer_cache)
            return out.x_BLD, (out.auxiliary, out.cache)

        return _rematerialised(body, run), stacked

    def hidden(self, tokens_BL: Array, positions_BL: Array, run: ForwardContext) -> Array:
        """Final hidden states [B, L, E] of int32 [B, L] tokens; of this device's tokens if the
        residual stream's are split.
        """
        x_BLD = self.embed(tokens_BL, positions_BL, run)
        x_BLD = self.run_layers(x_BLD, positions_BL, run).x_BLD
        return self.head_input(x_BLD, run.comm).astype(run.comm.dtype)

    def head_input(self, x_BLD: Array, comm: Collectives) -> Array:
        """What the head's matrix multiplies, [B, L, E] in `comm.sums`, of the last layer's output;
        E is the width of the table.
        """
        x_BLD = _normed(self.final_norm, x_BLD, comm)
        if self.table_out is None:
            return x_BLD
        return project(x_BLD, self.table_out[...], comm.dtype, result=comm.sums)

    @property
    def output_head(self) -> Head:
        """The head's parameters; with tied weights, its matrix is the embedding."""
        return Head(
            matrix_VE=(self.head or self.embedding).table[...],
            bias_V=None if self.head_bias is None else self.head_bias[...],
            softcap=features_of(self.config).head_softcap or 0.0,
        )

    def logits(self, hidden_BLE: Array, run: ForwardContext) -> Array:
        """Logits, float32 [B, L, V], of this device's part of the vocabulary; -inf for padding."""
        head, dtype = self.output_head, run.comm.dtype
        hidden_BLE = run.comm.fan_out(hidden_BLE, VOCAB)
        operands = hidden_BLE.astype(dtype), head.matrix_VE.astype(dtype)
        logits = head.finished(
            jnp.einsum("ble,ve->blv", *operands, preferred_element_type=jnp.float32)
        )
        ids = run.comm.offset(logits.shape[-1], VOCAB) + jnp.arange(logits.shape[-1])
        return jnp.where(ids < self.config.vocab_size, logits, -jnp.inf)


def _over_layers(auxiliary: Sums) -> Sums:
    """Sums [layers] of each layer -> their sum."""
    return {name: parts.sum(0) for name, parts in auxiliary.items()}


def _rematerialised(layer: Callable, run: ForwardContext) -> Callable:
    """Apply the remat policies that concern a layer as a whole, "full" and "dots".

    `ForwardContext.recomputed` applies the others."""
    match run.remat:
        case "full" if run.offload:
            # The input is named, not the output: a scan keeps its own copy of an output whatever
            # the policy says (jax-ml/jax#23869).
            return jax.checkpoint(
                lambda x_BLD, slot: layer(checkpoint_name(x_BLD, LAYER_INPUT), slot),
                prevent_cse=False,
                policy=jax.checkpoint_policies.save_and_offload_only_these_names(
                    names_which_can_be_saved=[],
                    names_which_can_be_offloaded=[LAYER_INPUT],
                    offload_src="device",
                    offload_dst="pinned_host",
                ),
            )
        case "full":
            return jax.checkpoint(
                layer, policy=jax.checkpoint_policies.nothing_saveable, prevent_cse=False
            )
        case "dots":
            return jax.checkpoint(
                layer,
                policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
                prevent_cse=False,
            )
    return layer
