"""Which process holds up the others, and by how much.

In a step that all processes do together each waits for the slowest, so that step times are alike
everywhere and tell nothing. What a process needs for itself is told by two things that it can
measure alone: w, how long it waited for its data, and c, how long it takes for a piece of computing
that all do (live probes). With f = c over the median c, the step lasts T = max(w + f B), where B is
what a process at the median speed computes: so B = min((T - w) / f).
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Skew:
    """Of the processes of a run."""

    own_s: tuple[float, ...]
    """What each would need for a step if it waited for no other."""
    slowest: int
    """Number of the process that needs most."""

    @property
    def ratio(self) -> float:
        """The slowest one's over the median: 1 if all are alike; infinite if the others have
        nothing to do but wait.
        """
        typical = median(self.own_s)
        return self.own_s[self.slowest] / typical if typical else math.inf


def skew_of(step_time_s: float, data_wait_s: Sequence[float], compute_s: Sequence[float]) -> Skew:
    """From what the processes measured.

    Args:
      step_time_s: of a step, positive.
      data_wait_s: of each process.
      compute_s: of each process, for the same piece of computing; positive.
    """
    factors = [each / median(compute_s) for each in compute_s]
    shared_s = max(
        0.0,
        min(
            (step_time_s - wait) / factor for wait, factor in zip(data_wait_s, factors, strict=True)
        ),
    )
    own_s = tuple(
        wait + factor * shared_s for wait, factor in zip(data_wait_s, factors, strict=True)
    )
    return Skew(own_s=own_s, slowest=max(range(len(own_s)), key=own_s.__getitem__))


def median(values: Sequence[float]) -> float:
    """The lower one of an even number: of two processes the slow one is compared with the fast one,
    not with half of itself.
    """
    return statistics.median_low(values)
