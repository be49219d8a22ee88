"""Converts text to token ids and back: by bytes, or with any Hugging Face tokenizer.json.

A *token id* is an integer below `vocab_size`. The id `eos` ends every document and occurs nowhere
else: where a text contains it, other tokens replace it (eos.py). Ids are uint16 if the vocabulary
fits, else uint32.
"""

import hashlib
import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Protocol, TypeVar

import numpy as np
from rich.console import Console
from rich.progress import (
    FileSizeColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TransferSpeedColumn,
)

from optimus_jax.config.data import BYTES
from optimus_jax.data.chat_template import ChatTemplate, template_file, template_files
from optimus_jax.data.eos import RespellingCounts
from optimus_jax.data.huggingface_tokenizer import FILE, HuggingFaceTokenizer
from optimus_jax.data.rendered_chat import RenderedChat
from optimus_jax.data.token_ids import (
    ChatTokens,
    SpannedTokens,
    TextFrame,
    chat_tokens,
    frame_of_ends,
    token_dtype,
)
from optimus_jax.errors import DataError, explain
from optimus_jax.store.hub import TOKENIZER_FILES, hub_directory
from optimus_jax.store.local_copies import local_file
from optimus_jax.system.hub_model import HubModel

T = TypeVar("T")

_GROUP_CHARACTERS = 1_000_000
"""Characters tokenized per call: enough to keep all cores busy, few enough to show progress."""


