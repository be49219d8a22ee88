"""Streams of tokens: what they hold, how they are split, and how they are stored in files.

A *stream* is a whole data set as one array of token ids, each document followed by eos. A *token
file* is such an array on disk (NAME.bin, little-endian, without a header inside); NAME.bin.json
beside it describes it. A token file is mapped into memory, never loaded, so it may be larger than
memory. Several token files are joined into one stream without a copy (joined.py).
"""

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from optimus_jax.data.digests import WholeDigest
from optimus_jax.data.formats import HEADER_SUFFIX, TOKEN_SUFFIX
from optimus_jax.data.joined import JoinedTokens
from optimus_jax.data.skipped_input import SkippedInput
from optimus_jax.data.token_ids import token_dtype
from optimus_jax.data.tokenizers import Tokenizer
from optimus_jax.errors import DataError, explain
from optimus_jax.system.command import typed_command

_FORMAT = 1
_CHUNK_TOKENS = 1 << 24
"""Tokens processed at a time, so that reading a token file needs little memory."""

CHECKED_TOKENS = 1 << 29
"""Longest stream, in tokens, that is checked before training: a gigabyte, about a second."""
HeldOutBy = Literal["documents", "end"]
"""How held-out tokens are chosen: documents by their hash, or the end of the stream."""


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenStream:
    """Documents as one array of token ids."""

    name: str
    """Where the tokens come from, for messages."""
    tokens: np.ndarray | JoinedTokens
    """Token ids, uint16 or uint32 [N]; np.memmap or JoinedTokens if they stay on disk."""
    eos: int
    """The id that ends each document."""
    vocab_size: int
    """Token ids are below this."""

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, kw_only=True)
class TokenHeader:
    """The content of NAME.bin.json, which describes NAME.bin."""

    format: int = _FORMAT
    """Version of the header's format."""
    dtype: str
    """uint16 or uint32."""
    vocab_size: int
    """Token ids are below this."""
    num_tokens: int
    """Number of tokens, each document's eos included."""
    num_documents: int
    """Number of documents."""
    eos: int
    """The id that ends each document."""
    tokenizer: str
    """Digest of the tokenizer."""
    content: str | None = None
    """Digest of all tokens; None in older files, written without it."""
    bad_lines: int = 0
    """Number of bad lines that were skipped when the file was written."""


def check_tokens(stream: TokenStream, tokens: np.ndarray, start: int) -> None:
    """Raise DataError if one of `tokens` is not below the stream's vocabulary size.

    Args:
      tokens: part of the stream.
      start: position of that part in the stream.
    """
    if len(tokens) and tokens.max() >= stream.vocab_size:
        offset = int(np.argmax(tokens >= stream.vocab_size))
        raise DataError(
            explain(
                f"{stream.name} has a token outside of its own vocabulary",
                given=(
                    f"token id {tokens[offset]} at position {start + offset}; the vocabulary is"
                    f" {stream.vocab_size}"
                ),
                do=(
                    "the file is damaged, or its header is another file's: write both again with"
                    f" {typed_command('tokenize')}"
                ),
            )
        )


def check_vocab(stream: TokenStream, vocab_size: int, model_name: str) -> None:
    """Refuse tokens that the model has no embedding for.

    Tokens in memory are always below their tokenizer's vocabulary size. A stream on disk is checked
    here if it has at most CHECKED_TOKENS; of a longer one, each batch is checked when it is cut
    (sampler.py).

    Raises:
      DataError: a token id is not below `vocab_size`, or not below the stream's vocabulary size.
    """
    if stream.vocab_size <= vocab_size:
        if is_on_disk(stream) and len(stream) <= CHECKED_TOKENS:
            for start, tokens in chunks(stream.tokens):
                check_tokens(stream, tokens, start)
        return
    for start, tokens in chunks(stream.tokens):
        if tokens.max() >= vocab_size:
            offset = int(np.argmax(tokens >= vocab_size))
            raise DataError(
                explain(
                    f"{stream.name} has a token that {model_name} does not know",
                    given=(
                        f"token id {tokens[offset]} at position {start + offset}; "
                        f"the model's vocabulary is {vocab_size}, the data's {stream.vocab_size}"
                    ),
                    do=(
                        "use the model's own tokenizer, or --set"
                        f" model.vocab_size={stream.vocab_size}"
                    ),
                )
            )


def is_on_disk(stream: TokenStream) -> bool:
    """Whether the tokens stay in files and are read when needed."""
    return isinstance(stream.tokens, np.memmap | JoinedTokens)


