"""The model: embedding, a scanned stack of blocks (models/block.py), a final norm and the head's
matrix. With an encoder its layers run as models/encoder_decoder.py has them.

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
from optimus_jax.config.model import HIDDEN_PATCH, PATCH_TOKEN
from optimus_jax.config.tuning import ParameterGroup
from optimus_jax.mesh.axes import EMBED, LABELS, LAYERS, NORM, PATCH, POSITIONS, TABLE, VOCAB
from optimus_jax.mesh.collectives import Collectives
from optimus_jax.mesh.leaf import Role
from optimus_jax.mesh.scopes import EMBEDDING, LAYER
from optimus_jax.mesh.sums import Sums
from optimus_jax.models import rotary
from optimus_jax.models.adapters import block_rngs
from optimus_jax.models.block import Block, ForwardContext, LayersOutput, check_output, normed
from optimus_jax.models.encoder_decoder import (
    Streams,
    TwoSides,
    sides_of,
    site_of_frames,
    text_of,
)
from optimus_jax.models.families import (
    BLOCKS,
    features_of,
    has_window,
    head_transform_of,
    table_width,
)
from optimus_jax.models.head import Head
from optimus_jax.models.layer_loop import Layer, Segment, run_stack
from optimus_jax.models.layers import (
    Embedding,
    Norm,
    add_bias,
    constant,
    dropout,
    freeze,
    normal,
    rows_of,
    sinusoids,
)
from optimus_jax.models.mlp import ACTIVATIONS
from optimus_jax.models.products import project, project_back
from optimus_jax.models.sound import SoundInput


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
        width = table_dim if features.embedding_norm else config.embed_dim

        def added(rows: int, *, exists: bool) -> nnx.Param | None:
            """A table whose rows are added to the tokens'."""
            dims, std = (POSITIONS, EMBED), config.init_std
            return nnx.data(
                normal(rngs, (rows, width), dims, std, "table", "embedding") if exists else None
            )

        rows = config.max_length - config.frames + (features.position_offset or 0)
        self.positions = added(rows, exists=features.positions == "learned")
        self.token_types = added(features.token_types or 0, exists=bool(features.token_types))

        def norm(width: int, *, exists: bool | None) -> Norm | None:
            kind = str(features.norm)
            return nnx.data(Norm(kind, (width,), config.norm_epsilon) if exists else None)

        self.embedding_norm = norm(table_dim, exists=features.embedding_norm)
        self.position_offset = features.position_offset or 0
        patch = (config.embed_dim, config.patch_values), (EMBED, PATCH)
        self.patches = nnx.data(
            normal(rngs, *patch, config.init_std, "matrix_back", "embedding")
            if config.image_size
            else None
        )
        self.patch_bias = nnx.data(
            constant(0.0, (config.embed_dim,), (NORM,), "bias", "embedding")
            if config.image_size
            else None
        )
        self.sound = nnx.data(SoundInput(config, rngs=rngs) if config.frames else None)
        self.hidden_patch = nnx.data(
            constant(0.0, (config.embed_dim,), (NORM,), "bias", "embedding")
            if config.image_size and not config.labels
            else None
        )

        def projection(width: int, role: Role, group: ParameterGroup) -> nnx.Param:
            """Between the residual stream and another width."""
            between = (config.embed_dim, width), (EMBED, TABLE)
            return normal(rngs, *between, config.init_std, role, group)

        self.table_in = nnx.data(
            projection(table_dim, "matrix_back", "embedding") if features.table_dim else None
        )
        self.table_bias = nnx.data(
            constant(0.0, (config.embed_dim,), (NORM,), "bias", "embedding")
            if features.table_dim and features.table_bias
            else None
        )

        @nnx.vmap(in_axes=(0,), out_axes=0, transform_metadata={nnx.PARTITION_NAME: LAYERS})
        def stack(key: Array) -> Block:
            kind = BLOCKS.get(config.family, Block)
            return kind(config, rngs=block_rngs(config.tuning, key))

        self.sides = sides_of(slots or tuple(range(config.num_layers)), config)
        """Whose the layers of the stack are."""
        keys = jax.random.split(rngs.params(), config.num_layers)
        self.layers = stack(keys if slots is None else keys[np.maximum(slots, 0)])
        self.final_norm = norm(config.embed_dim, exists=features.final_norm)
        is_own, shape = (
            config.predicts_tokens and not config.tied,
            (config.num_outputs, config.embed_dim),
        )
        self.head = nnx.data(table("head", rngs=rngs) if is_own else None)
        self.label_table = nnx.data(
            None
            if config.predicts_tokens
            else normal(rngs, shape, (LABELS, EMBED), config.init_std, "table", "head")
        )
        transform = head_transform_of(config)
        self.table_out = nnx.data(
            projection(transform.width, "matrix", "head") if transform else None
        )
        self.transform_bias = nnx.data(
            constant(0.0, (transform.width,), (NORM,), "bias", "head")
            if transform and transform.activation
            else None
        )
        self.transform_norm = norm(table_dim, exists=transform is not None and transform.is_normed)
        self.head_bias = nnx.data(self._head_bias(vocab_rows))
        freeze(self, config.tuning)

    def _head_bias(self, vocab_rows: int) -> nnx.Param | None:
        """The head's bias: that of labels as the classes of transformers have it, for encoders."""
        features = features_of(self.config)
        if self.config.predicts_tokens:
            rows, dim, exists = vocab_rows, VOCAB, bool(features.head_bias)
        else:
            rows, dim, exists = self.config.num_outputs, LABELS, not features.causal
        return constant(0.0, (rows,), (dim,), "bias", "head") if exists else None

    @jax.named_scope(EMBEDDING)
    def embed(
        self,
        tokens_BL: Array,
        positions_BL: Array,
        run: ForwardContext,
        types_BL: Array | None = None,
        patches_BLP: Array | None = None,
    ) -> Array:
        """int32 [B, L] -> [B, L, D].

        Args:
          types_BL: types of the tokens; None: all are 0.
          patches_BLP: values of the patches of an image, or of the frames of sound, seen in the
            place of tokens that are PATCH_TOKEN; None: the model reads text.
        """
        if self.sound is not None:
            assert patches_BLP is not None
            frames_BFD = self.embed_frames(patches_BLP[:, : self.config.frames], run)
            text_BL, places_BL = (text_of(each, self.config) for each in (tokens_BL, positions_BL))
            return Streams(frames_BFD, self.embed_text(text_BL, places_BL, run)).joined
        return self.embed_text(tokens_BL, positions_BL, run, types_BL, patches_BLP)

    def embed_frames(self, values_BFP: Array, run: ForwardContext) -> Array:
        """Values of frames of sound [B, F, P] -> [B, F, D] of this device's frames."""
        assert self.sound is not None
        x_BFD = run.comm.local_tokens(self.sound(values_BFP, run.comm.dtype))
        places_F = jnp.arange(values_BFP.shape[1])
        places_BF = run.comm.local_tokens(jnp.broadcast_to(places_F, values_BFP.shape[:2]))
        x_BFD = x_BFD + sinusoids(places_BF, x_BFD.shape[-1]).astype(run.comm.dtype)
        site = site_of_frames(self.config)
        return dropout(x_BFD, self.config.dropout, run.keys_B, site, run.comm)

    def embed_text(
        self,
        tokens_BL: Array,
        positions_BL: Array,
        run: ForwardContext,
        types_BL: Array | None = None,
        patches_BLP: Array | None = None,
    ) -> Array:
        """`embed` of tokens of text, or of patches of images."""
        has_patches = self.patches is not None
        x_BLD = self.embedding(jnp.maximum(tokens_BL, 0) if has_patches else tokens_BL, run.comm)
        if has_patches and patches_BLP is not None:
            x_BLD = self._with_patches(x_BLD, tokens_BL, patches_BLP, run)
        if self.embedding_norm is not None:
            x_BLD = self._with_positions(x_BLD, positions_BL, types_BL, run)
            x_BLD = self.embedding_norm(x_BLD, run.comm.dtype)
        if self.table_in is not None:
            x_BLD = project_back(x_BLD, self.table_in[...], run.comm.dtype)
            x_BLD = add_bias(x_BLD, self.table_bias)
        if self.scale_embedding is not None:
            x_BLD = x_BLD * jnp.asarray(self.scale_embedding, x_BLD.dtype)
        if self.embedding_norm is None:
            x_BLD = self._with_positions(x_BLD, positions_BL, types_BL, run)
        return dropout(x_BLD, self.config.dropout, run.keys_B, 0, run.comm)

    def _with_patches(
        self, x_BLD: Array, tokens_BL: Array, patches_BLP: Array, run: ForwardContext
    ) -> Array:
        """Embedded tokens, of which those that are patches are projected from their values."""
        dtype, comm = run.comm.dtype, run.comm
        assert self.patches is not None
        patches_BLP = comm.local_tokens(patches_BLP).astype(dtype)
        seen_BLD = add_bias(project_back(patches_BLP, self.patches[...], dtype), self.patch_bias)
        tokens_BL = comm.local_tokens(tokens_BL)
        is_patch_BL = tokens_BL == PATCH_TOKEN
        x_BLD = jnp.where(is_patch_BL[..., None], seen_BLD.astype(x_BLD.dtype), x_BLD)
        if self.hidden_patch is None:
            return x_BLD
        is_hidden_BL = tokens_BL == HIDDEN_PATCH
        return jnp.where(is_hidden_BL[..., None], self.hidden_patch[...].astype(x_BLD.dtype), x_BLD)

    def _with_positions(
        self, x_BLE: Array, positions_BL: Array, types_BL: Array | None, run: ForwardContext
    ) -> Array:
        """Embedded tokens with their positions and types, if the family adds these."""
        dtype = run.comm.dtype
        if self.positions is not None:
            offset = self.position_offset
            rows_BL = positions_BL + offset if offset else positions_BL
            rows_BL = run.comm.local_tokens(rows_BL)
            x_BLE = x_BLE + rows_of(self.positions[...], rows_BL, dtype)
        elif features_of(self.config).positions == "sinusoid":
            local_BL = run.comm.local_tokens(positions_BL)
            x_BLE = x_BLE + sinusoids(local_BL, x_BLE.shape[-1]).astype(dtype)
        if self.token_types is not None:
            types_BL = jnp.zeros_like(positions_BL) if types_BL is None else types_BL
            rows_BL = run.comm.local_tokens(types_BL)
            x_BLE = x_BLE + rows_of(self.token_types[...], rows_BL, dtype)
        return x_BLE

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
        if self.sound is not None:
            assert cache is None
            return TwoSides(self.layers, self.config, run).all(x_BLD)
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
        if self.sound is not None:
            stack = TwoSides(self.layers, self.config, run)
            return stack.some(x_BLD, slots, self.sides, all_full=all_full)
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
        run = replace(
            run,
            visibility=replace(
                run.visibility,
                causal=bool(features.causal),
                window=features.window if windowed is not False else None,
            ),
        )
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
            with jax.named_scope(LAYER):
                out = block(x_BLD, index, own, own_cos_sin, layer_cache)
            check_output(block, x_BLD, layer_cache, out)
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
        E is the width of the table. With an encoder, of the text alone.
        """
        if self.sound is not None:
            x_BLD = Streams.of(x_BLD, self.config, comm).text_BTD
        return self.text_head_input(x_BLD, comm)

    def text_head_input(self, x_BLD: Array, comm: Collectives) -> Array:
        """`head_input` of a stream without frames."""
        x_BLD, transform = normed(self.final_norm, x_BLD, comm), head_transform_of(self.config)
        if transform is None or self.table_out is None:
            return x_BLD
        x_BLE = project(x_BLD, self.table_out[...], comm.dtype, result=comm.sums)
        if transform.activation is None:
            return x_BLE
        x_BLE = ACTIVATIONS[transform.activation](add_bias(x_BLE, self.transform_bias))
        return normed(self.transform_norm, x_BLE, comm)

    @property
    def output_head(self) -> Head:
        """The head's parameters; with tied weights, its matrix is the embedding."""
        own = self.label_table
        return Head(
            matrix_VE=((self.head or self.embedding).table if own is None else own)[...],
            bias_V=None if self.head_bias is None else self.head_bias[...],
            softcap=features_of(self.config).head_softcap or 0.0
            if self.config.predicts_tokens
            else 0.0,
        )

    def logits(self, hidden_BLE: Array, run: ForwardContext) -> Array:
        """Logits, float32 [B, L, V], of all tokens and this device's part of the vocabulary, -inf
        for padding; or of the tokens that it is given and all labels or values of a patch.
        """
        head, dtype = self.output_head, run.comm.dtype
        if self.config.predicts_tokens:
            hidden_BLE = run.comm.fan_out(hidden_BLE, VOCAB)
        operands = hidden_BLE.astype(dtype), head.matrix_VE.astype(dtype)
        logits = head.finished(
            jnp.einsum("ble,ve->blv", *operands, preferred_element_type=jnp.float32)
        )
        if not self.config.predicts_tokens:
            return logits
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
