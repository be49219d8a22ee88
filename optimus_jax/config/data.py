"""Settings of the training data: sources, tokenizer, batch size and its phases."""

import functools
import itertools
import os
import re
from dataclasses import dataclass, replace
from typing import Literal

from optimus_jax.config.checks import check_counts, check_positive
from optimus_jax.config.in_python import IN_PYTHON
from optimus_jax.config.weighted_sources import WeightedSource, weighted_sources
from optimus_jax.errors import ConfigError, explain
from optimus_jax.system.hub_model import HubModel
from optimus_jax.system.paths import Url, user_path

STDLIB = "stdlib"
"""The source available on every machine: the .py files of Python's standard library."""
BYTES = "bytes"
"""The tokenizer that needs no file."""
ExampleKind = Literal[
    "documents",
    "texts",
    "pairs",
    "labels",
    "word_labels",
    "answers",
    "images",
    "unlabelled_images",
    "recordings",
]
"""What a task learns from: documents and conversations, documents alone (texts), preference pairs,
texts with a label, words with a label each, questions with answers, images with or without a label,
or recordings with their texts."""
SpeechTask = Literal["transcribe", "translate"]
"""What a model writes of a recording: its text, or that in English."""
RecordChoice = Literal["auto", "text", "messages", "completion"]
"""What a record is read as: a text, a conversation, or a prompt with its completion."""
TooLong = Literal["truncate", "drop"]
"""What is done with conversations that are longer than an example."""
SEQUENCES_PER_DEVICE = 8
"""Default global batch of a plan, in sequences for each device."""
EVERY_ROLE = "all"
"""The value of `loss_on` with which every token counts."""


