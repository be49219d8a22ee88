"""Digests of token arrays."""

import hashlib

import numpy as np

from optimus_jax.data.joined import JoinedTokens

DIGEST_TOKENS = 1 << 26
"""Longest array, in tokens, that `content_digest` hashes completely; takes a tenth of a second."""
_DIGEST_BLOCKS = 256
"""Number of blocks that are hashed in a longer array."""


def content_digest(tokens: np.ndarray | JoinedTokens) -> str:
    """Sixteen hex digits that differ if the hashed tokens differ.

    Arrays longer than DIGEST_TOKENS are hashed in evenly spread blocks, the first and the last
    tokens included; `WholeDigest` covers what lies between. Runs recognise their data by this
    digest, so its definition must not change.
    """
    digest = hashlib.blake2b(str(len(tokens)).encode(), digest_size=8)
    if len(tokens) <= DIGEST_TOKENS:
        starts, size = [0], len(tokens)
    else:
        size = DIGEST_TOKENS // _DIGEST_BLOCKS
        starts = [
            block * (len(tokens) - size) // (_DIGEST_BLOCKS - 1) for block in range(_DIGEST_BLOCKS)
        ]
    for start in starts:
        digest.update(np.ascontiguousarray(tokens[start : start + size]).data)
    return digest.hexdigest()


class WholeDigest:
    """Digest (sixteen hex digits) over every token of a stream given in parts; about 1 GB/s."""

    def __init__(self) -> None:
        self._digest = hashlib.blake2b(digest_size=8)

    def update(self, tokens: np.ndarray) -> None:
        """Add the next tokens."""
        self._digest.update(np.ascontiguousarray(tokens).data)

    def hexdigest(self) -> str:
        return self._digest.hexdigest()