def split(
    stream: TokenStream, eval_fraction: float, by: HeldOutBy | None = None
) -> tuple[TokenStream, TokenStream | None]:
    """Split a stream into one to train on and one held out (None if `eval_fraction` is 0).

    "documents" holds out the documents whose hash is low enough, at least one and not all. Copies
    of a document go to the same side unless all documents are alike. "end" holds out all tokens
    after the first end of a document within the last `eval_fraction` of the tokens. A single
    document, or a stream without an end of a document there, is cut where that fraction begins.

    Args:
      by: how the held-out tokens are chosen; None: as `held_out_by` says.
    """
    if eval_fraction == 0:
        return stream, None
    if by is None:
        by = held_out_by(stream)
    whole = None if by == "end" else np.asarray(stream.tokens)
    ends = np.array([], int) if whole is None else np.flatnonzero(whole == stream.eos) + 1
    if whole is None or len(ends) < 2:
        cut = _tail_start(stream, eval_fraction)
        train, held_out = stream.tokens[:cut], stream.tokens[cut:]
    else:
        is_held_out = np.repeat(
            chosen_documents(whole, ends, eval_fraction), np.diff(ends, prepend=0)
        )
        train, held_out = whole[~is_held_out], whole[is_held_out]
    return (
        dataclasses.replace(stream, tokens=train),
        dataclasses.replace(stream, tokens=held_out, name=f"{stream.name} (held out)"),
    )


def held_out_by(stream: TokenStream) -> HeldOutBy:
    """How a new run chooses its held-out tokens: mapped files can only be cut at the end."""
    return "end" if is_on_disk(stream) else "documents"


def chosen_documents(tokens: np.ndarray, ends: np.ndarray, eval_fraction: float) -> np.ndarray:
    """Whether each document, ending before `ends`, is held out: bool [num documents >= 2]."""
    starts = [0, *ends[:-1]]
    digests = [
        hashlib.blake2b(tokens[a:b].data, digest_size=8).digest()
        for a, b in zip(starts, ends, strict=True)
    ]
    hashes = np.frombuffer(b"".join(digests), "<u8")
    is_held_out = hashes < eval_fraction * 2.0**64
    order = np.argsort(hashes, kind="stable")
    is_held_out[order[0]], is_held_out[order[-1]] = True, False
    return is_held_out


def _tail_start(stream: TokenStream, eval_fraction: float) -> int:
    """Where the held-out tail of a stream starts.

    It starts after the first end of a document within the last `eval_fraction` of the tokens, or
    where that fraction begins if no document ends there.
    """
    cut = max(1, len(stream) - max(1, round(len(stream) * eval_fraction)))
    for start, tokens in chunks(stream.tokens[cut - 1 : -1]):
        is_eos = tokens == stream.eos
        if is_eos.any():
            return cut + start + int(np.argmax(is_eos))
    return cut


def chunks(tokens: np.ndarray | JoinedTokens) -> Iterator[tuple[int, np.ndarray]]:
    """Yield (start position, tokens) in pieces, so that a stream on disk needs little memory."""
    for start in range(0, len(tokens), _CHUNK_TOKENS):
        yield start, np.asarray(tokens[start : start + _CHUNK_TOKENS])


def write_token_file(
    path: Path,
    parts: Iterable[np.ndarray],
    tokenizer: Tokenizer,
    skipped_input: SkippedInput | None = None,
) -> TokenHeader:
    """Write the tokens, then the header; a file without a header is not a token file.

    Args:
      path: a NAME.bin that does not exist.
      parts: token ids [N] of whole documents, one array after the other.
      skipped_input: counts of what reading the documents skipped, complete once all are written.
    Raises:
      DataError: the name has another suffix, or either file exists or cannot be written. After any
        error, including one raised by `parts`, no half-written file is left behind.
    """
    if path.suffix != TOKEN_SUFFIX:
        raise DataError(
            explain(
                "a token file has another suffix",
                given=path,
                do=f"name it {path.stem}{TOKEN_SUFFIX}",
            )
        )
    header_path = _header_path(path)
    for existing in (path, header_path):
        if existing.exists():
            raise DataError(
                explain(
                    "a token file is never overwritten",
                    given=f"{existing} exists",
                    do=f"choose another name, or remove {path.name} and {header_path.name}",
                )
            )
    dtype = np.dtype(token_dtype(tokenizer.vocab_size))
    num_tokens = num_documents = 0
    digest = WholeDigest()
    try:
        with path.open("xb") as file:
            try:
                for tokens in parts:
                    tokens = tokens.astype(dtype.newbyteorder("<"), copy=False)
                    file.write(tokens.tobytes())
                    digest.update(tokens)
                    num_tokens += len(tokens)
                    num_documents += int(np.count_nonzero(tokens == tokenizer.eos))
                file.flush()
                header = TokenHeader(
                    dtype=dtype.name,
                    vocab_size=tokenizer.vocab_size,
                    num_tokens=num_tokens,
                    num_documents=num_documents,
                    eos=tokenizer.eos,
                    tokenizer=tokenizer.digest,
                    content=digest.hexdigest(),
                    bad_lines=skipped_input.num_bad_lines if skipped_input else 0,
                )
                header_path.write_text(json.dumps(dataclasses.asdict(header), indent=2) + "\n")
            except BaseException:
                path.unlink()
                header_path.unlink(missing_ok=True)
                raise
    except OSError as error:
        raise DataError(
            explain(
                f"{path} cannot be written",
                given=error,
                do="choose an existing folder with enough room",
            )
        ) from error
    return header


