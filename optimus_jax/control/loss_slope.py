"""How fast the loss falls: Theil's slope, which a few spikes do not move.

Each loss of the window's first half is paired with the one half a window later (the incomplete
method of Theil 1950, "A rank-invariant method of linear and polynomial regression analysis", part
I): each pair's slope is a sample.
"""

import math
from collections import deque

from optimus_jax.control.signals import UNKNOWN, SignalSummary, summary

_MIN_PAIRS = 3


class LossSlope:
    """Change of the loss per step; negative while it falls.

    Args:
      size: steps that it looks back on.
    """

    def __init__(self, size: int) -> None:
        self._losses: deque[tuple[int, float]] = deque(maxlen=2 * max(_MIN_PAIRS, size // 2))
        self._time_s = 0.0

    def add(self, step: int, loss: float, time_s: float) -> None:
        """The loss of a step; one that is not finite says nothing.

        If the run went back, so does this.
        """
        if self._losses and step <= self._losses[-1][0]:
            self._losses.clear()
        if math.isfinite(loss):
            self._losses.append((step, loss))
            self._time_s = time_s

    def clear(self) -> None:
        """Forget all: other batches, other losses."""
        self._losses.clear()

    def reading(self) -> SignalSummary:
        """Its count is the number of pairs, its spread that of their slopes."""
        losses = list(self._losses)
        half = len(losses) // 2
        if half < _MIN_PAIRS:
            return UNKNOWN
        slopes = [
            (late - early) / (step - before)
            for (before, early), (step, late) in zip(losses[:half], losses[-half:], strict=True)
        ]
        return summary(slopes, self._time_s, "good")
