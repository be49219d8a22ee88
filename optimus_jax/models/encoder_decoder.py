"""The layers of a model with an encoder: one stack, one residual stream.

The stream is that of the frames, then that of the text. The first layers are the encoder's: they
change the frames alone, each of which sees all others. Those after them are the decoder's: they
change the text alone, whose tokens see earlier ones, and attend to the frames. So pipeline stages
hold some of the layers, and send one stream, as in any other model
(docs/decisions/0038-an-encoder-is-the-first-layers.md).

Where devices share the stream's tokens, each has a part of the frames, then a part of the text.

Shapes: B batch, L length of the stream, F frames, T tokens of text (L, F and T of this device's
part), D embed, G key/value heads and K head_dim.
"""

from collections.abc import Callable
from dataclasses import replace
from enum import Enum
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax

from optimus_jax.config import ModelConfig
from optimus_jax.mesh.axes import LENGTH
from optimus_jax.mesh.collectives import Collectives
from optimus_jax.mesh.scopes import LAYER
from optimus_jax.mesh.slots import EMPTY
from optimus_jax.mesh.sums import Sums
from optimus_jax.models.block import (
    SITES_OF_CROSS,
    SITES_PER_LAYER,
    Block,
    ForwardContext,
    LayersOutput,
)
from optimus_jax.models.kernels import Visibility

KeysValues = tuple[Array, Array]
"""Keys and values."""


class StackSide(Enum):
    """Whose a layer is."""

    ENCODER = "encoder"
    DECODER = "decoder"


class Streams(NamedTuple):
    """The residual stream of both sides."""

    frames_BFD: Array
    text_BTD: Array

    @property
    def joined(self) -> Array:
        """One stream [B, L, D]."""
        return jnp.concatenate(self, 1)

    @classmethod
    def of(cls, x_BLD: Array, config: ModelConfig, comm: Collectives) -> "Streams":
        """The inverse of `joined`."""
        num_frames = config.frames // comm.size(1, LENGTH)
        return cls(x_BLD[:, :num_frames], x_BLD[:, num_frames:])


def text_of(values_BL: Array, config: ModelConfig) -> Array:
    """Those of the text, of values [B, L, ...] of all tokens; all, if there is no encoder."""
    return values_BL[:, config.frames :] if config.frames else values_BL


def site_of_frames(config: ModelConfig) -> int:
    """Where embedded frames draw a dropout mask: after the sites of all layers."""
    return (SITES_PER_LAYER + SITES_OF_CROSS) * config.num_layers + 1


def sides_of(slots: tuple[int, ...], config: ModelConfig) -> frozenset[StackSide]:
    """Whose the layers in these slots are."""
    return frozenset(
        StackSide.ENCODER if slot < config.encoder_layers else StackSide.DECODER
        for slot in slots
        if slot != EMPTY
    )


def layers_with(path: str, config: ModelConfig) -> range:
    """The layers that use a leaf of the stack, such as `layers/cross/norm/scale`: all, but for what
    `CrossAttention` has. In others its values mean nothing."""
    first = config.encoder_layers
    if "/cross/encoder_norm/" in path:
        return range(first - 1, first)
    return range(first if "/cross/" in path else 0, config.num_layers)


