"""Writes down recordings with a model of sound: the likeliest token after each one, with caches of
keys and values.

Shapes: B recordings, F frames, P values of a frame, T tokens of text, D embed.
"""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from optimus_jax.config import DataConfig, ModelConfig
from optimus_jax.data.recordings import frames_of, most_samples, prompt_of
from optimus_jax.data.tokenizers import Tokenizer
from optimus_jax.devices.jax_settings import check_jax_settings
from optimus_jax.errors import ConfigError, DataError, explain
from optimus_jax.inference.model_on_mesh import unpadded
from optimus_jax.inference.text_model import TextModel
from optimus_jax.mesh.collectives import Collectives
from optimus_jax.models.block import ForwardContext
from optimus_jax.models.encoder_decoder import KeysValues, TwoSides
from optimus_jax.models.kernels import Visibility
from optimus_jax.models.shapes import Params
from optimus_jax.models.transformer import Decoder


@dataclass(frozen=True, kw_only=True, eq=False)
class SpeechModel:
    """A trained model of sound with its tokenizer, on one device."""

    config: ModelConfig
    params: Params
    tokenizer: Tokenizer
    data: DataConfig
    """Names the language, and what is written."""

    @classmethod
    def of(cls, loaded: TextModel, data: DataConfig) -> "SpeechModel":
        """That of a loaded model. Raises ConfigError if it does not read sound."""
        if not loaded.config.frames:
            raise ConfigError(
                explain(
                    "the model does not read sound",
                    given=f"{loaded.config.name}, of the family {loaded.config.family}",
                    do="name a run of whisper-nano, or a published Whisper",
                )
            )
        return cls(
            config=loaded.config, params=loaded.params, tokenizer=loaded.tokenizer, data=data
        )

    def transcribe(self, recordings: Sequence[np.ndarray]) -> list[str]:
        """The text of each recording, float32 [S] at SAMPLE_RATE. Those that are longer than the
        model reads are written down in parts.
        """
        longest, parts, whose = most_samples(self.config), [], []
        for number, samples in enumerate(recordings):
            for start in range(0, max(1, len(samples)), longest):
                parts.append(frames_of(samples[start : start + longest], self.config))
                whose.append(number)
        texts = [""] * len(recordings)
        for number, tokens in zip(whose, self.tokens_of(np.stack(parts)), strict=True):
            text = self.tokenizer.decode(tokens).strip()
            texts[number] = f"{texts[number]} {text}".strip()
        return texts

    def tokens_of(self, values_BFP: np.ndarray) -> list[np.ndarray]:
        """Tokens of the text of each spectrogram, without those that ask for it and eos.

        Raises DataError if these leave no room.
        """
        check_jax_settings()
        prompt, eos = prompt_of(self.tokenizer, self.data), self.tokenizer.eos
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
        read, cache = encode(self.config, self.params, values_BFP)
        written, over, start = [], np.zeros(rows, bool), 0
        for _ in range(room):
            found, cache = extend(self.config, self.params, read, cache, tokens, np.int32(start))
            ids = np.where(over, eos, np.asarray(found))
            over |= ids == eos
            written.append(ids)
            if over.all():
                break
            start += tokens.shape[1]
            tokens = ids[:, None].astype(np.int32)
        by_row = np.stack(written, 1)
        return [row[: np.argmax(row == eos)] if eos in row else row for row in by_row]


@functools.partial(jax.jit, static_argnames="config")
def encode(config: ModelConfig, params: Params, values_BFP: Array) -> tuple[KeysValues, KeysValues]:
    """What the decoder attends to of some spectrograms, and an empty cache of its own tokens:
    keys and values of each of its layers.
    """
    model, run = _ready(config, params)
    frames_BFD = model.embed_frames(jnp.asarray(values_BFP), run)
    stack, first = TwoSides(model.layers, config, run), config.encoder_layers
    frames_BFD, _ = stack.encoded(frames_BFD, slice(0, first))
    read = stack.keys_and_values(frames_BFD, slice(first, None), config.num_heads)
    text = config.max_length - config.frames
    shape = (*read[0].shape[:2], text, config.num_kv_heads, config.head_dim)
    empty = jnp.zeros(shape, run.comm.dtype)
    return read, (empty, empty)


@functools.partial(jax.jit, static_argnames="config", donate_argnames="cache")
def extend(
    config: ModelConfig,
    params: Params,
    read: KeysValues,
    cache: KeysValues,
    tokens_BT: Array,
    start: Array,
) -> tuple[Array, KeysValues]:
    """The likeliest token after some tokens, int32 [B], and the cache with theirs.

    Args:
      start: position of the first of them.
    """
    model, run = _ready(config, params, Visibility(query_offset=start))
    places_BT = jnp.broadcast_to(start + jnp.arange(tokens_BT.shape[1]), tokens_BT.shape)
    x_BTD = model.embed_text(tokens_BT, places_BT, run)
    stack, first = TwoSides(model.layers, config, run), config.encoder_layers
    x_BTD, _, cache_after = stack.decoded(x_BTD, read, slice(first, None), cache)
    assert cache_after is not None, "a cache went in and none came out"
    logits_BV = model.logits(model.text_head_input(x_BTD[:, -1:], run.comm), run)[:, 0]
    return jnp.argmax(logits_BV, -1).astype(jnp.int32), cache_after


def _ready(
    config: ModelConfig, params: Params, visibility: Visibility | None = None
) -> tuple[Decoder, ForwardContext]:
    dtype = params["embedding"]["table"].dtype
    run = ForwardContext(comm=Collectives(dtype), visibility=visibility or Visibility())
    return unpadded(config).module(params, run.comm), run


def word_errors(references: Sequence[str], texts: Sequence[str]) -> float:
    """Word error rate: words that must be changed, left out or put in, of all words of the
    references. Case and punctuation do not count.

    Raises DataError if jiwer is missing, or the references hold no words.
    """
    try:
        import jiwer
    except ImportError as error:
        raise DataError(
            explain(
                "word error rates need jiwer, which is not installed",
                given=error,
                do="pip install 'optimus-jax[sound]'",
            )
        ) from error
    plain = jiwer.Compose(
        [
            jiwer.ToLowerCase(),
            jiwer.RemovePunctuation(),
            jiwer.RemoveMultipleSpaces(),
            jiwer.Strip(),
            jiwer.ReduceToListOfListOfWords(),
        ]
    )
    pairs = [(a, b) for a, b in zip(references, texts, strict=True) if any(map(str.isalnum, a))]
    if not pairs:
        raise DataError(
            explain(
                "the references hold no words",
                given=f"{len(references)} texts",
                do="give recordings with their texts",
            )
        )
    reference, hypothesis = (list(each) for each in zip(*pairs, strict=True))
    return float(
        jiwer.wer(
            reference,
            hypothesis,
            reference_transform=plain,
            hypothesis_transform=plain,
        )
    )


def batches(items: Sequence, size: int) -> Iterator[Sequence]:
    """`items` in order, at most `size` at once."""
    return (items[start : start + size] for start in range(0, len(items), size))
