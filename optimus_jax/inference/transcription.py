"""Writes down recordings with a model of sound, on one device or split over a mesh: the likeliest
token after each one, with caches of keys and values.

Shapes: B recordings, F frames, P values of a frame, T tokens of text, D embed.
"""

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import PartitionSpec

from optimus_jax.config import DataConfig, ModelConfig
from optimus_jax.config.data import SpeechTask
from optimus_jax.data.recordings import (
    NO_LANGUAGE,
    before_eos,
    frames_of,
    lacks_language,
    most_samples,
    names_no_language,
    prompt_of,
)
from optimus_jax.data.tokenizers import Tokenizer
from optimus_jax.devices.jax_settings import check_jax_settings
from optimus_jax.errors import ConfigError, DataError, argument, explain
from optimus_jax.inference.model_on_mesh import ModelOnMesh
from optimus_jax.inference.text_model import TextModel
from optimus_jax.mesh.axes import HEADS
from optimus_jax.models.encoder_decoder import KeysValues, TwoSides
from optimus_jax.models.shapes import Params


@dataclass(frozen=True, kw_only=True, eq=False)
class SpeechModel:
    """A trained model of sound with its tokenizer."""

    model: ModelOnMesh
    params: Params
    """On its devices, in the format of products and caches."""
    tokenizer: Tokenizer
    data: DataConfig
    """Names the language, and what is written."""
    suppressed: tuple[int, ...] = ()
    """Tokens that are not written."""
    suppressed_first: tuple[int, ...] = ()
    """Tokens that a text does not begin with either."""

    @property
    def config(self) -> ModelConfig:
        """The model."""
        return self.model.config

    @classmethod
    def of(
        cls,
        loaded: TextModel,
        *,
        language: str | None = None,
        speech_task: SpeechTask | None = None,
    ) -> "SpeechModel":
        """That of a loaded model.

        Args:
          language, speech_task: as in `DataConfig`; None: as the model's generation_config.json or
            its run has it. A model of English alone is asked for neither.
        Raises:
          ConfigError: the model does not read sound, or its generation_config.json names tokens
            that it lacks.
        """
        if not loaded.config.frames:
            raise ConfigError(
                explain(
                    "the model does not read sound",
                    given=f"{loaded.config.name}, of the family {loaded.config.family}",
                    do="name a run of whisper-nano, or a published Whisper",
                )
            )
        given = loaded.generation_config
        if names_no_language(given):
            language = NO_LANGUAGE
        named = {
            "language": language or language_of(given, loaded.tokenizer),
            "speech_task": speech_task or given.get("task"),
        }
        return cls(
            model=loaded.model,
            params=loaded.params,
            tokenizer=loaded.tokenizer,
            data=replace(loaded.data, **{name: each for name, each in named.items() if each}),
            suppressed=loaded.generation_tokens("suppress_tokens"),
            suppressed_first=loaded.generation_tokens("begin_suppress_tokens"),
        )

    def transcribe(self, recordings: Sequence[np.ndarray], *, batch_size: int = 8) -> list[str]:
        """The text of each recording, float32 [S] at SAMPLE_RATE. Those that are longer than the
        model reads are written down in parts.

        Args:
          batch_size: most recordings, or parts of them, at once.
        """
        longest, parts, whose = most_samples(self.config), [], []
        for number, samples in enumerate(recordings):
            for start in range(0, max(1, len(samples)), longest):
                parts.append(samples[start : start + longest])
                whose.append(number)
        texts, written = [""] * len(recordings), []
        for some in batches(parts, batch_size):
            # Batches of one size share a compiled program.
            rows = [*some, *[some[-1]] * (min(batch_size, len(parts)) - len(some))]
            values_BFP = np.stack([frames_of(samples, self.config) for samples in rows])
            written += self.tokens_of(values_BFP)[: len(some)]
        for number, tokens in zip(whose, written, strict=True):
            text = self.tokenizer.decode(tokens).strip()
            texts[number] = f"{texts[number]} {text}".strip()
        return texts

    def tokens_of(self, values_BFP: np.ndarray) -> list[np.ndarray]:
        """Tokens of the text of each spectrogram, without those that ask for it and eos.

        Raises DataError if these leave no room.
        """
        check_jax_settings()
        eos = self.tokenizer.eos
        prompt = prompt_of(self.tokenizer, self.data)
        if (room := self.config.max_length - self.config.frames - len(prompt)) < 1:
            raise DataError(
                explain(
                    f"{self.config.name} has no positions for a text",
                    given=f"{len(prompt)} tokens before it",
                    do="use a model with a larger max_length",
                )
            )
        rows = len(values_BFP)
        tokens = np.tile(np.array(prompt, np.int32), (rows, 1))
        read, cache = encode(self.model, self.params, values_BFP)
        written, over, start = [], np.zeros(rows, bool), 0
        banned = np.zeros(self.config.vocab_size, bool)
        banned[list(self.suppressed)] = True
        first = banned.copy()
        first[list(self.suppressed_first)] = True
        for _ in range(room):
            found, cache = extend(
                self.model,
                self.params,
                read,
                cache,
                tokens,
                np.int32(start),
                banned if written else first,
            )
            ids = np.where(over, eos, np.asarray(found))
            over |= ids == eos
            written.append(ids)
            if over.all():
                break
            start += tokens.shape[1]
            tokens = ids[:, None].astype(np.int32)
        return [before_eos(row, eos) for row in np.stack(written, 1)]