class Tokenizer(Protocol):
    """The interface of a tokenizer."""

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""
        ...

    @property
    def eos(self) -> int:
        """The id that ends a document."""
        ...

    @property
    def mask(self) -> int | None:
        """The id of the mask token; None: there is none."""
        ...

    def token_id(self, token: str) -> int | None:
        """The id of a token by its text, such as `<|en|>`; None: there is no such token."""
        ...

    @property
    def digest(self) -> str:
        """Sixteen hex digits; tokenizers with the same digest give the same ids."""
        ...

    @property
    def end(self) -> str:
        """Describes the token that ends a document, and the reason for the choice."""
        ...

    @property
    def respelled(self) -> RespellingCounts:
        """Counts, so far, of what was done with special tokens in texts."""
        ...

    @property
    def notes(self) -> list[str]:
        """Sentences that tell a user how tokenizing changed texts or settings."""
        ...

    @property
    def files(self) -> Mapping[str, bytes]:
        """Content, by name, of the files that recreate the tokenizer; empty if none are needed."""
        ...

    @property
    def chat_template(self) -> ChatTemplate | None:
        """The template that writes out conversations; None: there is none."""
        ...

    @property
    def special_tokens(self) -> Collection[str]:
        """Texts of the tokens that messages must not contain."""
        ...

    def encode_chats(self, chats: Sequence[RenderedChat]) -> list["ChatTokens"]:
        """The ids of rendered conversations. Special tokens in what the template wrote are special
        tokens; in messages they are ordinary text.

        Raises DataError for text that the vocabulary cannot write.
        """
        ...

    @property
    def frame(self) -> TextFrame:
        """The special tokens around texts with labels."""
        ...

    def begins_word(self, tokens: np.ndarray) -> np.ndarray:
        """Whether each of some tokens in a row, [R, L], is the first of a word: bool [R, L]."""
        ...

    def encode_with_spans(self, texts: Sequence[str]) -> list[SpannedTokens]:
        """`encode` of each text, with the characters that each token stands for."""
        ...

    def encode(self, text: str) -> np.ndarray:
        """Ids of `text`, uint16 or uint32 [N], with no eos.

        Raises DataError for text that the vocabulary cannot write.
        """
        ...

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """`encode` of each text."""
        ...

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of `ids`; eos and ids outside the vocabulary are left out."""
        ...


def load_tokenizer(
    name: str, eos: str | None = None, *, by_list: bool = False, chat_template: str | None = None
) -> Tokenizer:
    """The tokenizer that a config names.

    Args:
      name: `bytes`; the path or URL of a tokenizer.json; a folder that holds one, or a model on
        the hub.
      eos: the token that ends a document; None: the one named by the files beside tokenizer.json,
        or one of EOS_TOKENS.
      by_list: whether to ignore those files.
      chat_template: path or URL of a chat template; None: the tokenizer's own.
    Raises:
      DataError: the tokenizer cannot be used.
    """
    template = chat_template and local_file(chat_template, what="data.chat_template")
    if name == BYTES:
        if eos is not None:
            raise DataError(
                explain(
                    "documents of bytes end with an id that is no byte, not with a token",
                    given=f"data.eos={eos}",
                    do="leave data.eos out, or give the path of a tokenizer.json",
                )
            )
        return ByteTokenizer(template_file(template, {}) if template else None)
    hub_model = HubModel.parse(name)
    path = (
        local_file(name, what="--tokenizer")
        if hub_model is None
        else hub_directory(hub_model, TOKENIZER_FILES)
    )
    if os.path.isdir(path):
        path = path / FILE
    return HuggingFaceTokenizer(path, eos, by_list=by_list, chat_template=template or None)


_IN_WORD = np.array([byte >= 128 or chr(byte).isalnum() for byte in range(256)] + [False])
"""Whether each byte is part of a word: letters, digits, and all that is not ASCII; and eos."""


class ByteTokenizer:
    """Tokenizer whose ids 0 to 255 are the bytes of UTF-8; id 256 ends a document."""

    vocab_size = 257
    eos = 256
    mask = None
    digest = hashlib.sha256(b"bytes, eos=256").hexdigest()[:16]
    end = "id 256, which is no byte"
    special_tokens = ()

    def __init__(self, chat_template: ChatTemplate | None = None) -> None:
        self.chat_template = chat_template

    @property
    def respelled(self) -> RespellingCounts:
        return RespellingCounts()

    @property
    def notes(self) -> list[str]:
        return []

    @property
    def files(self) -> Mapping[str, bytes]:
        return template_files(self.chat_template)

    @property
    def frame(self) -> TextFrame:
        return frame_of_ends(self.eos)

    def token_id(self, token: str) -> int | None:
        return None

    def begins_word(self, tokens: np.ndarray) -> np.ndarray:
        in_word = _IN_WORD[np.minimum(tokens, self.eos)]
        before = np.concatenate([np.zeros_like(in_word[:, :1]), in_word[:, :-1]], axis=1)
        return ~(in_word & before)

    def encode_chats(self, chats: Sequence[RenderedChat]) -> list[ChatTokens]:
        encoded = self.encode_with_spans([chat.text for chat in chats])
        return [
            chat_tokens(chat, *tokens, self.eos)
            for chat, tokens in zip(chats, encoded, strict=True)
        ]

    def encode_with_spans(self, texts: Sequence[str]) -> list[SpannedTokens]:
        found = []
        for text in texts:
            widths = [len(character.encode()) for character in text]
            starts = np.repeat(np.arange(len(widths)), widths)
            found.append(SpannedTokens(self.encode(text), np.stack([starts, starts + 1], axis=1)))
        return found

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode(), np.uint8).astype(np.uint16)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        ids = np.asarray(ids, np.int64)
        return ids[(ids >= 0) & (ids < 256)].astype(np.uint8).tobytes().decode(errors="replace")


def encode_documents(tokenizer: Tokenizer, documents: Iterable[str]) -> Iterator[np.ndarray]:
    """Yield the ids of all documents, eos after each; an array [N] holds many whole documents.

    Shows progress while stderr is a terminal.
    """
    eos = np.array([tokenizer.eos], token_dtype(tokenizer.vocab_size))
    for texts in groups(documents, len):
        yield np.concatenate([part for ids in tokenizer.encode_batch(texts) for part in (ids, eos)])


def groups(documents: Iterable[T], length: Callable[[T], int]) -> Iterator[list[T]]:
    """Yield lists of documents to tokenize together; shows progress while stderr is a terminal.

    Args:
      length: the characters of a document.
    """
    columns = (
        TextColumn("{task.description}"),
        FileSizeColumn(),
        TransferSpeedColumn(),
        TimeElapsedColumn(),
    )
    with Progress(
        *columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()
    ) as progress:
        task = progress.add_task("tokenizing", total=None)
        group, size = [], 0
        for document in documents:
            group.append(document)
            size += length(document)
            if size >= _GROUP_CHARACTERS:
                yield group
                progress.advance(task, size)
                group, size = [], 0
        if group:
            yield group