@dataclass(frozen=True, kw_only=True)
class PhaseConfig:
    """A change of the batch from a given step on; fields that are None keep their value."""

    after_step: int
    """Steps completed before the phase begins."""
    global_batch: int | None = None
    """Examples per step over all devices."""
    seq_len: int | None = None
    """Tokens per example."""

    def __post_init__(self) -> None:
        check_positive(self, "after_step", "global_batch", "seq_len")
        check_counts(self, "after_step", "global_batch", "seq_len")
        if self.global_batch is None and self.seq_len is None:
            raise ConfigError(
                explain(
                    "a phase changes nothing",
                    given=f"after_step={self.after_step}",
                    do="give it a global_batch, a seq_len, or both",
                )
            )

    @classmethod
    def parse(cls, text: str) -> "PhaseConfig":
        """The inverse of `str`. Raises ConfigError for other text."""
        match = re.fullmatch(r"(\d{1,10}):(\d{1,10})?(?:x(\d{1,10}))?", text.strip())
        if match is None:
            raise ConfigError(
                explain(
                    "a phase is written AFTER_STEP:BATCHxTOKENS",
                    given=text,
                    do=(
                        "write 200:64 or 200:64x512, or 200:x512 for longer examples only; commas"
                        " between phases"
                    ),
                )
            )
        after_step, global_batch, seq_len = (
            None if part is None else int(part) for part in match.groups()
        )
        return cls(after_step=after_step or 0, global_batch=global_batch, seq_len=seq_len)

    def __str__(self) -> str:
        return f"{self.after_step}:{self.global_batch or ''}" + (
            "" if self.seq_len is None else f"x{self.seq_len}"
        )


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where tokens come from and how batches are cut from them."""

    sources: tuple[str, ...] = (STDLIB,)
    """`stdlib` (Python's own library), or files, globs, folders and URLs: text, .jsonl .json .csv
    .parquet .arrow .bin. With weights, a mixture: `web=0.8:a.jsonl code=0.2:b.bin`
    (docs/data.md)."""
    tokenizer: str = BYTES
    """`bytes`; the path or URL of a Hugging Face tokenizer.json, or of a directory with one; or
    hf://ORG/NAME, that of a model on the hub."""
    eos: str | None = None
    """The token that ends a document; None: the one that tokenizer_config.json beside the tokenizer
    names, else the usual names."""
    seq_len: int | None = None
    """Tokens per example; None: the model's max_length, of text alone at most 1024."""
    global_batch: int = 16
    """Examples per step over all devices."""
    phases: tuple[PhaseConfig, ...] = ()
    """Other batches later in the run, in order: `200:64,400:128x2048` is 64 examples after step
    200, then 128 of 2048 tokens."""
    respect_documents: bool = True
    """Mask attention and loss across document boundaries within an example."""
    eval_fraction: float = 0.01
    """Fraction of documents held out for evaluation."""
    text_field: str = "text"
    """Name of the text in a JSON object, or of its column in a table."""
    second_text_field: str | None = None
    """Name of the second of two texts that have one label; None: there is one text."""
    label_field: str | None = None
    """Name of the label of a text, or of the labels of its words; None: `label`, or `labels` of
    words."""
    image_field: str = "image"
    """Name of the column with images in a table."""
    audio_field: str = "audio"
    """Name of the column with recordings in a table; their texts are in text_field."""
    language: str = "en"
    """Code of the language of recordings, where the tokenizer has tokens of languages; none: texts
    name neither language nor task, as for models of English alone."""
    speech_task: SpeechTask = "transcribe"
    """What is written of recordings: their text, or that in English (translate)."""
    records: RecordChoice = "auto"
    """What each JSON object or row holds: text, messages (a conversation), or completion (a prompt
    with one); auto: by the names of its fields."""
    chat_template: str | None = None
    """Path or URL of the Jinja template that writes out conversations; None: the tokenizer's
    own."""
    loss_on: tuple[str, ...] = ("assistant",)
    """Roles whose messages count in the loss, or `all` for every token. Of a prompt with a
    completion, the completion counts."""
    too_long: TooLong = "truncate"
    """Whether conversations longer than an example are truncated or dropped."""
    skip_bad_lines: bool = False
    """Skip and count malformed lines, rows and items instead of raising an error."""
    allow_change: bool = False
    """Resume although the data has changed since the checkpoint; applies to one start and is not
    saved."""

    def __post_init__(self) -> None:
        check_positive(self, "seq_len", "global_batch")
        check_counts(self, "seq_len", "global_batch")
        if not self.sources:
            raise ConfigError(
                explain(
                    "no data was named",
                    given="data.sources=()",
                    do="name `stdlib` or at least one file",
                )
            )
        for source in self.mixture or self.sources:
            user_path(source.path if isinstance(source, WeightedSource) else source, what="--data")
        if HubModel.parse(self.tokenizer) is None:
            user_path(self.tokenizer, what="--tokenizer")
        if self.chat_template is not None:
            user_path(self.chat_template, what="data.chat_template")
        if not self.loss_on or (EVERY_ROLE in self.loss_on and len(self.loss_on) > 1):
            raise ConfigError(
                explain(
                    "data.loss_on must name roles, or be `all` alone",
                    given=",".join(self.loss_on) or "no role",
                    do="choose assistant, all, or several roles: assistant,tool",
                )
            )
        for first, second in itertools.pairwise(self.phases):
            if first.after_step >= second.after_step:
                raise ConfigError(
                    explain(
                        "phases must follow one another",
                        given=f"data.phases={first},{second}",
                        do="put them in order, each with an after_step of its own",
                    )
                )
        if not 0 <= self.eval_fraction < 1:
            raise ConfigError(
                explain(
                    "data.eval_fraction must be a fraction",
                    given=self.eval_fraction,
                    do="choose 0 <= eval_fraction < 1",
                )
            )

    @functools.cached_property
    def mixture(self) -> tuple[WeightedSource, ...]:
        """The named sources with their weights; empty if sources have none. Raises ConfigError."""
        return weighted_sources(self.sources)

    def with_whole_paths(self) -> "DataConfig":
        """The same data with absolute paths, so that it is found from any working directory."""
        return replace(
            self,
            sources=(
                tuple(str(replace(one, path=whole_path(one.path))) for one in self.mixture)
                or tuple(map(whole_path, self.sources))
            ),
            tokenizer=str(HubModel.parse(self.tokenizer) or whole_path(self.tokenizer)),
            chat_template=self.chat_template and whole_path(self.chat_template),
        )


def whole_path(name: str) -> str:
    """A source or tokenizer with paths and globs made absolute; keywords and URLs unchanged."""
    if name in (STDLIB, BYTES, IN_PYTHON, ""):
        return name
    path = user_path(name, what="this path")
    return str(path) if isinstance(path, Url) else os.path.abspath(path)
