"""Continue a text with a model, token by token, with a key/value cache.

The prompt runs through the model in one pass, which fills the cache. Every token after it is a pass
of length 1. Lengths are rounded up, so that all prompts share a few compiled programs. Cache
entries that a pass writes past its last token are masked, since they are after every query, until
the token of that position overwrites them.
"""

import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np

from optimus_jax.config import DataConfig, ModelConfig
from optimus_jax.data.chat_template import OTHER_TEMPLATE
from optimus_jax.data.record_names import ASSISTANT, USER
from optimus_jax.data.records import Conversation, NotConversationError
from optimus_jax.data.rendered_chat import ChatWriter
from optimus_jax.data.tokenizers import Tokenizer
from optimus_jax.devices.jax_settings import check_jax_settings
from optimus_jax.errors import ConfigError, DataError, explain
from optimus_jax.inference.model_on_mesh import (
    ModelOnMesh,
    all_logits,
    next_token_scores,
    next_tokens,
    prefill,
)
from optimus_jax.inference.sampling import Sampling, check_range
from optimus_jax.inference.streamed_text import Detokenizer, StreamedText
from optimus_jax.models.families import features_of
from optimus_jax.models.keys import make_key
from optimus_jax.models.shapes import Params

MIN_LENGTH = 32
"""Length in tokens of the shortest pass over a prompt, and of the shortest cache."""
MAX_LOGITS_BYTES = 2**31
"""Most memory for the logits of a batch that is scored, unless one text needs more."""


