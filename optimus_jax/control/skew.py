"""Finds the processes that delay the others, and by how much.

In a step all processes wait for the slowest one, so step times are alike everywhere and do not show
which ones are slow. The time that a process itself needs follows from two times that it can measure
alone: w, its wait for data, and c, its time for a fixed piece of computing (live probes). Let f be
c over the median c, and B the compute time of a step at the median speed. The step lasts
T = max(w + f B) over all processes, so B = min((T - w) / f).
"""

import math
import statistics
from collections.abc import Sequence


def own_time_ratios(
    step_time_s: float, data_wait_s: Sequence[float], compute_s: Sequence[float]
) -> tuple[float, ...]:
    """The time that each process would need for a step if it did not wait for others, over that of
    the median one: 1 if all are alike; infinite if most do nothing but wait.

    Waiting for data counts like slow computing.

    Args:
      step_time_s: time of a step; positive.
      data_wait_s: how long each process waited for data.
      compute_s: time of each process for the same piece of computing; positive.
    """
    factors = [each / median(compute_s) for each in compute_s]
    shared_s = max(
        0.0,
        min(
            (step_time_s - wait) / factor for wait, factor in zip(data_wait_s, factors, strict=True)
        ),
    )
    own_s = [wait + factor * shared_s for wait, factor in zip(data_wait_s, factors, strict=True)]
    typical_s = median(own_s)
    return tuple([each / typical_s if typical_s else math.inf if each else 1.0 for each in own_s])


def median(values: Sequence[float]) -> float:
    """The lower median of an even number of values: of two processes, the slow one is compared with
    the fast one, not with the mean of both.
    """
    return statistics.median_low(values)
