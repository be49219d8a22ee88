"""Measures the data of a batch: how much of it is padding, and how long its documents are.

Only some of this process's batches are measured, and of a batch at most MAX_TOKENS: examples are in
random order, so its first rows are a fair sample.
"""

from collections.abc import Mapping

import numpy as np

from optimus_jax.control.signals import LENGTH_MEDIAN, PADDING_SHARE
from optimus_jax.data.batch import HostBatch

MAX_TOKENS = 1 << 16
"""Largest number of tokens measured in a batch; they take about a millisecond."""


class BatchStatistics:
    """A source of signals: padding share and document lengths of the newest batch."""

    name = "the batches"
    signals = (PADDING_SHARE, LENGTH_MEDIAN)

    def __init__(self) -> None:
        self._batch: HostBatch | None = None
        self.histogram: dict[int, int] = {}
        """Number of document parts by length in tokens: key n, a power of two, counts the parts of
        n to 2n - 1 tokens."""

    def offer(self, batch: HostBatch) -> None:
        """Keep the newest batch for the next poll."""
        self._batch = batch

    def poll(self, step: int, now_s: float) -> Mapping[str, float] | None:
        """Samples of the newest batch; None: there is no new one."""
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
        """Do nothing: it holds no resources."""


def document_lengths(segments: np.ndarray) -> np.ndarray:
    """Number of tokens of each part of a document in a row, row by row: int [R, S] -> int [N].

    Padding at the end of a row counts towards its last document.
    """
    starts = np.flatnonzero(_begins(segments))
    return np.diff(starts, append=segments.size)


def padding_share(segments: np.ndarray, counts: np.ndarray) -> float:
    """Share of the batch's positions that are padding: no target of their document counts from
    there on, and they do not end a document. (The last token of a document is needed as a target;
    what a user says is no padding, if an answer that counts follows it.)

    Args:
      segments: int [R, S], number of the document at each position.
      counts: bool [R, S], whether the loss of the position counts.
    """
    begins = _begins(segments)
    last = np.ones_like(begins)
    last[:, :-1] = begins[:, 1:]
    # The end of a document is the first of its positions that does not count; padding follows it.
    after_counting = np.zeros_like(counts)
    after_counting[:, 1:] = counts[:, :-1]
    ends = last & (after_counting | begins)
    document = np.cumsum(begins.ravel())
    last_counting = np.zeros(document[-1] + 1, int)
    places = np.flatnonzero(counts)
    np.maximum.at(last_counting, document[places], places + 1)
    is_over = np.arange(counts.size) >= last_counting[document]
    return float(np.count_nonzero(is_over.reshape(counts.shape) & ~ends) / counts.size)


def _begins(segments: np.ndarray) -> np.ndarray:
    begins = np.ones(segments.shape, bool)
    begins[:, 1:] = segments[:, 1:] != segments[:, :-1]
    return begins
