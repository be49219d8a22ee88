"""Digests of token arrays."""

import hashlib

import numpy as np

from optimus_jax.data.joined import JoinedTokens

DIGEST_TOKENS = 1 << 26
"""Tokens of which every one counts in `content_digest`; a tenth of a second."""
_DIGEST_BLOCKS = 256
"""Blocks that stand for the others in a digest of more tokens."""


def content_digest(tokens: np.ndarray | JoinedTokens) -> str:
    """Sixteen hex digits that differ if the tokens do, as far as they are looked at.

    Of more than DIGEST_TOKENS they are those of evenly spread blocks, first and last included;
    what lies between is `WholeDigest`'s. Runs know their data by these digits, so they stay as they
    are.
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
    """Sixteen hex digits of every token of a stream that comes in parts; about 1 GB/s."""

    def __init__(self) -> None:
        self._digest = hashlib.blake2b(digest_size=8)

    def update(self, tokens: np.ndarray) -> None:
        """Add the next tokens."""
        self._digest.update(np.ascontiguousarray(tokens).data)

    def hexdigest(self) -> str:
        return self._digest.hexdigest()