class TwoSides:
    """Runs the layers of one stack.

    Args:
      blocks: the stack, with leaves [slots, ...].
      config: of a model with an encoder.
      run: inputs of the pass; documents are those of the text.
    """

    def __init__(self, blocks: Block, config: ModelConfig, run: ForwardContext):
        self.graphdef, self.stacked = nnx.split(blocks)
        self.config = config
        self.of_frames = replace(run, visibility=Visibility(causal=False))
        segments = run.visibility.segments_BL
        self.of_text = replace(
            run,
            visibility=replace(
                run.visibility,
                causal=True,
                segments_BL=None if segments is None else text_of(segments, config),
            ),
        )

    def all(self, x_BLD: Array) -> LayersOutput:
        """The stream after all layers, in order."""
        streams, first = (
            Streams.of(x_BLD, self.config, self.of_text.comm),
            self.config.encoder_layers,
        )
        frames_BFD, of_frames = self.encoded(streams.frames_BFD, slice(0, first))
        text_BTD, of_text, _ = self.decoded(streams.text_BTD, frames_BFD, slice(first, None))
        return LayersOutput(
            Streams(frames_BFD, text_BTD).joined, jax.tree.map(jnp.add, of_frames, of_text), None
        )

    def encoded(self, frames_BFD: Array, layers: slice) -> tuple[Array, Sums]:
        """Frames after the encoder's layers, and their auxiliary sums."""

        def body(x_BFD: Array, layer: tuple) -> tuple[Array, Sums]:
            params, index = layer
            return self._encode(nnx.merge(self.graphdef, params), x_BFD, index)

        whole = self.of_frames.recomputed_whole(body)
        frames_BFD, auxiliary = lax.scan(whole, frames_BFD, self._layers(layers))
        return frames_BFD, _over_layers(auxiliary)

    def decoded(
        self,
        text_BTD: Array,
        frames: Array | KeysValues,
        layers: slice,
        cache: KeysValues | None = None,
    ) -> tuple[Array, Sums, KeysValues | None]:
        """Text after the decoder's layers, their auxiliary sums, and the cache.

        Args:
          frames: [B, F, D], after the encoder's layers; or what `keys_and_values` gives of them.
          cache: keys and values of earlier tokens, [layers, B, T, G, K].
        """
        of_layers = frames if isinstance(frames, tuple) else None

        def body(x_BTD: Array, layer: tuple) -> tuple[Array, tuple[Sums, KeysValues | None]]:
            (params, index), earlier, own = layer
            block: Block = nnx.merge(self.graphdef, params)
            read = frames if own is None else own
            with jax.named_scope(LAYER):
                out = block(x_BTD, index, self.of_text, None, earlier, read)
            return out.x_BLD, (out.auxiliary, out.cache)

        whole = self.of_text.recomputed_whole(body)
        text_BTD, (auxiliary, cache) = lax.scan(
            whole, text_BTD, (self._layers(layers), cache, of_layers)
        )
        return text_BTD, _over_layers(auxiliary), cache

    def keys_and_values(self, frames_BFD: Array, layers: slice, num_local_heads: int) -> KeysValues:
        """What the decoder's layers attend to, [layers, B, F, G, K] each, for this many query heads
        of this device."""

        def one(layer: tuple) -> KeysValues:
            block: Block = nnx.merge(self.graphdef, layer[0])
            assert block.cross is not None
            return block.cross.keys_and_values(frames_BFD, num_local_heads, self.of_text.comm)

        return lax.map(one, self._layers(layers))

    def some(
        self, x_BLD: Array, slots: Array, sides: frozenset[StackSide], *, all_full: bool
    ) -> LayersOutput:
        """The stream after the layers in some slots, as `Decoder.run_some_layers`.

        Args:
          sides: whose they may be. Where both, a layer is a branch of the program, which all
            devices of a stage take alike; and so is an empty slot.
        """
        comm = self.of_text.comm

        def encode(block: Block, streams: Streams, index: Array) -> tuple[Array, Sums]:
            frames_BFD, auxiliary = self._encode(block, streams.frames_BFD, index)
            return streams._replace(frames_BFD=frames_BFD).joined, auxiliary

        def decode(block: Block, streams: Streams, index: Array) -> tuple[Array, Sums]:
            with jax.named_scope(LAYER):
                out = block(streams.text_BTD, index, self.of_text, None, read=streams.frames_BFD)
            return streams._replace(text_BTD=out.x_BLD).joined, out.auxiliary

        def leave(block: Block, streams: Streams, index: Array) -> tuple[Array, Sums]:
            return streams.joined, {}

        def body(x_BLD: Array, layer: tuple) -> tuple[Array, Sums]:
            params, index = layer

            def side(run: Callable) -> Callable:
                def one(params: nnx.State, x_BLD: Array) -> tuple[Array, Sums]:
                    streams = Streams.of(x_BLD, self.config, comm)
                    return run(nnx.merge(self.graphdef, params), streams, index)

                return one

            of_sides = ((StackSide.ENCODER, encode), (StackSide.DECODER, decode))
            runs = [side(run) for whose, run in of_sides if whose in sides]
            if len(runs) == 1 and all_full:
                return runs[0](params, x_BLD)
            is_decoder = index >= self.config.encoder_layers
            which = is_decoder.astype(jnp.int32) if len(runs) == 2 else jnp.zeros_like(index)
            if not all_full:
                runs.append(side(leave))
                which = jnp.where(index == EMPTY, len(runs) - 1, which)
            return lax.switch(which, runs, params, x_BLD)

        whole = self.of_text.recomputed_whole(body)
        x_BLD, auxiliary = lax.scan(whole, x_BLD, (self.stacked, slots))
        return LayersOutput(x_BLD, _over_layers(auxiliary), None)

    def _encode(self, block: Block, x_BFD: Array, index: Array) -> tuple[Array, Sums]:
        """One layer of the encoder; its last one norms the result."""
        with jax.named_scope(LAYER):
            out = block(x_BFD, index, self.of_frames, None)
        assert block.cross is not None
        is_last = index == self.config.encoder_layers - 1
        ended_BFD = self.of_frames.recomputed(block.cross.encoder_norm)(out.x_BLD)
        return jnp.where(is_last, ended_BFD, out.x_BLD), out.auxiliary

    def _layers(self, layers: slice) -> tuple[nnx.State, Array]:
        """Parameters and numbers of some layers."""
        numbers = jnp.arange(self.config.num_layers)
        return jax.tree.map(lambda leaf: leaf[layers], self.stacked), numbers[layers]


def _over_layers(auxiliary: Sums) -> Sums:
    """Sums [layers] of each layer -> their sum."""
    return {name: parts.sum(0) for name, parts in auxiliary.items()}
