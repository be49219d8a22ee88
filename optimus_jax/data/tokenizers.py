"""Text <-> token ids: bytes, or any Hugging Face tokenizer.json.

A *token id* is an integer below `vocab_size`. The id `eos` ends every document and occurs nowhere
else. Ids are kept in the smaller of uint16 and uint32 that holds the vocabulary.
"""

import hashlib
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from rich.console import Console
from rich.progress import FileSizeColumn, Progress, TextColumn, TimeElapsedColumn, TransferSpeedColumn

from optimus_jax.errors import DataError, explain
from optimus_jax.store.local_copies import local_file

BYTES = "bytes"
EOS_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<|eot_id|>")
"""Names that families of models give to the end of a document; the first that exists is taken."""

_GROUP_CHARACTERS = 1_000_000
"""Text tokenized in one go: enough to keep all cores busy, little enough that progress moves."""


class Tokenizer(Protocol):
    """What the rest of the program knows of a tokenizer."""

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

    def encode(self, text: str) -> np.ndarray:
        """Ids of `text`, uint16 or uint32 [N], with no eos."""
        ...

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """`encode` of each text."""
        ...

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of `ids`; eos and ids outside the vocabulary have none."""
        ...


def load_tokenizer(name: str) -> Tokenizer:
    """The tokenizer that a config names: `bytes`, or the path or URL of a tokenizer.json."""
    return ByteTokenizer() if name == BYTES else HuggingFaceTokenizer(local_file(name, what="--tokenizer"))


def token_dtype(vocab_size: int) -> type[np.uint16] | type[np.uint32]:
    """The type in which ids below `vocab_size` are kept."""
    return np.uint16 if vocab_size <= 2**16 else np.uint32


class ByteTokenizer:
    """Ids 0 to 255 are the bytes of UTF-8, 256 ends a document."""

    vocab_size = 257
    eos = 256
    digest = hashlib.sha256(b"bytes, eos=256").hexdigest()[:16]

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode(), np.uint8).astype(np.uint16)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        ids = np.asarray(ids, np.int64)
        return ids[(ids >= 0) & (ids < 256)].astype(np.uint8).tobytes().decode(errors="replace")


class HuggingFaceTokenizer:
    """A tokenizer.json of the `tokenizers` library.

    Special tokens spelled out in a text are taken as ordinary characters, so that no document can
    contain its own end. Nothing is added, padded or truncated, whatever the file asks for.

    Raises:
      DataError: the library or the file is missing, the file is not a tokenizer, or it has none of
        EOS_TOKENS.
    """

    def __init__(self, path: Path) -> None:
        try:
            import tokenizers
        except ImportError as error:
            raise DataError(explain("a tokenizer.json needs the tokenizers library, which is not installed",
                                    given=path, do="pip install 'optimus-jax[tokenizers]'")) from error
        try:
            data = path.read_bytes()
            self._tokenizer = tokenizers.Tokenizer.from_buffer(data)
        except OSError as error:
            raise DataError(explain("a tokenizer file cannot be read", given=error,
                                    do=f"give `{BYTES}` or the path of a tokenizer.json")) from error
        except Exception as error:  # the library raises nothing more special
            raise DataError(explain(f"{path} is not a tokenizer of the tokenizers library", given=error,
                                    do=f"give `{BYTES}` or the path of a tokenizer.json")) from error
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._tokenizer.encode_special_tokens = True

        vocabulary = self._tokenizer.get_vocab()
        eos = next((token for token in EOS_TOKENS if token in vocabulary), None)
        if eos is None:
            raise DataError(explain(f"{path} has no token that ends a document", given=f"{len(vocabulary)} tokens",
                                    do="add one of " + ", ".join(EOS_TOKENS) + " to its added_tokens"))
        self.eos = vocabulary[eos]
        # Not get_vocab_size(): that counts the tokens, and ids may have gaps.
        self.vocab_size = max(vocabulary.values()) + 1
        self.digest = hashlib.sha256(data).hexdigest()[:16]

    def encode(self, text: str) -> np.ndarray:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        dtype = token_dtype(self.vocab_size)
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, dtype) for encoding in encodings]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        return self._tokenizer.decode([int(token) for token in ids], skip_special_tokens=True)


def encode_documents(tokenizer: Tokenizer, documents: Iterable[str]) -> Iterator[np.ndarray]:
    """Ids of all documents, eos after each, as arrays [N] of many whole documents.

    Shows progress while stderr is a terminal.
    """
    eos = np.array([tokenizer.eos], token_dtype(tokenizer.vocab_size))
    columns = TextColumn("{task.description}"), FileSizeColumn(), TransferSpeedColumn(), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("tokenizing", total=None)
        for texts in _group(documents):
            yield np.concatenate([part for ids in tokenizer.encode_batch(texts) for part in (ids, eos)])
            progress.advance(task, sum(map(len, texts)))


def _group(documents: Iterable[str]) -> Iterator[list[str]]:
    """Lists of documents, each list as short as _GROUP_CHARACTERS allows."""
    texts, size = [], 0
    for text in documents:
        texts.append(text)
        size += len(text)
        if size >= _GROUP_CHARACTERS:
            yield texts
            texts, size = [], 0
    if texts:
        yield texts
