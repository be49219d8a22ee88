"""A trained model with its tokenizer: it continues texts and scores them."""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from optimus_jax.config import DataConfig, ModelConfig
from optimus_jax.data.records import check_characters
from optimus_jax.data.tokenizers import Tokenizer
from optimus_jax.devices.jax_settings import check_jax_settings
from optimus_jax.errors import ConfigError, DataError, argument, explain
from optimus_jax.inference.chats import GivenPrompt, chat_ids, ends_of_turns
from optimus_jax.inference.generation import Prompt, generate_ids, rounded_up
from optimus_jax.inference.model_on_mesh import ModelOnMesh, all_logits, next_token_scores
from optimus_jax.inference.sampling import Sampling, check_range
from optimus_jax.inference.streamed_text import Detokenizer, StreamedText
from optimus_jax.models.families import features_of
from optimus_jax.models.shapes import Params
from optimus_jax.system.command import typed_command

MAX_LOGITS_BYTES = 2**31
"""Most memory for the logits of a batch that is scored, unless one text needs more."""


@dataclass(frozen=True, kw_only=True)
class GenerationSettings:
    """How prompts are continued. Raises ConfigError if a number is out of range."""

    max_new_tokens: int = 200
    """Most tokens of a sample. It ends earlier at the end of a document, or (with a warning) at the
    model's last position, or at the last trained one if positions are learned."""
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    """These three are as in `Sampling`."""
    seed: int = 0
    """Of all draws. Keys also depend on the sample's index and the position, so that a sample does
    not depend on the number of samples, or on other prompts."""
    num_samples: int = 1
    """Texts for each prompt."""
    stop: Sequence[str] = ()
    """A sample ends before the first of these texts that it completes."""
    chat: bool = False
    """Answer the prompt as a user's message, by the tokenizer's chat template, until the turn
    ends."""
    past_trained_length: bool = False
    """Continue past the trained length, although untrained learned positions are noise."""

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "num_samples"):
            check_range(getattr(self, name) >= 1, name, getattr(self, name), "choose 1 or more")
        check_range(0 <= self.seed < 2**32, "seed", self.seed, "choose 0 to 2**32 - 1")
        texts = [self.stop] if isinstance(self.stop, str) else self.stop
        check_range("" not in texts, "stop", tuple(texts), "give texts of at least one character")
        object.__setattr__(self, "stop", tuple(texts))
        Sampling(temperature=self.temperature, top_k=self.top_k, top_p=self.top_p)

    @cached_property
    def sampling(self) -> Sampling:
        """How each token is drawn."""
        return Sampling(temperature=self.temperature, top_k=self.top_k, top_p=self.top_p)

    def for_prompts(self, prompts: Sequence[GivenPrompt]) -> "GenerationSettings":
        """The same, with `chat` if one of some prompts is a conversation."""
        is_chat = self.chat or not all(isinstance(prompt, str) for prompt in prompts)
        return replace(self, chat=is_chat)


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
    generation_config: Mapping[str, Any] = field(default_factory=dict)
    """The generation_config.json of a published model; empty: it has none, or it is a run's."""

    @property
    def config(self) -> ModelConfig:
        """The model."""
        return self.model.config

    @property
    def begin(self) -> tuple[int, ...]:
        """Tokens before every text: those that the tokenizer of a published model puts there. A
        run's texts begin without.
        """
        return self.tokenizer.frame.before if self.step is None else ()

    def generation_tokens(self, name: str) -> tuple[int, ...]:
        """The token or tokens that a field of `generation_config` names; none if it is missing.

        Raises ConfigError if it names other than tokens of the model.
        """
        found = self.generation_config.get(name)
        tokens = [] if found is None else found if isinstance(found, list) else [found]
        if all(isinstance(each, int) and 0 <= each < self.config.vocab_size for each in tokens):
            return tuple(tokens)
        raise ConfigError(
            explain(
                f"{name} of the model's generation_config.json lists no tokens of the model",
                given=f"{found}; model.vocab_size={self.config.vocab_size}",
                do="use the file that came with the weights, or remove it",
            )
        )

    def generate(
        self,
        prompt: GivenPrompt,
        settings: GenerationSettings | None = None,
        *,
        warn: Callable[[str], object] = warnings.warn,
    ) -> Iterator[list[str]]:
        """Continue `prompt`, and yield the new text of every sample in increments.

        Each item has one string per sample. It is "" if there is nothing to show: the sample has
        ended, or bytes of its last character are still missing.

        Args:
          settings: None: the defaults.
        Raises:
          OptimusError: raised by the call, not by the iterator: the prompt is empty, too long or
            has unknown tokens.
        """
        settings = (settings or GenerationSettings()).for_prompts([prompt])
        tokens = self._prompt(prompt, settings, warn)
        return self._pieces([tokens], settings, self._ends(settings, warn))

    def generate_each(
        self,
        prompts: Sequence[GivenPrompt],
        settings: GenerationSettings | None = None,
        *,
        batch_size: int = 8,
        warn: Callable[[str], object] = warnings.warn,
    ) -> Iterator[list[str]]:
        """The texts that follow each prompt, one string per sample, in the order of the prompts. If
        one of them is a conversation, texts among them are a user's messages.

        A text is that of `generate`, as far as a sum over other shapes rounds alike.

        Args:
          batch_size: most prompts at once.
        Raises:
          OptimusError: raised by the call, not by the iterator: as of `generate`, of any prompt.
        """
        settings = (settings or GenerationSettings()).for_prompts(prompts)
        check_range(batch_size >= 1, "batch_size", batch_size, "choose 1 or more")
        tokens = []
        for number, prompt in enumerate(prompts, 1):
            try:
                tokens.append(self._prompt(prompt, settings, warn))
            except DataError as error:
                raise DataError(f"prompt {number} of {len(prompts)}: {error}") from error
        return self._each(tokens, settings, self._ends(settings, warn), batch_size)

    def continue_each(
        self,
        prompts: Sequence[Prompt],
        settings: GenerationSettings,
        *,
        batch_size: int = 8,
    ) -> Iterator[list[str]]:
        """The texts that follow some tokens, as of `generate_each`.

        Args:
          settings: their `sampling`, `num_samples` and `stop` count.
        """
        return self._each(prompts, settings, self.generation_tokens("eos_token_id"), batch_size)

    def _each(
        self,
        prompts: Sequence[Prompt],
        settings: GenerationSettings,
        ends: Sequence[int],
        batch_size: int,
    ) -> Iterator[list[str]]:
        """`continue_each`, with the tokens that end a sample, besides eos."""
        samples, most = settings.num_samples, min(batch_size, len(prompts))
        for start in range(0, len(prompts), batch_size):
            some = prompts[start : start + batch_size]
            # Batches of one size share compiled programs.
            filling = [replace(some[-1], num_new_tokens=1)] * (most - len(some))
            pieces = [*self._pieces([*some, *filling], settings, ends)]
            texts = ["".join(parts) for parts in zip(*pieces, strict=True)]
            for row in range(0, samples * len(some), samples):
                yield texts[row : row + samples]

    def _pieces(
        self, prompts: Sequence[Prompt], settings: GenerationSettings, ends: Sequence[int]
    ) -> Iterator[list[str]]:
        """The text of every sample of every prompt, in increments as of `generate`."""
        texts = [
            StreamedText(Detokenizer(self.tokenizer, prompt.ids), settings.stop)
            for prompt in prompts
            for _ in range(settings.num_samples)
        ]
        eos = self.tokenizer.eos
        tokens = generate_ids(
            self.model,
            self.params,
            prompts,
            eos=eos,
            sampling=settings.sampling,
            num_samples=settings.num_samples,
            ends=ends,
        )
        for ids, over in tokens:
            yield [
                "" if token == eos else text.push(int(token))
                for text, token in zip(texts, ids, strict=True)
            ]
            if all(is_over or text.is_over for is_over, text in zip(over, texts, strict=True)):
                break
        yield [text.rest() for text in texts]

    def _prompt(
        self, prompt: GivenPrompt, settings: GenerationSettings, warn: Callable[[str], object]
    ) -> Prompt:
        """Tokens of a prompt, and how many may follow it."""
        past, most = settings.past_trained_length, settings.max_new_tokens
        before = self.tokenizer.respelled.documents
        ids = self.encode(prompt, chat=settings.chat, past_trained_length=past)
        if self.tokenizer.respelled.documents > before:
            warn(
                "the prompt contains the text of a special token, such as the end of a document: it"
                " is taken as ordinary text"
            )
        limit = self.limit(past)
        room = limit - len(ids) + 1  # the last token needs no position: it is not read
        if most > room and limit < self.config.max_length:
            warn(
                f"at most {room} new tokens: {self.config.name} was trained on {limit} tokens at a"
                f" time, the prompt takes {len(ids)}, and learned positions beyond that were not"
                f" trained; to continue anyway: {argument('past_trained_length')}"
            )
        elif most > room:
            warn(
                f"at most {room} new tokens: {self.config.name} has {self.config.max_length}"
                f" positions, and the prompt takes {len(ids)}"
            )
        trained = self.trained_length or self.config.max_length
        if (last := len(ids) + min(most, room) - 1) > trained:
            what = (
                "is noise, because positions there are learned"
                if features_of(self.config).positions == "learned"
                else "may be worse"
            )
            warn(
                f"{self.config.name} was trained on {trained} tokens at a time; up to {last} are"
                f" requested, and text past token {trained} {what}"
            )
        return Prompt(ids=ids, num_new_tokens=min(most, room), seed=settings.seed)

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

    def _ends(self, settings: GenerationSettings, warn: Callable[[str], object]) -> tuple[int, ...]:
        """The tokens that end a sample, besides eos."""
        of_turn = ends_of_turns(self.tokenizer, warn) if settings.chat else ()
        return (*of_turn, *self.generation_tokens("eos_token_id"))

    def encode(
        self, prompt: GivenPrompt, *, chat: bool = False, past_trained_length: bool = False
    ) -> np.ndarray:
        """Token ids of a prompt, after `begin`; of a chat, as its template writes it.

        Raises DataError if the model cannot continue it.
        """
        self._check_reads_text()
        try:
            check_characters(prompt)
        except UnicodeEncodeError as error:
            raise DataError(
                explain("the prompt is not text", given=error, do="give valid UTF-8")
            ) from error
        if chat or not isinstance(prompt, str):
            ids = chat_ids(self.tokenizer, prompt)
        else:
            text = self.tokenizer.encode(prompt)
            ids = np.concatenate([np.array(self.begin, text.dtype), text])
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
                        f"give at most {limit} tokens, or exceed them anyway:"
                        f" {argument('past_trained_length')}"
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
                    do=f"use `{typed_command('transcribe')}`",
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
