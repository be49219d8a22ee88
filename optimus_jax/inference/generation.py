"""Generate text from a trained model on one device, token by token, with a key/value cache.

The prompt runs through the model in one pass, which fills the cache. Every token after it is a pass
of length 1. Lengths are rounded up, so that all prompts share a few compiled programs. Cache
entries that a pass writes past its last token are masked, since they are after every query, until
the token of that position overwrites them.

Shapes: B samples, L length of a pass, T cached length, V vocab, G key/value heads, K head_dim,
C candidates for the next token.
"""

import functools
import json
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from optimus_jax.checkpoint.checkpoints import Checkpoints
from optimus_jax.config import Config, ModelConfig
from optimus_jax.config.phases import phases_of
from optimus_jax.data.tokenizers import Tokenizer
from optimus_jax.devices.backend import start_backend, unexpected_cpu_warning
from optimus_jax.devices.jax_settings import check_jax_settings
from optimus_jax.errors import ConfigError, DataError, explain
from optimus_jax.mesh.collectives import Collectives
from optimus_jax.mesh.formats import COMPUTE_DTYPES
from optimus_jax.models.block import ForwardContext
from optimus_jax.models.families import features_of
from optimus_jax.models.kernels import Visibility
from optimus_jax.models.keys import make_key
from optimus_jax.models.shapes import ModelShapes, Params, model_shapes
from optimus_jax.run.stored_config import check_stored_config
from optimus_jax.run.stored_run import run_to_read
from optimus_jax.run_directory.directory import RunDirectory
from optimus_jax.run_directory.run_data import check_tokenizer, tokenizer_of_run
from optimus_jax.system.paths import UserPath

MIN_LENGTH = 32
"""Length in tokens of the shortest pass over a prompt, and of the shortest cache."""
INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
"""Decoded text ends with this while bytes of its last character are missing."""

Cache = tuple[Array, Array]
"""Keys and values, [layers, B, T, G, K] each."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is drawn from the model's probabilities."""

    temperature: float = 1.0
    """Divides the logits. 0: take the likeliest token (greedy)."""
    top_k: int | None = None
    """Draw from this many likeliest tokens; None: from all."""
    top_p: float = 1.0
    """Draw from the smallest set of likeliest tokens that together have this probability
    (arXiv:1904.09751)."""

    def __post_init__(self) -> None:
        _check(
            0 <= self.temperature < float("inf"),
            "temperature",
            self.temperature,
            "choose 0 (greedy) or more",
        )
        _check(self.top_k is None or self.top_k >= 1, "top_k", self.top_k, "choose 1 or more")
        _check(0 < self.top_p <= 1, "top_p", self.top_p, "choose 0 < top_p <= 1")