@dataclass(frozen=True, kw_only=True, eq=False)
class TextModel:
    """A trained model with its tokenizer, which can continue a text."""

    model: ModelOnMesh
    params: Params
    """On its devices, in the format of matmuls and cache."""
    tokenizer: Tokenizer
    step: int | None
    """Step of the checkpoint from which the parameters were read; None: of a published model."""
    trained_length: int | None = None
    """Length in tokens of the longest training examples; None if all positions were trained."""
    data: DataConfig = field(default_factory=DataConfig)
    """Settings of the data of its run; of a published model, the defaults."""

    @property
    def config(self) -> ModelConfig:
        """The model."""
        return self.model.config

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
        stop: Sequence[str] = (),
        chat: bool = False,
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
          chat: answer the prompt as a user's message, by the tokenizer's chat template, until the
            turn ends.
          stop: a sample ends before the first of these texts that it completes.
          seed: seed of all draws. Keys also depend on the sample's index and the position, so that
            a sample does not depend on the number of samples.
        Raises:
          OptimusError: raised by the call, not by the iterator: an argument is out of range, or the
            prompt is empty, too long or has unknown tokens.
        """
        sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p)
        check_range(max_new_tokens >= 1, "max_new_tokens", max_new_tokens, "choose 1 or more")
        check_range(num_samples >= 1, "num_samples", num_samples, "choose 1 or more")
        check_range(0 <= seed < 2**32, "seed", seed, "choose 0 to 2**32 - 1")
        check_range("" not in stop, "stop", tuple(stop), "give texts of at least one character")
        before = self.tokenizer.respelled.documents
        ids = self.encode(prompt, chat=chat, past_trained_length=past_trained_length)
        if self.tokenizer.respelled.documents > before:
            warn(
                "the prompt contains the text of a special token, such as the end of a document: it"
                " is taken as ordinary text"
            )
        limit = self.limit(past_trained_length)
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
        return self.continued(
            ids,
            num_new_tokens=min(max_new_tokens, room),
            sampling=sampling,
            seed=seed,
            num_samples=num_samples,
            stop=stop,
            ends=self._ends_of_turns(warn) if chat else (),
        )

    def continued(
        self,
        ids: np.ndarray,
        *,
        num_new_tokens: int,
        sampling: Sampling,
        seed: int,
        num_samples: int = 1,
        stop: Sequence[str] = (),
        ends: Sequence[int] = (),
    ) -> Iterator[list[str]]:
        """The text of every sample that follows some tokens, in increments as of `generate`.
        Arguments as of `generate_ids`, and `stop` as of `generate`.
        """
        tokens = self.generate_ids(
            ids,
            num_new_tokens=num_new_tokens,
            sampling=sampling,
            seed=seed,
            num_samples=num_samples,
            ends=ends,
        )
        texts = [StreamedText(Detokenizer(self.tokenizer, ids), stop) for _ in range(num_samples)]
        return self._texts(tokens, texts)

    def limit(self, past_trained_length: bool = False) -> int:
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

    def _chat_writer(self) -> ChatWriter:
        return ChatWriter(
            template=self.tokenizer.chat_template, special_tokens=self.tokenizer.special_tokens
        )

    def _ends_of_turns(self, warn: Callable[[str], object]) -> tuple[int, ...]:
        """The token that ends the assistant's turns, if the template has one."""
        messages = [{"role": USER, "content": "a"}, {"role": ASSISTANT, "content": "a"}]
        try:
            rendered = self._chat_writer()(Conversation(messages=messages))
        except NotConversationError:
            warn(
                "the chat template does not say where an answer ends, so it ends like a document,"
                " or before a text that is given with --stop"
            )
            return ()
        (chat,) = self.tokenizer.encode_chats([rendered])
        return (int(chat.ids[chat.counts][-1]),) if rendered.stops else ()

    def encode(
        self, prompt: str, *, chat: bool = False, past_trained_length: bool = False
    ) -> np.ndarray:
        """Token ids of a prompt. Raises DataError if the model cannot continue it."""
        self._check_reads_text()
        try:
            prompt.encode()
        except UnicodeEncodeError as error:
            raise DataError(
                explain("the prompt is not text", given=error, do="give valid UTF-8")
            ) from error
        if chat:
            try:
                rendered = self._chat_writer().prompt([{"role": USER, "content": prompt}])
            except NotConversationError as error:
                raise DataError(
                    explain(
                        "the chat template cannot write out the prompt",
                        given=error,
                        do=OTHER_TEMPLATE,
                    )
                ) from error
            ids = self.tokenizer.encode_chats([rendered])[0].ids
        else:
            ids = self.tokenizer.encode(prompt)
        if not len(ids):
            raise DataError(
                explain(
                    "the prompt is empty",
                    given=repr(prompt),
                    do="give at least one token to continue from",
                )
            )
        self._check_known(ids)
        if len(ids) > (limit := self.limit(past_trained_length)):
            raise DataError(
                explain(
                    f"the prompt is longer than what {self.config.name} was trained on, and its"
                    " positions are learned",
                    given=f"{len(ids)} tokens, trained on {limit}",
                    do=(
                        f"give at most {limit} tokens, or exceed them anyway: --past-trained-length"
                    ),
                )
            )
        return ids

    def _check_reads_text(self) -> None:
        if self.config.frames:
            raise ConfigError(
                explain(
                    "a model of sound writes down recordings, and continues no text",
                    given=self.config.name,
                    do="use `optimus transcribe`",
                )
            )

    def _check_known(self, ids: np.ndarray) -> None:
        """Raise DataError if the model lacks a token of a text, or the positions for it."""
        config = self.config
        if ids.min() < 0 or ids.max() >= config.vocab_size:
            unknown = next(int(each) for each in ids if not 0 <= each < config.vocab_size)
            raise DataError(
                explain(
                    f"{config.name} does not know a token of the prompt",
                    given=f"token {unknown}, of a vocabulary of {config.vocab_size}",
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

    def logits(self, ids: Sequence[int] | np.ndarray) -> np.ndarray:
        """Logits of the token that follows each of some tokens: float32 [L, V] for L of them.

        Raises:
          DataError: there is no token, or the model lacks one, or a position for it.
        """
        check_jax_settings()
        self._check_reads_text()
        ids, limit = np.asarray(ids), self.config.max_length
        if ids.ndim != 1 or not len(ids) or not np.issubdtype(ids.dtype, np.integer):
            raise DataError(
                explain(
                    "logits are of the tokens of one text",
                    given=f"an array of {ids.dtype}, of shape {ids.shape}",
                    do="give a text, or a list of at least one token id",
                )
            )
        self._check_known(ids)
        padded = np.zeros((1, rounded_up(len(ids), limit)), np.int32)
        padded[0, : len(ids)] = ids
        return np.asarray(all_logits(self.model, self.params, padded))[0, : len(ids)]

    def scores(
        self, texts: Sequence[Sequence[int]], *, batch_size: int = 8
    ) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """Score every token but the first of some texts, given the tokens before it.

        Args:
          texts: token ids, at least two of each and at most `limit` + 1.
          batch_size: most texts at once.
        Yields:
          For each text, the longest ones first: its index, log-probabilities, float32 [L - 1] for L
          tokens, and whether each token is the likeliest, bool [L - 1].
        Raises:
          DataError: the model lacks a token, or a position for it.
        """
        check_jax_settings()
        self._check_reads_text()
        limit = self.config.max_length
        for text in texts:
            self._check_known(np.asarray(text[:-1]))
            self._check_known(np.asarray(text[-1:]))
        order = sorted(range(len(texts)), key=lambda index: -len(texts[index]))
        while order:
            length = rounded_up(len(texts[order[0]]) - 1, limit)
            bytes_of_text = length * self.config.vocab_size * 4
            rows = max(1, min(batch_size, MAX_LOGITS_BYTES // bytes_of_text))
            chosen, order = order[:rows], order[rows:]
            padded = np.zeros((rows, length + 1), np.int32)
            for row, index in enumerate(chosen):
                padded[row, : len(texts[index])] = texts[index]
            scored, likeliest = map(
                np.asarray,
                next_token_scores(self.model, self.params, padded[:, :-1], padded[:, 1:]),
            )
            for row, index in enumerate(chosen):
                count = len(texts[index]) - 1
                yield index, scored[row, :count], likeliest[row, :count]

    def generate_ids(
        self,
        prompt: np.ndarray,
        *,
        num_new_tokens: int,
        sampling: Sampling,
        seed: int,
        num_samples: int,
        ends: Sequence[int] = (),
    ) -> Iterator[np.ndarray]:
        """Yield the token of every sample, int32 [B], for each position; eos after a sample has
        ended.

        Args:
          ends: tokens that end a sample, besides eos.
          prompt: ids [N], at least one. N + num_new_tokens - 1 is at most the model's max_length.
        """
        check_jax_settings()
        length, limit, eos = len(prompt), self.config.max_length, self.tokenizer.eos
        padded = np.zeros((1, rounded_up(length, limit)), np.int32)
        padded[0, :length] = prompt
        keys = jax.vmap(functools.partial(jax.random.fold_in, make_key(seed)))(
            jnp.arange(num_samples)
        )
        tokens, cache = prefill(
            self.model,
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
                tokens, cache = next_tokens(
                    self.model,
                    self.params,
                    cache,
                    tokens,
                    np.int32(position),
                    keys,
                    sampling=sampling,
                )
            ids = np.where(over | np.isin(drawn, ends), eos, drawn)
            over = ids == eos
            yield ids
            if over.all():
                return

    def _texts(
        self, tokens: Iterator[np.ndarray], texts: list[StreamedText]
    ) -> Iterator[list[str]]:
        for ids in tokens:
            yield [text.push(int(token)) for text, token in zip(texts, ids, strict=True)]
            if all(text.is_over for text in texts):
                return
        yield [text.rest() for text in texts]


def rounded_up(length: int, limit: int) -> int:
    """The smallest power of two that is at least `length` and MIN_LENGTH, but at most `limit`."""
    return min(limit, max(MIN_LENGTH, 1 << (length - 1).bit_length()))