def language_of(generation: Mapping[str, Any], tokenizer: Tokenizer) -> str | None:
    """Code of the language that a generation_config.json names; None: it names none.

    Raises ConfigError if it names one otherwise, as transformers allows, and has several.
    """
    language = str(generation.get("language") or "").strip("<|>").lower()
    if not language or not lacks_language(tokenizer, language):
        return language or None
    if len(codes := generation.get("lang_to_id") or ()) == 1:
        return next(iter(codes)).strip("<|>")
    raise ConfigError(
        explain(
            "the model's generation_config.json names a language by a word that is no code",
            given=f"language={language!r}; the tokenizer has no token <|{language}|>",
            do=f"name its code, such as hi for hindi: {argument('language', 'CODE')}",
        )
    )


@functools.partial(jax.jit, static_argnames="model")
def encode(model: ModelOnMesh, params: Params, values_BFP: Array) -> tuple[KeysValues, KeysValues]:
    """What the decoder attends to of some spectrograms, and an empty cache of its own tokens:
    keys and values of each of its layers.
    """
    config, whole = model.config, PartitionSpec()

    def of_device(params: Params, values_BFP: Array) -> KeysValues:
        decoder, run = model.on_device(params)
        frames_BFD = model.varied(decoder.embed_frames(values_BFP, run))
        stack, first = TwoSides(decoder.layers, config, run), config.encoder_layers
        frames_BFD, _ = stack.encoded(frames_BFD, slice(0, first))
        num_heads = config.num_heads // run.comm.size(1, HEADS)
        return stack.keys_and_values(frames_BFD, slice(first, None), num_heads)

    read = model.over_mesh(of_device, (model.param_specs, whole), model.cache_spec)
    num_keys = config.max_length - config.frames
    empty = model.empty_cache(params, num_keys, rows=len(values_BFP))
    return read(params, jnp.asarray(values_BFP)), empty


@functools.partial(jax.jit, static_argnames="model", donate_argnames="cache")
def extend(
    model: ModelOnMesh,
    params: Params,
    read: KeysValues,
    cache: KeysValues,
    tokens_BT: Array,
    start: Array,
    banned_V: Array,
) -> tuple[Array, KeysValues]:
    """The likeliest token after some tokens, int32 [B], and the cache with theirs.

    Args:
      start: position of the first of them.
      banned_V: whether a token is not to be written, bool.
    """
    config, whole, by_heads = model.config, PartitionSpec(), model.cache_spec

    def of_device(
        params: Params, read: KeysValues, cache: KeysValues, tokens_BT: Array, start: Array
    ) -> tuple[Array, KeysValues]:
        decoder, run = model.on_device(params, start)
        places_BT = jnp.broadcast_to(start + jnp.arange(tokens_BT.shape[1]), tokens_BT.shape)
        x_BTD = model.varied(decoder.embed_text(tokens_BT, places_BT, run))
        stack, layers = TwoSides(decoder.layers, config, run), slice(config.encoder_layers, None)
        x_BTD, _, after = stack.decoded(x_BTD, model.varied(read), layers, model.varied(cache))
        assert after is not None, "a cache went in and none came out"
        hidden_B1D = decoder.text_head_input(x_BTD[:, -1:], run.comm)
        return model.next_logits(decoder, hidden_B1D, run), after

    in_specs = (model.param_specs, by_heads, by_heads, whole, whole)
    run = model.over_mesh(of_device, in_specs, (whole, by_heads))
    logits_BV, cache = run(params, read, cache, tokens_BT, start)
    logits_BV = jnp.where(banned_V[None], -jnp.inf, logits_BV[:, : config.vocab_size])
    return jnp.argmax(logits_BV, -1).astype(jnp.int32), cache


def batches(items: Sequence, size: int) -> Iterator[Sequence]:
    """`items` in order, at most `size` at once."""
    return (items[start : start + size] for start in range(0, len(items), size))
