"""The decoder: embedding, a scanned stack of blocks (models/block.py), a final norm and the head's
matrix.

One class serves every family; `models/families.py` lists the differences. The stack is one set of
parameters with a leading `layers` dimension, so that compile time does not grow with depth.

Shapes: B batch, L length, T cached length, D embed, V vocab (this device's part), G key/value
heads and K head_dim.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array, lax

from optimus_jax.config import ModelConfig
from optimus_jax.mesh.axes import EMBED, LAYERS, POSITIONS, TABLE, VOCAB
from optimus_jax.mesh.collectives import Collectives
from optimus_jax.mesh.sums import Sums
from optimus_jax.models import rotary
from optimus_jax.models.adapters import block_rngs
from optimus_jax.models.block import Block, ForwardContext, LayersOutput, normed
from optimus_jax.models.families import features_of, has_window, table_width
from optimus_jax.models.head import Head
from optimus_jax.models.layer_loop import Layer, Segment, run_stack
from optimus_jax.models.layers import (
    Embedding,
    Norm,
    constant,
    dropout,
    freeze,
    normal,
    rows_of,
    sinusoids,
)
from optimus_jax.models.products import project, project_back


def windowed_layers(config: ModelConfig) -> Array | bool:
    """Whether layers have a window: of all alike, or bool [layers] where they differ."""
    windowed = np.array(has_window(config))
    return jnp.asarray(windowed) if windowed.any() and not windowed.all() else bool(windowed.any())


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
        self.embedding = table("embedding", rngs=rngs)
        rows = config.max_length + (features.position_offset or 0)
        self.positions = nnx.data(
            normal(
                rngs,
                (rows, config.embed_dim),
                (POSITIONS, EMBED),
                config.init_std,
                "table",
                "embedding",
            )
            if features.positions == "learned"
            else None
        )
        self.position_offset = features.position_offset or 0
        between = (config.embed_dim, table_dim), (EMBED, TABLE)
        self.table_in = nnx.data(
            normal(rngs, *between, config.init_std, "matrix_back", "embedding")
            if features.table_dim
            else None
        )

        @nnx.vmap(in_axes=(0,), out_axes=0, transform_metadata={nnx.PARTITION_NAME: LAYERS})
        def stack(key: Array) -> Block:
            return Block(config, rngs=block_rngs(config.tuning, key))

        keys = jax.random.split(rngs.params(), config.num_layers)
        self.layers = stack(keys if slots is None else keys[np.maximum(slots, 0)])
        self.final_norm = nnx.data(
            Norm(str(features.norm), (config.embed_dim,), config.norm_epsilon)
            if features.final_norm
            else None
        )
        self.head = nnx.data(None if config.tied else table("head", rngs=rngs))
        self.table_out = nnx.data(
            normal(rngs, *between, config.init_std, "matrix", "head")
            if features.table_dim
            else None
        )
        self.head_bias = nnx.data(
            constant(0.0, (vocab_rows,), (VOCAB,), "bias", "head") if features.head_bias else None
        )
        freeze(self, config.tuning)

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
        """Run the stack. `cache`: keys and values [layers, B, T, G, K], or None in training.

        Layers that are not trained run by themselves, so that backward has no gradient of theirs,
        and ends above them if nothing below is trained.
        """
        slots = jnp.arange(self.config.num_layers)
        num_frozen = self.config.tuning.freeze_layers if cache is None else 0
        if run.has_own_loops and cache is None:
            return self._in_own_loops(x_BLD, positions_BL, run, slots, num_frozen)
        layer, stacked = self._layer(positions_BL, run)
        if not num_frozen:
            x_BLD, (auxiliary, cache) = lax.scan(layer, x_BLD, (stacked, slots, cache))
            return LayersOutput(x_BLD, _over_layers(auxiliary), cache)
        frozen = jax.tree.map(lax.stop_gradient, stacked)

        def frozen_layer(x_BLD: Array, slot: Array) -> tuple[Array, tuple[Sums, None]]:
            # The stack is indexed, not cut: a part of it would be a copy.
            params = jax.tree.map(
                lambda leaf: lax.dynamic_index_in_dim(leaf, slot, keepdims=False), frozen
            )
            return layer(x_BLD, (params, slot, None))

        x_BLD, (below, _) = lax.scan(frozen_layer, x_BLD, slots[:num_frozen])
        trained = jax.tree.map(lambda leaf: leaf[num_frozen:], stacked)
        x_BLD, (above, _) = lax.scan(layer, x_BLD, (trained, slots[num_frozen:], None))
        auxiliary = jax.tree.map(jnp.add, _over_layers(below), _over_layers(above))
        return LayersOutput(x_BLD, auxiliary, None)

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
        if run.has_own_loops:
            return self._in_own_loops(x_BLD, positions_BL, run, slots, all_full=all_full)
        layer, stacked = self._layer(positions_BL, run)
        x_BLD, (auxiliary, _) = lax.scan(
            layer if all_full else _if_full(layer), x_BLD, (stacked, slots, None)
        )
        return LayersOutput(x_BLD, _over_layers(auxiliary), None)

    def _in_own_loops(
        self,
        x_BLD: Array,
        positions_BL: Array,
        run: ForwardContext,
        slots: Array,
        num_frozen: int = 0,
        *,
        all_full: bool = True,
    ) -> LayersOutput:
        """Run the stack in loops with their own backward (models/layer_loop.py)."""
        parts: list[tuple[Array, ForwardContext]] = [(positions_BL, run)]
        streams: tuple[Array, ...] = (x_BLD,)
        # Plans have even rows; evaluations may have others, which run as one stream.
        if run.overlap == "halves" and len(x_BLD) % 2 == 0:
            parts = list(zip(jnp.split(positions_BL, 2), run.halves(), strict=True))
            streams = tuple(jnp.split(x_BLD, 2))
        stacked = nnx.split(self.layers)[1]

        def layer(positions_BL: Array, run: ForwardContext) -> Layer:
            body = self._layer(positions_BL, replace(run, comm=run.comm.on_whole_matrices))[0]
            body = body if all_full else _if_full(body)

            def one(params: nnx.State, slot: Array, x_BLD: Array) -> tuple[Array, Sums]:
                after_BLD, (auxiliary, _) = body(x_BLD, (params, slot, None))
                return after_BLD, auxiliary

            return one

        def segment(first: int, last: int, **changes: Any) -> list[Segment]:
            layers = tuple(layer(rows, replace(part, **changes)) for rows, part in parts)
            return [Segment(first, last, layers)] if first < last else []

        below: Sums = {}
        run_on = partial(run_stack, slots=slots, comm=run.comm, hands_over=run.hands_over)
        if num_frozen:
            frozen = jax.tree.map(lax.stop_gradient, stacked)
            streams, below = run_on(segment(0, num_frozen), frozen, streams)
        kept_from = max(num_frozen, len(slots) - run.kept_layers)
        segments = segment(num_frozen, kept_from) + segment(kept_from, len(slots), remat="none")
        streams, auxiliary = run_on(segments, stacked, streams)
        x_BLD = streams[0] if len(streams) == 1 else jnp.concatenate(streams)
        if below:
            auxiliary = jax.tree.map(jnp.add, below, auxiliary)
        return LayersOutput(x_BLD, auxiliary, None)

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

        return run.recomputed_whole(body), stacked

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
        x_BLD = normed(self.final_norm, x_BLD, comm)
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


def _if_full(layer: Callable) -> Callable:
    """The body of a scan over layers, for stacks with empty slots."""

    def if_full(x_BLD: Array, slot: tuple) -> tuple[Array, tuple[Sums, None]]:
        is_full = slot[1] >= 0
        after_BLD, (auxiliary, _) = layer(x_BLD, slot)
        auxiliary = jax.tree.map(lambda part: jnp.where(is_full, part, 0), auxiliary)
        return jnp.where(is_full, after_BLD, x_BLD), (auxiliary, None)

    return if_full


def _over_layers(auxiliary: Sums) -> Sums:
    """Sums [layers] of each layer -> their sum."""
    return {name: parts.sum(0) for name, parts in auxiliary.items()}
