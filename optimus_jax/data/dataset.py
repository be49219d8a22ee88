"""Loads the training and held-out token streams, and their tokenizer, from a `DataConfig`."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from optimus_jax.config import DataConfig
from optimus_jax.config.data import STDLIB
from optimus_jax.data.digests import DIGEST_TOKENS, WholeDigest, content_digest
from optimus_jax.data.sampler import count_examples
from optimus_jax.data.skipped_input import SkippedInput
from optimus_jax.data.sources import find_files, is_token_file, read_documents
from optimus_jax.data.tokenizers import Tokenizer, encode_documents, load_tokenizer
from optimus_jax.data.tokens import (
    CHECKED_TOKENS,
    HeldOutBy,
    TokenHeader,
    TokenStream,
    check_vocab,
    chunks,
    held_out_by,
    is_on_disk,
    read_token_files,
    split,
)
from optimus_jax.errors import DataError, explain

DataIdentity = dict[str, int | str]
"""Fingerprint of a data set, JSON values by name: see `identity_of` and `differences`."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Data:
    """The loaded data of a run."""

    train: TokenStream
    """Tokens to learn from."""
    held_out: TokenStream | None
    """Tokens to evaluate on; None if data.eval_fraction is 0."""
    tokenizer: Tokenizer
    """The tokenizer that made the tokens."""
    description: str
    """Summary in one line."""
    identity: DataIdentity
    """Fingerprint that tells this data from other data."""
    notes: tuple[str, ...] = ()
    """Sentences about text that was left out or changed while reading the files."""


def load_data(
    config: DataConfig,
    *,
    seq_len: int,
    vocab_size: int,
    model_name: str,
    tokenizer: Tokenizer | None = None,
    by: HeldOutBy | None = None,
) -> Data:
    """Read, tokenize, check and split the data.

    Token files are mapped into memory; all other data is held in memory. Shows progress on a
    terminal, so no other `rich` display should be live.

    Args:
      seq_len: tokens per example.
      vocab_size: number of token ids that the model knows.
      model_name: name of the model in messages.
      tokenizer: the tokenizer of a resumed run; None: the one that the config names.
      by: how a resumed run chose its held-out tokens, which holds whatever the files are now;
        None: `held_out_by` decides.
    Raises:
      DataError: a source, the tokenizer or a token cannot be used.
    """
    tokenizer = tokenizer or load_tokenizer(config.tokenizer, config.eos)
    skipped_input = SkippedInput()
    files = find_files(config.sources, skipped_input)
    headers: Sequence[TokenHeader] = ()
    if files and STDLIB not in config.sources and all(map(is_token_file, files)):
        stream, headers = read_token_files(files, tokenizer)
        num_documents = sum(header.num_documents for header in headers)
    else:
        skipped_input = SkippedInput()
        parts = list(
            encode_documents(
                tokenizer,
                read_documents(
                    config.sources,
                    config.text_field,
                    skip_bad_lines=config.skip_bad_lines,
                    skipped_input=skipped_input,
                ),
            )
        )
        if not parts:
            raise DataError(
                explain(
                    "the data holds no text",
                    given=" ".join(config.sources),
                    do="name files that hold some",
                )
            )
        tokens = np.concatenate(parts)
        stream = TokenStream(
            name=" ".join(config.sources),
            tokens=tokens,
            eos=tokenizer.eos,
            vocab_size=tokenizer.vocab_size,
        )
        num_documents = int(np.count_nonzero(tokens == tokenizer.eos))
    check_vocab(stream, vocab_size, model_name)
    by = by or held_out_by(stream)
    train, held_out = split(stream, config.eval_fraction, by)
    description = (
        f"{stream.name}: {len(stream):,} tokens ({stream.tokens.nbytes:,} bytes as"
        f" {stream.tokens.dtype}) in {num_documents:,} documents;"
        f" {count_examples(train, seq_len):,} examples of {seq_len:,} tokens to train on,"
        f" {len(held_out) if held_out else 0:,} tokens held out"
    )
    notes = [*skipped_input.notes(), *tokenizer.notes]
    if skipped := sum(header.bad_lines for header in headers):
        notes.append(f"{skipped:,} bad line(s) were skipped when the tokens were made")
    identity = {
        **identity_of(stream, headers),
        "documents": num_documents,
        "tokenizer": tokenizer.digest,
        "eos": tokenizer.eos,
        "held_out_by": by,
    }
    return Data(
        train=train,
        held_out=held_out,
        tokenizer=tokenizer,
        description=description,
        identity=identity,
        notes=tuple(notes),
    )


def identity_of(stream: TokenStream, headers: Sequence[TokenHeader]) -> DataIdentity:
    """Fingerprint of a stream, whatever its file paths: its length and digests of its tokens.

    Every token is hashed if the stream is in memory, or has at most CHECKED_TOKENS on disk. For a
    longer stream on disk, evenly spread blocks are hashed, together with the digests that
    `optimus tokenize` stored in the headers of its files (if all of them have one).
    """
    found: DataIdentity = {"tokens": len(stream), "content": content_digest(stream.tokens)}
    if len(stream) <= DIGEST_TOKENS:  # content_digest has hashed every token
        return found
    if not is_on_disk(stream) or len(stream) <= CHECKED_TOKENS:
        whole = WholeDigest()
        for _, tokens in chunks(stream.tokens):
            whole.update(tokens)
        found["every_token"] = whole.hexdigest()
    elif all(header.content for header in headers):
        text = " ".join(f"{header.num_tokens} {header.content}" for header in headers)
        found["files"] = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
    return found


def differences(before: Mapping[str, object], now: Mapping[str, object]) -> list[str]:
    """The names in two identities whose values differ.

    A name that only one of them has is ignored: it depends on the version and the kind of files.
    """
    shared = [name for name in before if name in now and name != "held_out_by"]
    return [name for name in shared if before[name] != now[name]]
