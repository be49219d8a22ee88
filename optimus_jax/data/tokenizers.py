"""Converts text to token ids and back: by bytes, or with any Hugging Face tokenizer.json.

A *token id* is an integer below `vocab_size`. The id `eos` ends every document and occurs nowhere
else: where a text contains it, other tokens replace it (eos.py). Ids are uint16 if the vocabulary
fits, else uint32.
"""

import contextlib
import functools
import hashlib
import json
import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

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
from optimus_jax.data.chat_template import (
    TEMPLATE_FILE,
    ChatTemplate,
    special_tokens_beside,
    template_beside,
    template_file,
)
from optimus_jax.data.eos import CONFIG, Respelling, RespellingCounts, choose_eos
from optimus_jax.data.rendered_chat import RenderedChat
from optimus_jax.errors import DataError, explain
from optimus_jax.store.hub import TOKENIZER_FILES, hub_directory
from optimus_jax.store.local_copies import local_file
from optimus_jax.system.hub_model import HubModel

T = TypeVar("T")
FILE = "tokenizer.json"
"""Name of the tokenizers library's file."""

_GROUP_CHARACTERS = 1_000_000
"""Characters tokenized per call: enough to keep all cores busy, few enough to show progress."""


class ChatTokens(NamedTuple):
    """A conversation as tokens."""

    ids: np.ndarray
    """Token ids, uint16 or uint32 [N]."""
    counts: np.ndarray
    """Whether each token counts in the loss when it is the target: bool [N]."""


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


def token_dtype(vocab_size: int) -> type[np.uint16] | type[np.uint32]:
    """The dtype that stores ids below `vocab_size`."""
    return np.uint16 if vocab_size <= 2**16 else np.uint32


class ByteTokenizer:
    """Tokenizer whose ids 0 to 255 are the bytes of UTF-8; id 256 ends a document."""

    vocab_size = 257
    eos = 256
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
        return _template_files(self.chat_template)

    def encode_chats(self, chats: Sequence[RenderedChat]) -> list[ChatTokens]:
        found = []
        for chat in chats:
            widths = [len(character.encode()) for character in chat.text]
            starts = np.repeat(np.arange(len(widths)), widths)
            spans = np.stack([starts, starts + 1], axis=1)
            found.append(_chat_tokens(chat, self.encode(chat.text), spans, self.eos))
        return found

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode(), np.uint8).astype(np.uint16)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        ids = np.asarray(ids, np.int64)
        return ids[(ids >= 0) & (ids < 256)].astype(np.uint8).tobytes().decode(errors="replace")