def read_token_file(path: Path, tokenizer: Tokenizer) -> tuple[TokenStream, TokenHeader]:
    """Map a token file into memory.

    Raises:
      DataError: the header is missing or unreadable, does not fit the file, or names a tokenizer or
        an eos that differs from that of `tokenizer`.
    """
    header = _read_header(path)
    try:
        size, expected = path.stat().st_size, header.num_tokens * np.dtype(header.dtype).itemsize
    except OSError as error:
        raise DataError(
            explain(
                "a token file cannot be read", given=error, do="give a file that this user may read"
            )
        ) from error
    if size != expected or not size:
        raise DataError(
            explain(
                f"{path} does not have the size that its header says",
                given=(
                    f"{size} bytes; {header.num_tokens} tokens of {header.dtype} "
                    f"are {expected} bytes"
                ),
                do=f"write it again with {typed_command('tokenize')}",
            )
        )
    if header.tokenizer != tokenizer.digest:
        raise DataError(
            explain(
                f"{path} was made with another tokenizer",
                given=(
                    f"digest {header.tokenizer} in {_header_path(path).name}, "
                    f"{tokenizer.digest} here"
                ),
                do="give the tokenizer that made it: --tokenizer PATH",
            )
        )
    if header.eos != tokenizer.eos:
        raise DataError(
            explain(
                f"{path} was made with another end of documents",
                given=f"id {header.eos} in {_header_path(path).name}; here it is {tokenizer.end}",
                do=(
                    f"name the token of id {header.eos}: --set data.eos=TOKEN, or write the file"
                    " again"
                ),
            )
        )
    try:
        tokens = np.memmap(path, np.dtype(header.dtype).newbyteorder("<"), mode="r")
    except (OSError, ValueError) as error:
        raise DataError(
            explain(
                "a token file cannot be mapped into memory",
                given=f"{path}: {error}",
                do="give a file that this user may read",
            )
        ) from error
    stream = TokenStream(
        name=str(path), tokens=tokens, eos=header.eos, vocab_size=header.vocab_size
    )
    if len(stream) <= CHECKED_TOKENS:
        found = sum(int(np.count_nonzero(chunk == header.eos)) for _, chunk in chunks(tokens))
        if found != header.num_documents:
            raise DataError(
                explain(
                    f"{path} does not have the documents that its header says",
                    given=(
                        f"{found:,} ends of documents; {header.num_documents:,} in"
                        f" {_header_path(path).name}"
                    ),
                    do=f"write both again with {typed_command('tokenize')}",
                )
            )
    return stream, header


def read_token_files(
    paths: Sequence[Path], tokenizer: Tokenizer
) -> tuple[TokenStream, list[TokenHeader]]:
    """Map token files into memory, in order, as one stream.

    Raises:
      DataError: as `read_token_file`; or the files differ in dtype or vocabulary size.
    """
    streams, headers = zip(*(read_token_file(path, tokenizer) for path in paths), strict=True)
    if len(streams) == 1:
        return streams[0], list(headers)
    for path, header in zip(paths, headers, strict=True):
        if (header.dtype, header.vocab_size) != (headers[0].dtype, headers[0].vocab_size):
            raise DataError(
                explain(
                    f"{path} has other tokens than {paths[0]}",
                    given=(
                        f"{header.dtype} below {header.vocab_size}; {headers[0].dtype} below"
                        f" {headers[0].vocab_size}"
                    ),
                    do="write both with the same tokenizer",
                )
            )
    joined = JoinedTokens([stream.tokens for stream in streams])
    return dataclasses.replace(streams[0], name=" ".join(map(str, paths)), tokens=joined), list(
        headers
    )


def _read_header(path: Path) -> TokenHeader:
    try:
        header = TokenHeader(**json.loads(_header_path(path).read_bytes()))
        if header.format != _FORMAT or header.dtype not in ("uint16", "uint32"):
            raise ValueError(f"format {header.format}, dtype {header.dtype}")
        numbers = (
            header.vocab_size,
            header.num_tokens,
            header.num_documents,
            header.eos,
            header.bad_lines,
        )
        if not all(
            type(number) is int and 0 <= number < 2**63 for number in numbers
        ) or not isinstance(header.content, str | None):
            raise ValueError(f"values of another type: {header}")
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise DataError(
            explain(
                f"{path} has no header of format {_FORMAT} beside it",
                given=error,
                do=(
                    f"restore {_header_path(path).name}, or write both with"
                    f" {typed_command('tokenize')}"
                ),
            )
        ) from error
    return header


def _header_path(path: Path) -> Path:
    return path.with_name(path.name + HEADER_SUFFIX)