@dataclass(frozen=True, kw_only=True, eq=False)
class TextModel:
    """A trained model with its tokenizer, which can continue a text."""

    config: ModelConfig
    params: Params
    """On one device, in the format of matmuls and cache. The vocabulary is not padded."""
    tokenizer: Tokenizer
    step: int
    """Step of the checkpoint from which the parameters were read."""
    trained_length: int | None = None
    """Length in tokens of the longest training examples; None if all positions were trained."""

    def generate(
        self,
        prompt: str,
        *,
        max_new_tokens: int = 200,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float = 1.0,
        seed: int = 0,
        num_samples: int = 1,
        past_trained_length: bool = False,
        warn: Callable[[str], object] = warnings.warn,
    ) -> Iterator[list[str]]:
        """Continue `prompt`, and yield the new text of every sample in increments.

        Each item has one string per sample. It is "" if there is nothing to show: the sample has
        ended, or bytes of its last character are still missing.

        Args:
          max_new_tokens: maximum number of tokens of a sample. It ends earlier at the end of a
            document, or (with a call of `warn`) at the model's last position, or at the last
            trained one if positions are learned.
          past_trained_length: continue past the trained length, although untrained learned
            positions are noise.
          temperature, top_k, top_p: as in `Sampling`.
          seed: seed of all draws. Keys also depend on the sample's index and the position, so that
            a sample does not depend on the number of samples.
        Raises:
          OptimusError: raised by the call, not by the iterator: an argument is out of range, or the
            prompt is empty, too long or has unknown tokens.
        """
        sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p)
        _check(max_new_tokens >= 1, "max_new_tokens", max_new_tokens, "choose 1 or more")
        _check(num_samples >= 1, "num_samples", num_samples, "choose 1 or more")
        _check(0 <= seed < 2**32, "seed", seed, "choose 0 to 2**32 - 1")
        before = self.tokenizer.respelled.documents
        ids = self.encode(prompt, past_trained_length=past_trained_length)
        if self.tokenizer.respelled.documents > before:
            warn(
                "the prompt contains the text of a special token, such as the end of a document: it"
                " is taken as ordinary text"
            )
        limit = self._limit(past_trained_length)
        room = limit - len(ids) + 1  # the last token needs no position: it is not read
        if max_new_tokens > room and limit < self.config.max_length:
            warn(
                f"at most {room} new tokens: {self.config.name} was trained on {limit} tokens at a"
                f" time, the prompt takes {len(ids)}, and learned positions beyond that were not"
                " trained; to continue anyway: --past-trained-length"
            )
        elif max_new_tokens > room:
            warn(
                f"at most {room} new tokens: {self.config.name} has {self.config.max_length}"
                f" positions, and the prompt takes {len(ids)}"
            )
        trained, last = (
            self.trained_length or self.config.max_length,
            len(ids) + min(max_new_tokens, room) - 1,
        )
        if last > trained:
            what = (
                "is noise, because positions there are learned"
                if features_of(self.config).positions == "learned"
                else "may be worse"
            )
            warn(
                f"{self.config.name} was trained on {trained} tokens at a time; up to {last} are"
                f" requested, and text past token {trained} {what}"
            )
        tokens = self.generate_ids(
            ids,
            num_new_tokens=min(max_new_tokens, room),
            sampling=sampling,
            seed=seed,
            num_samples=num_samples,
        )
        return self._texts(tokens, [_Detokenizer(self.tokenizer, ids) for _ in range(num_samples)])

    def _limit(self, past_trained_length: bool) -> int:
        """Number of positions that may be used: learned positions only as far as they were
        trained.
        """
        if (
            past_trained_length
            or self.trained_length is None
            or features_of(self.config).positions != "learned"
        ):
            return self.config.max_length
        return min(self.trained_length, self.config.max_length)

    def encode(self, prompt: str, *, past_trained_length: bool = False) -> np.ndarray:
        """Token ids of a prompt. Raises DataError if the model cannot continue it."""
        config = self.config
        try:
            prompt.encode()
        except UnicodeEncodeError as error:
            raise DataError(
                explain("the prompt is not text", given=error, do="give valid UTF-8")
            ) from error
        ids = self.tokenizer.encode(prompt)
        if not len(ids):
            raise DataError(
                explain(
                    "the prompt is empty",
                    given=repr(prompt),
                    do="give at least one token to continue from",
                )
            )
        if ids.max() >= config.vocab_size:
            raise DataError(
                explain(
                    f"{config.name} does not know a token of the prompt",
                    given=f"token {ids.max()}, of a vocabulary of {config.vocab_size}",
                    do="use the tokenizer that the model was trained with",
                )
            )
        if len(ids) > config.max_length:
            raise DataError(
                explain(
                    f"the prompt is longer than the positions of {config.name}",
                    given=f"{len(ids)} tokens, {config.max_length} positions",
                    do=f"give at most {config.max_length} tokens",
                )
            )
        if len(ids) > (limit := self._limit(past_trained_length)):
            raise DataError(
                explain(
                    f"the prompt is longer than what {config.name} was trained on, and its"
                    " positions are learned",
                    given=f"{len(ids)} tokens, trained on {limit}",
                    do=(
                        f"give at most {limit} tokens, or exceed them anyway: --past-trained-length"
                    ),
                )
            )
        return ids

    def generate_ids(
        self,
        prompt: np.ndarray,
        *,
        num_new_tokens: int,
        sampling: Sampling,
        seed: int,
        num_samples: int,
    ) -> Iterator[np.ndarray]:
        """Yield the token of every sample, int32 [B], for each position; eos after a sample has
        ended.

        Args:
          prompt: ids [N], at least one. N + num_new_tokens - 1 is at most the model's max_length.
        """
        check_jax_settings()
        length, limit, eos = len(prompt), self.config.max_length, self.tokenizer.eos
        padded = np.zeros((1, rounded_up(length, limit)), np.int32)
        padded[0, :length] = prompt
        keys = jax.vmap(functools.partial(jax.random.fold_in, make_key(seed)))(
            jnp.arange(num_samples)
        )
        tokens, cache = _prefill(
            self.config,
            self.params,
            padded,
            np.int32(length),
            keys,
            sampling=sampling,
            num_keys=rounded_up(length + num_new_tokens - 1, limit),
        )
        over = np.zeros(num_samples, bool)
        for position in range(length, length + num_new_tokens):
            drawn = tokens
            if position + 1 < length + num_new_tokens:  # dispatched before `drawn` is waited for
                tokens, cache = _next_tokens(
                    self.config,
                    self.params,
                    cache,
                    tokens,
                    np.int32(position),
                    keys,
                    sampling=sampling,
                )
            ids = np.where(over, eos, drawn)
            over = ids == eos
            yield ids
            if over.all():
                return

    def _texts(
        self, tokens: Iterator[np.ndarray], texts: list["_Detokenizer"]
    ) -> Iterator[list[str]]:
        for ids in tokens:
            yield [text.push(int(token)) for text, token in zip(texts, ids, strict=True)]
        yield [text.rest() for text in texts]


