"""Streams of tokens: what they hold, how they are split, and the files that keep them.

A *stream* is a whole data set as one array of token ids, each document followed by eos. A *token
file* is such an array on disk (NAME.bin, little-endian, no header) and says what it is in a
NAME.bin.json beside it; it is mapped into memory, never loaded, so it may be larger than memory.
"""

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from optimus_jax.data.sources import HEADER_SUFFIX, TOKEN_SUFFIX
from optimus_jax.data.tokenizers import Tokenizer, token_dtype
from optimus_jax.errors import DataError, explain

_FORMAT = 1
_CHUNK_TOKENS = 1 << 24
"""Tokens looked at in one go, so that reading a token file needs little memory."""

_CHECKED_TOKENS = 1 << 29
"""Tokens of a file that are looked at before training: a gigabyte, which takes about a second."""
_DIGEST_TOKENS = 1 << 26
"""Tokens of which every one counts in a digest; a tenth of a second."""
_DIGEST_BLOCKS = 256
"""Blocks that stand for the others in a digest of more tokens."""


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenStream:
    """Documents as one array of token ids."""

    name: str
    """Where the tokens come from, for messages."""
    tokens: np.ndarray
    """Token ids, uint16 or uint32 [N]; an np.memmap when they stay on disk."""
    eos: int
    """The id that ends each document."""
    vocab_size: int
    """Token ids are below this."""

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, kw_only=True)
class TokenHeader:
    """What NAME.bin.json says about NAME.bin."""

    format: int = _FORMAT
    """Version of this description."""
    dtype: str
    """uint16 or uint32."""
    vocab_size: int
    """Token ids are below this."""
    num_tokens: int
    """Tokens, those that end a document included."""
    num_documents: int
    """Documents."""
    eos: int
    """The id that ends each document."""
    tokenizer: str
    """Digest of the tokenizer."""


