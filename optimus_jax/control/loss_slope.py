"""How fast the loss falls: Theil's slope, which is robust against a few spikes.

Each loss of the window's first half is paired with the one half a window later, and each pair's
slope is a sample. (This is the incomplete method of Theil 1950, "A rank-invariant method of linear
and polynomial regression analysis", part I.)
"""

import math
from collections import deque

from optimus_jax.control.signals import UNKNOWN, SignalSummary, summary

_MIN_PAIRS = 3


class LossSlope:
    """Change of the loss per step; negative while it falls.

    Args:
      size: length of its window, in steps.
    """

    def __init__(self, size: int) -> None:
        self._losses: deque[tuple[int, float]] = deque(maxlen=2 * max(_MIN_PAIRS, size // 2))
        self._time_s = 0.0

    def add(self, step: int, loss: float, time_s: float) -> None:
        """Add the loss of a step; one that is not finite is ignored.

        If the run has gone back to an earlier step, all older losses are forgotten.
        """
        if self._losses and step <= self._losses[-1][0]:
            self._losses.clear()
        if math.isfinite(loss):
            self._losses.append((step, loss))
            self._time_s = time_s

    def clear(self) -> None:
        """Forget all losses, when the batches change."""
        self._losses.clear()

    def reading(self) -> SignalSummary:
        """Summary of the slopes: its count is the number of pairs."""
        losses = list(self._losses)
        half = len(losses) // 2
        if half < _MIN_PAIRS:
            return UNKNOWN
        slopes = [
            (late - early) / (step - before)
            for (before, early), (step, late) in zip(losses[:half], losses[-half:], strict=True)
        ]
        return summary(slopes, self._time_s, "good")
