"""A tokenizer of the tokenizers library, which neither texts nor chance can change."""

import contextlib
import functools
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from optimus_jax.config.data import BYTES
from optimus_jax.data.chat_template import (
    named_templates,
    special_tokens_beside,
    template_beside,
    template_file,
    template_files,
)
from optimus_jax.data.eos import CONFIG, Respelling, RespellingCounts, choose_eos
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

FILE = "tokenizer.json"
"""Name of the tokenizers library's file."""
WORD_BEGINS = ("\u0120", "\u2581")
"""Marks of a blank before a word, of byte-level BPE and of SentencePiece."""
MASK_TOKENS = ("[MASK]", "<mask>")
"""Mask tokens of published tokenizers."""


NAMED_TOKENS = ("mask_token", "cls_token", "sep_token", "pad_token", "unk_token")
"""Names of special tokens that a run keeps, whatever its texts are."""


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
        ids = (vocabulary.get(mask) for mask in MASK_TOKENS)
        self.mask = next((number for number in ids if number in special), None)
        self.end = f"{token!r}, id {self.eos} ({why})"
        # Not get_vocab_size(): it counts tokens, and ids may have gaps.
        self.vocab_size = max(vocabulary.values()) + 1
        self.digest = hashlib.sha256(data).hexdigest()[:16]
        # A run's copy names eos only as it was chosen, and must give the template the same.
        beside = special_tokens_beside(path.parent) | {"eos_token": token}
        self.chat_template = (
            template_file(chat_template, beside)
            if chat_template is not None
            else template_beside(path.parent, beside)
        )
        own = {"tokenizer_class": "PreTrainedTokenizerFast"}
        # transformers wants those of masks and frames by name.
        names = {
            name: text
            for name, text in beside.items()
            if self.chat_template is not None or name in NAMED_TOKENS
        }
        if self.mask is not None:
            names = {"mask_token": self._tokenizer.id_to_token(self.mask)} | names
        names = names | named_templates(self.chat_template)
        self.files = {
            FILE: data,
            CONFIG: json.dumps(own | {"eos_token": token} | names, indent=2).encode() + b"\n",
            **template_files(self.chat_template),
        }
        self._special = special
        reserved = np.zeros(self.vocab_size, bool)
        reserved[[token for token in special if token != unknown]] = True
        reserved[self.eos] = True
        self.special_tokens = frozenset(
            text for text, number in vocabulary.items() if reserved[number]
        )
        self._respelling = Respelling(self._tokenizer, reserved, dropped=self.eos, unknown=unknown)

    def token_id(self, token: str) -> int | None:
        """The id of a token by its text; None: there is no such token."""
        return self._tokenizer.token_to_id(token)

    @property
    def respelled(self) -> RespellingCounts:
        return self._respelling.found

    @property
    def notes(self) -> list[str]:
        return [*self._without_dropout, *self.respelled.notes()]

    @property
    def frame(self) -> TextFrame:
        return self._frame

    @functools.cached_property
    def _frame(self) -> TextFrame:
        frame = frame_of_ends(self.eos)
        try:
            pair = self._tokenizer.encode("a", "a", add_special_tokens=True)
            alone = self._tokenizer.encode("a", add_special_tokens=True)
        except BaseException as error:
            if not _is_of_library(error):
                raise
            return frame
        texts = alone.sequence_ids
        if None in texts and 0 in texts:
            first, size = texts.index(0), texts.count(0)
            frame = frame._replace(
                before=tuple(alone.ids[:first]), after=tuple(alone.ids[first + size :])
            )
        ids, texts = pair.ids, pair.sequence_ids
        if None in texts and {0, 1} <= {*texts}:
            size, first, second = texts.count(1), texts.index(0), texts.index(1)
            frame = frame._replace(
                first=tuple(ids[:first]),
                middle=tuple(ids[first + size : second]),
                last=tuple(ids[second + size :]),
                second_type=pair.type_ids[second],
            )
        return frame

    @functools.cached_property
    def _continues(self) -> np.ndarray:
        """Whether each token goes on with the word of the token before it, bool [vocab_size], by
        the marks that models of the tokenizers library put at the beginning of tokens.
        """
        names = self._tokenizer.get_vocab()
        found = np.zeros(self.vocab_size, bool)
        continuing = [number for name, number in names.items() if name.startswith("##")]
        beginning = [number for name, number in names.items() if name.startswith(WORD_BEGINS)]
        if beginning and not continuing:
            found[:] = True
            found[beginning] = False
            found[self._special] = False
        found[continuing] = True
        return found

    def begins_word(self, tokens: np.ndarray) -> np.ndarray:
        return ~self._continues[np.minimum(tokens, self.vocab_size - 1)]

    def encode_with_spans(self, texts: Sequence[str]) -> list[SpannedTokens]:
        dtype = token_dtype(self.vocab_size)
        with self._explained(texts):
            found = []
            for text in texts:
                encoding = self._tokenizer.encode(text, add_special_tokens=False)
                ids, spans = self._respelling.within_template(text, encoding, range(len(text)))
                found.append(SpannedTokens(ids.astype(dtype), spans))
            return found

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
                found.append(chat_tokens(chat, ids.astype(dtype), spans, self.eos))
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