def load_text_model(
    run_dir: UserPath, step: int | None = None, *, warn: Callable[[str], object] = warnings.warn
) -> TextModel:
    """Load the model of a run onto the first device, from its newest good checkpoint or that of
    `step`.

    Only the parameters are read; the run may have used any mesh. `run_dir` may be the URL of a run
    in a store, which is copied first.

    Raises:
      OptimusError: there is no such run, checkpoint or tokenizer.
    """
    check_jax_settings()
    run = RunDirectory(run_to_read(run_dir, what="--run", checkpoint=step, say=warn), writer=False)
    try:
        config = Config.from_json(run.config_text())
    except OSError as error:
        raise ConfigError(
            explain(
                "there is no run to sample from",
                given=f"{run_dir}, which has no config.json",
                do="give --run the directory of a run",
            )
        ) from error
    tokenizer = tokenizer_of_run(run, config.data)
    start_backend()
    if (warning := unexpected_cpu_warning()) is not None:
        warn(warning)
    device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    shapes = unpadded(config.model)
    params = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=device), shapes.params
    )
    checkpoints = Checkpoints(run.checkpoints, config.checkpoint, warn=warn)
    restored = checkpoints.restore(
        {"params": params},
        step,
        paddable=shapes.may_be_padded,
        partial=True,
        check=lambda metadata: check_stored_config(metadata, config, sections=("model.",)),
    )
    check_tokenizer(tokenizer, run, restored.metadata)
    dtype = COMPUTE_DTYPES[json.loads(restored.metadata["plan"])["precision"]]
    params = jax.tree.map(lambda leaf: leaf.astype(dtype), restored.state["params"])
    trained_length = max(
        phase.seq_len for phase in phases_of(config) if phase.steps_before < max(1, restored.step)
    )
    return TextModel(
        config=config.model,
        params=params,
        tokenizer=tokenizer,
        step=restored.step,
        trained_length=trained_length,
    )


@functools.partial(jax.jit, static_argnames=("config", "sampling", "num_keys"))
def _prefill(
    config: ModelConfig,
    params: Params,
    prompt_1L: Array,
    length: Array,
    keys_B: Array,
    *,
    sampling: Sampling,
    num_keys: int,
) -> tuple[Array, Cache]:
    """Run a padded prompt of `length` tokens: the first new tokens [B], and the cache of all
    samples.
    """
    logits_1V, cache = extend(
        config, params, empty_cache(config, params, num_keys), prompt_1L, jnp.int32(0), length - 1
    )
    logits_BV = jnp.repeat(logits_1V, len(keys_B), axis=0)
    return draw(logits_BV, keys_B, length, sampling), jax.tree.map(
        lambda x: jnp.repeat(x, len(keys_B), axis=1), cache
    )


@functools.partial(jax.jit, static_argnames=("config", "sampling"), donate_argnames="cache")
def _next_tokens(
    config: ModelConfig,
    params: Params,
    cache: Cache,
    tokens_B: Array,
    position: Array,
    keys_B: Array,
    *,
    sampling: Sampling,
) -> tuple[Array, Cache]:
    """Run the tokens [B] at `position`: the tokens after them, and the extended cache."""
    logits_BV, cache = extend(config, params, cache, tokens_B[:, None], position, jnp.int32(0))
    return draw(logits_BV, keys_B, position + 1, sampling), cache