class HuggingFaceTokenizer:
    """A tokenizer.json of the `tokenizers` library.

    Special tokens spelled out in a text are treated as ordinary characters, so that no document can
    contain eos. Whatever the file asks for, no token is added, nothing is padded or truncated, and
    nothing is random: the same text always has the same ids.

    Raises:
      DataError: the library or the file is missing, the file is not a tokenizer, or no token of it
        ends a document.
    """

    def __init__(
        self,
        path: Path,
        eos: str | None = None,
        *,
        by_list: bool = False,
        chat_template: Path | None = None,
    ) -> None:
        try:
            import tokenizers
        except ImportError as error:
            raise DataError(
                explain(
                    "a tokenizer.json needs the tokenizers library, which is not installed",
                    given=path,
                    do="pip install 'optimus-jax[tokenizers]'",
                )
            ) from error
        try:
            if path.exists() and not path.is_file():  # reading a pipe would block
                raise OSError(f"{path} is no file")
            data = path.read_bytes()
        except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
            raise DataError(
                explain(
                    "a tokenizer file cannot be read",
                    given=error,
                    do=f"give `{BYTES}` or the path of a tokenizer.json",
                )
            ) from error
        try:
            self._tokenizer = tokenizers.Tokenizer.from_buffer(data)
            self._tokenizer.no_padding()
            self._tokenizer.no_truncation()
            self._tokenizer.encode_special_tokens = True
            self._without_dropout = _switch_dropout_off(self._tokenizer.model)
            vocabulary = self._tokenizer.get_vocab()
            unknown = _unknown_of(data, vocabulary)  # the library accepts some invalid JSON
            special = [
                token
                for token, added in self._tokenizer.get_added_tokens_decoder().items()
                if added.special
            ]
        except BaseException as error:
            if not _is_of_library(error):
                raise
            convert = (
                "; transformers makes one of a SentencePiece model:"
                " AutoTokenizer.from_pretrained(FOLDER).save_pretrained(NEW)"
            )
            raise DataError(
                explain(
                    f"{path} is not a tokenizer of the tokenizers library",
                    given=_short(error),
                    do=(
                        f"give `{BYTES}` or the path of a"
                        f" tokenizer.json{convert if path.suffix == '.model' else ''}"
                    ),
                )
            ) from error

        token, why = choose_eos(path, vocabulary, eos, by_list=by_list)
        self.eos = vocabulary[token]
        self.end = f"{token!r}, id {self.eos} ({why})"
        # Not get_vocab_size(): it counts tokens, and ids may have gaps.
        self.vocab_size = max(vocabulary.values()) + 1
        self.digest = hashlib.sha256(data).hexdigest()[:16]
        beside = special_tokens_beside(path.parent)
        self.chat_template = (
            template_file(chat_template, beside)
            if chat_template is not None
            else template_beside(path.parent, beside)
        )
        own = {"tokenizer_class": "PreTrainedTokenizerFast"}
        names = beside if self.chat_template is not None else {}
        self.files = {
            FILE: data,
            CONFIG: json.dumps(own | names | {"eos_token": token}, indent=2).encode() + b"\n",
            **_template_files(self.chat_template),
        }
        reserved = np.zeros(self.vocab_size, bool)
        reserved[[token for token in special if token != unknown]] = True
        reserved[self.eos] = True
        self.special_tokens = frozenset(
            text for text, number in vocabulary.items() if reserved[number]
        )
        self._respelling = Respelling(self._tokenizer, reserved, dropped=self.eos, unknown=unknown)

    @property
    def respelled(self) -> RespellingCounts:
        return self._respelling.found

    @property
    def notes(self) -> list[str]:
        return [*self._without_dropout, *self.respelled.notes()]

    def encode(self, text: str) -> np.ndarray:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        dtype = token_dtype(self.vocab_size)
        with self._explained(texts):
            encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
            return [
                self._respelling(text, np.array(encoding.ids, dtype))
                for text, encoding in zip(texts, encodings, strict=True)
            ]

    @contextlib.contextmanager
    def _explained(self, texts: Sequence[str]) -> Iterator[None]:
        """Turn errors of the library into a DataError that shows the text it cannot write."""
        try:
            yield
        except BaseException as error:
            if not _is_of_library(error):
                raise
            text = texts[0] if len(texts) == 1 else next(filter(self._cannot_write, texts), "")
            raise DataError(
                explain(
                    "the tokenizer cannot write a document",
                    given=f"{text[:80]!r} ({_short(error)})",
                    do=(
                        "use a tokenizer that knows every character, or has an unknown token; or"
                        " leave the document out"
                    ),
                )
            ) from error

    @functools.cached_property
    def _of_templates(self) -> Any:
        """The tokenizer, but special tokens in a text are special tokens."""
        other = type(self._tokenizer).from_str(self._tokenizer.to_str())
        other.encode_special_tokens = False
        return other

    def encode_chats(self, chats: Sequence[RenderedChat]) -> list[ChatTokens]:
        dtype = token_dtype(self.vocab_size)
        texts = [chat.text for chat in chats]
        with self._explained(texts):
            encodings = self._of_templates.encode_batch(texts, add_special_tokens=False)
            found = []
            for chat, encoding in zip(chats, encodings, strict=True):
                ids, spans = self._respelling.within_template(chat.text, encoding, chat.from_data)
                found.append(_chat_tokens(chat, ids.astype(dtype), spans, self.eos))
            return found

    def _cannot_write(self, text: str) -> bool:
        try:
            self._tokenizer.encode(text, add_special_tokens=False)
        except BaseException as error:
            if not _is_of_library(error):
                raise
            return True
        return False

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        return self._tokenizer.decode(
            [int(token) for token in ids if token != self.eos], skip_special_tokens=True
        )


def _switch_dropout_off(model: Any) -> list[str]:
    """Make a model of the tokenizers library deterministic; return notes for the user.

    BPE's dropout skips merges at random. Unigram's alpha, which samples pieces, is not stored in a
    tokenizer.json.
    """
    if (dropout := getattr(model, "dropout", None)) is None:
        return []
    model.dropout = None
    return [
        f"the tokenizer's dropout of {dropout:g} is switched off, because token ids must not"
        " differ between two readings of the data"
    ]


def _is_of_library(error: BaseException) -> bool:
    """Whether the tokenizers library may have raised `error`.

    The library raises plain Exceptions; a panic of its Rust code is not even an Exception.
    """
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def _short(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error)[:300]}"


def _unknown_of(data: bytes, vocabulary: Mapping[str, int]) -> int | None:
    """The id of the unknown token in a tokenizer.json; None if it has none."""
    model = json.loads(data)["model"]
    if isinstance(number := model.get("unk_id"), int):  # Unigram: an index into its list
        return number
    return vocabulary.get(model.get("unk_token") or "")


def _template_files(template: ChatTemplate | None) -> dict[str, bytes]:
    return {} if template is None else {TEMPLATE_FILE: template.text.encode()}


def _chat_tokens(chat: RenderedChat, ids: np.ndarray, spans: np.ndarray, eos: int) -> ChatTokens:
    """A conversation's ids [N], which stand for the characters `spans` [N, 2], with what counts."""
    counts = np.zeros(len(ids), bool)
    for start, stop in chat.counted:
        counts |= (spans[:, 1] > start) & (spans[:, 0] < stop)
    if chat.ends:
        ids = np.append(ids, ids.dtype.type(eos))
        counts = np.append(counts, chat.end_counts)
    return ChatTokens(ids, counts)


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
