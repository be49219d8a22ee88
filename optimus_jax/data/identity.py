"""What tells one data set from another, whatever its files are called."""

import hashlib
from collections.abc import Mapping, Sequence

from optimus_jax.data.digests import DIGEST_TOKENS, WholeDigest, content_digest
from optimus_jax.data.tokens import (
    CHECKED_TOKENS,
    TokenHeader,
    TokenStream,
    chunks,
    is_on_disk,
)

HELD_OUT_CONTENT = "held_out_content"
"""Name in an identity of the digest of held-out data with sources of its own."""
DataIdentity = dict[str, int | str]
"""Fingerprint of a data set, JSON values by name: see `identity_of` and `differences`."""


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