def extend(
    config: ModelConfig, params: Params, cache: Cache, tokens_BL: Array, start: Array, last: Array
) -> tuple[Array, Cache]:
    """Run tokens at positions `start`, `start` + 1, ... through the model, and extend the cache.

    Args:
      cache: keys and values of all positions before `start`. start + L is at most T.
    Returns:
      The logits after the token with index `last` in `tokens_BL`, float32 [B, V], and the cache
      with the keys and values of these tokens.
    """
    positions_BL = jnp.broadcast_to(start + jnp.arange(tokens_BL.shape[1]), tokens_BL.shape)
    # The kernel is XLA's, because cuDNN's causal mask assumes that the first query is at position
    # 0.
    run = ForwardContext(
        comm=Collectives(cache[0].dtype), kernel="xla", visibility=Visibility(query_offset=start)
    )
    model = unpadded(config).module(params, run.comm)
    out = model.run_layers(model.embed(tokens_BL, positions_BL, run), positions_BL, run, cache)
    assert out.cache is not None, "a cache went in and none came out"
    x_B1D = lax.dynamic_slice_in_dim(out.x_BLD, last, 1, axis=1)
    return model.logits(model.head_input(x_B1D, run.comm), run)[:, 0], out.cache


def empty_cache(config: ModelConfig, params: Params, num_keys: int) -> Cache:
    """A cache of zeros for `num_keys` positions of one sample, in the format of the parameters."""
    dtype = params["embedding"]["table"].dtype
    shape = (config.num_layers, 1, num_keys, config.num_kv_heads, config.head_dim)
    return jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)


@functools.cache
def unpadded(config: ModelConfig) -> ModelShapes:
    """The shapes of the model with an unpadded vocabulary."""
    return model_shapes(config, config.vocab_size)


def draw(logits_BV: Array, keys_B: Array, position: Array, sampling: Sampling) -> Array:
    """Draw the token at `position` of every sample, int32 [B], each with its own key."""
    if sampling.temperature == 0:
        return jnp.argmax(logits_BV, axis=-1)
    logits_BC, ids_BC = candidates(logits_BV / sampling.temperature, sampling)
    keys_B = jax.vmap(jax.random.fold_in, in_axes=(0, None))(keys_B, position)
    # The mode is JAX's default, named because jax_high_dynamic_range_gumbel would draw other
    # tokens.
    chosen_B = jax.vmap(functools.partial(jax.random.categorical, mode="low"))(keys_B, logits_BC)
    return jnp.take_along_axis(ids_BC, chosen_B[:, None], axis=1)[:, 0]


def candidates(logits_BV: Array, sampling: Sampling) -> tuple[Array, Array]:
    """Logits and ids, [B, C], of the tokens to draw from: the top k, restricted to the top p of
    them.
    """
    batch, vocab = logits_BV.shape
    if sampling.top_k is None and sampling.top_p == 1:
        return logits_BV, jnp.broadcast_to(jnp.arange(vocab), (batch, vocab))
    logits_BC, ids_BC = lax.top_k(logits_BV, min(sampling.top_k or vocab, vocab))
    if sampling.top_p < 1:
        probability = jax.nn.softmax(logits_BC)
        likelier = jnp.cumsum(probability, axis=-1) - probability
        logits_BC = jnp.where(likelier < sampling.top_p, logits_BC, -jnp.inf)
    return logits_BC, ids_BC


def rounded_up(length: int, limit: int) -> int:
    """The smallest power of two that is at least `length` and MIN_LENGTH, but at most `limit`."""
    return min(limit, max(MIN_LENGTH, 1 << (length - 1).bit_length()))


class _Detokenizer:
    """Turns tokens, one at a time, into pieces of text which, joined, are the text of all tokens.

    A piece is what a token adds to the text of a window of tokens, because a token's text may
    depend on the token before. Characters of which bytes are missing are held back.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: np.ndarray) -> None:
        self._tokenizer = tokenizer
        self._window = [int(token) for token in prompt]
        self._num_shown = len(self._window)

    def push(self, token: int) -> str:
        """The text that `token` completes; empty if its last character is incomplete."""
        self._window.append(token)
        piece = self.rest()
        if not piece or piece.endswith(INCOMPLETE):
            return ""
        del self._window[: self._num_shown]
        self._num_shown = len(self._window)
        return piece

    def rest(self) -> str:
        """The text that was held back, complete or not."""
        shown = self._tokenizer.decode(self._window[: self._num_shown])
        return self._tokenizer.decode(self._window)[len(shown) :]


def _check(good: bool, name: str, value: object, do: str) -> None:
    if not good:
        raise ConfigError(explain(f"{name} is out of range", given=value, do=do))