def content_digest(stream: TokenStream) -> str:
    """Sixteen hex digits that differ if the tokens do.

    Of more than _DIGEST_TOKENS they are those of evenly spread blocks, first and last included: reading
    hundreds of gigabytes at every start would cost more than it tells.
    """
    tokens = stream.tokens
    digest = hashlib.blake2b(str(len(tokens)).encode(), digest_size=8)
    if len(tokens) <= _DIGEST_TOKENS:
        starts, size = [0], len(tokens)
    else:
        size = _DIGEST_TOKENS // _DIGEST_BLOCKS
        starts = [block * (len(tokens) - size) // (_DIGEST_BLOCKS - 1) for block in range(_DIGEST_BLOCKS)]
    for start in starts:
        digest.update(np.ascontiguousarray(tokens[start : start + size]).data)
    return digest.hexdigest()


def check_tokens(stream: TokenStream, tokens: np.ndarray, start: int) -> None:
    """Raise DataError if some of a stream's tokens, from position `start` on, are not below its own vocabulary."""
    if len(tokens) and tokens.max() >= stream.vocab_size:
        offset = int(np.argmax(tokens >= stream.vocab_size))
        raise DataError(explain(
            f"{stream.name} has a token outside of its own vocabulary",
            given=f"token id {tokens[offset]} at position {start + offset}; the vocabulary is {stream.vocab_size}",
            do="the file is damaged, or its header is of another: write both again with scripts/tokenize.py"))


def check_vocab(stream: TokenStream, vocab_size: int, model_name: str) -> None:
    """Refuse tokens that the model has no embedding for.

    Tokens in memory are below the vocabulary of the tokenizer that made them. Those of a file are looked at if
    they are no more than _CHECKED_TOKENS; of a longer one, batches are as they are cut (sampler.py).

    Raises:
      DataError: a token id is not below `vocab_size`, or not below the stream's own.
    """
    if stream.vocab_size <= vocab_size:
        if isinstance(stream.tokens, np.memmap) and len(stream) <= _CHECKED_TOKENS:
            for start, tokens in _chunks(stream.tokens):
                check_tokens(stream, tokens, start)
        return
    for start, tokens in _chunks(stream.tokens):
        if tokens.max() >= vocab_size:
            offset = int(np.argmax(tokens >= vocab_size))
            raise DataError(explain(
                f"{stream.name} has a token that {model_name} does not know",
                given=f"token id {tokens[offset]} at position {start + offset}; "
                      f"the model's vocabulary is {vocab_size}, the data's {stream.vocab_size}",
                do=f"use the model's own tokenizer, or --set model.vocab_size={stream.vocab_size}"))


def split(stream: TokenStream, eval_fraction: float) -> tuple[TokenStream, TokenStream | None]:
    """The stream to train on, and the one held out (None if `eval_fraction` is 0).

    Of documents in memory, those are held out whose tokens hash low enough, at least one and not
    all; copies of a document share a side unless all documents are alike. Of a token file the end
    is held out, from the first border of documents within the last `eval_fraction` of its tokens.
    A single document, or a file without such a border, is cut at that position itself.
    """
    if eval_fraction == 0:
        return stream, None
    on_disk = isinstance(stream.tokens, np.memmap)
    ends = np.array([], int) if on_disk else np.flatnonzero(stream.tokens == stream.eos) + 1
    if len(ends) < 2:
        cut = _tail_start(stream, eval_fraction)
        train, held_out = stream.tokens[:cut], stream.tokens[cut:]
    else:
        is_held_out = np.repeat(_choose_documents(stream.tokens, ends, eval_fraction), np.diff(ends, prepend=0))
        train, held_out = stream.tokens[~is_held_out], stream.tokens[is_held_out]
    return (dataclasses.replace(stream, tokens=train),
            dataclasses.replace(stream, tokens=held_out, name=f"{stream.name} (held out)"))


def _choose_documents(tokens: np.ndarray, ends: np.ndarray, eval_fraction: float) -> np.ndarray:
    """Which of at least two documents, ending before `ends`, are held out: bool [num documents]."""
    starts = [0, *ends[:-1]]
    digests = [hashlib.blake2b(tokens[a:b].data, digest_size=8).digest() for a, b in zip(starts, ends, strict=True)]
    hashes = np.frombuffer(b"".join(digests), "<u8")
    is_held_out = hashes < eval_fraction * 2.0**64
    order = np.argsort(hashes, kind="stable")
    is_held_out[order[0]], is_held_out[order[-1]] = True, False
    return is_held_out


def _tail_start(stream: TokenStream, eval_fraction: float) -> int:
    """The first border of documents within the last `eval_fraction` of the tokens, else its start."""
    cut = max(1, len(stream) - max(1, round(len(stream) * eval_fraction)))
    for start, tokens in _chunks(stream.tokens[cut - 1 : -1]):
        is_eos = tokens == stream.eos
        if is_eos.any():
            return cut + start + int(np.argmax(is_eos))
    return cut


def _chunks(tokens: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    for start in range(0, len(tokens), _CHUNK_TOKENS):
        yield start, tokens[start : start + _CHUNK_TOKENS]


def write_token_file(path: Path, parts: Iterable[np.ndarray], tokenizer: Tokenizer) -> TokenHeader:
    """Write tokens, then the header; without a header there is no token file.

    Args:
      path: a NAME.bin that does not exist.
      parts: token ids [N] of whole documents, one array after the other.
    Raises:
      DataError: the name has another suffix, or either file exists or cannot be made. Whatever is
        raised, on the way through `parts` too, leaves no half-written file behind.
    """
    if path.suffix != TOKEN_SUFFIX:
        raise DataError(explain("a token file has another suffix", given=path, do=f"name it {path.stem}{TOKEN_SUFFIX}"))
    header_path = _header_path(path)
    for existing in (path, header_path):
        if existing.exists():
            raise DataError(explain("a token file is never overwritten", given=f"{existing} exists",
                                    do=f"choose another name, or remove {path.name} and {header_path.name}"))
    dtype = np.dtype(token_dtype(tokenizer.vocab_size))
    num_tokens = num_documents = 0
    try:
        with path.open("xb") as file:
            try:
                for tokens in parts:
                    file.write(tokens.astype(dtype.newbyteorder("<"), copy=False).tobytes())
                    num_tokens += len(tokens)
                    num_documents += int(np.count_nonzero(tokens == tokenizer.eos))
                file.flush()
                header = TokenHeader(dtype=dtype.name, vocab_size=tokenizer.vocab_size, num_tokens=num_tokens,
                                     num_documents=num_documents, eos=tokenizer.eos, tokenizer=tokenizer.digest)
                header_path.write_text(json.dumps(dataclasses.asdict(header), indent=2) + "\n")
            except BaseException:
                path.unlink()
                header_path.unlink(missing_ok=True)
                raise
    except OSError as error:
        raise DataError(explain(f"{path} cannot be written", given=error,
                                do="choose an existing folder with enough room")) from error
    return header


def read_token_file(path: Path, tokenizer: Tokenizer) -> tuple[TokenStream, TokenHeader]:
    """Map a token file into memory.

    Raises:
      DataError: the header is missing or unreadable, does not fit the size of the file, or names
        another tokenizer than `tokenizer`.
    """
    header = _read_header(path)
    size, expected = path.stat().st_size, header.num_tokens * np.dtype(header.dtype).itemsize
    if size != expected or not size:
        raise DataError(explain(f"{path} does not have the size that its header says",
                                given=f"{size} bytes; {header.num_tokens} tokens of {header.dtype} "
                                      f"are {expected} bytes",
                                do="write it again with scripts/tokenize.py"))
    if header.tokenizer != tokenizer.digest:
        raise DataError(explain(f"{path} was made with another tokenizer",
                                given=f"digest {header.tokenizer} in {_header_path(path).name}, "
                                      f"{tokenizer.digest} here",
                                do="give the tokenizer that made it: --tokenizer PATH"))
    tokens = np.memmap(path, np.dtype(header.dtype).newbyteorder("<"), mode="r")
    return TokenStream(name=str(path), tokens=tokens, eos=header.eos, vocab_size=header.vocab_size), header


def _read_header(path: Path) -> TokenHeader:
    try:
        header = TokenHeader(**json.loads(_header_path(path).read_bytes()))
        if header.format != _FORMAT or header.dtype not in ("uint16", "uint32"):
            raise ValueError(f"format {header.format}, dtype {header.dtype}")
    except (OSError, ValueError, TypeError) as error:
        raise DataError(explain(
            f"{path} has no header of format {_FORMAT} beside it", given=error,
            do=f"restore {_header_path(path).name}, or write both with scripts/tokenize.py")) from error
    return header


def _header_path(path: Path) -> Path:
    return path.with_name(path.name + HEADER_SUFFIX)
