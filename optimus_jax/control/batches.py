"""What the examples of a batch look like: how much of it is padding, how long its documents are.

The batches of this process are looked at, at most one each second and of it at most MAX_TOKENS:
examples are in random order, so that its first rows stand for all.
"""

from collections.abc import Mapping

import numpy as np

from optimus_jax.control.signals import LENGTH_MEDIAN, PADDING_SHARE

MAX_TOKENS = 1 << 16
"""Looked at of a batch; takes about a millisecond."""
HostBatch = Mapping[str, np.ndarray]
"""`segments` int32 and `loss_mask` bool, [R, S] each, as data/sampler.py makes them."""


class BatchShape:
    """Padding and lengths of the batch that was offered last."""

    name = "the batches"
    signals = (PADDING_SHARE, LENGTH_MEDIAN)

    def __init__(self) -> None:
        self._batch: HostBatch | None = None
        self.histogram: dict[int, int] = {}
        """Parts of documents by length: the key is a power of two, the number those of at least so
        many tokens and less than twice that."""

    def offer(self, batch: HostBatch) -> None:
        """The newest batch, for when it is looked at next."""
        self._batch = batch

    def poll(self, step: int, now_s: float) -> Mapping[str, float] | None:
        """Of the newest batch; None if there is none."""
        if self._batch is None:
            return None
        batch, self._batch = self._batch, None
        num_rows = max(1, MAX_TOKENS // batch["segments"].shape[1])
        segments, counts = batch["segments"][:num_rows], batch["loss_mask"][:num_rows]
        lengths = document_lengths(segments)
        powers, numbers = np.unique(np.floor(np.log2(lengths)).astype(int), return_counts=True)
        self.histogram = {
            2 ** int(power): int(number) for power, number in zip(powers, numbers, strict=True)
        }
        return {
            PADDING_SHARE: padding_share(segments, counts),
            LENGTH_MEDIAN: float(np.median(lengths)),
        }

    def close(self) -> None:
        """Nothing to let go."""


def document_lengths(segments: np.ndarray) -> np.ndarray:
    """Tokens of each document's part in a row, row by row; int [N] of int [R, S].

    A padded end counts to the last one.
    """
    starts = np.flatnonzero(_begins(segments))
    return np.diff(starts, append=segments.size)


def padding_share(segments: np.ndarray, counts: np.ndarray) -> float:
    """Places of a batch whose loss does not count, without those that end a document: they are
    needed as targets.

    Args:
      segments: int [R, S], number of the place's document.
      counts: bool [R, S], whether its loss counts.
    """
    begins = _begins(segments)
    last = np.ones_like(begins)
    last[:, :-1] = begins[:, 1:]
    # The end of a document is the first of its places that does not count; padding begins behind
    # it.
    after_counting = np.zeros_like(counts)
    after_counting[:, 1:] = counts[:, :-1]
    ends = last & (after_counting | begins)
    return float(np.count_nonzero(~counts & ~ends) / counts.size)


def _begins(segments: np.ndarray) -> np.ndarray:
    begins = np.ones(segments.shape, bool)
    begins[:, 1:] = segments[:, 1:] != segments[:, :-1]
    return begins
