"""Statistics that a few outliers do not move."""

from collections.abc import Iterable

MAD_TO_DEVIATION = 1.4826
"""Standard deviation of a normal distribution over its median absolute deviation: 1 /
Phi^-1(3/4)."""


def median_of_sorted(ordered: list[float]) -> float:
    """Median of a non-empty list that is sorted in ascending order."""
    # statistics.median sorts again and takes four times as long; this runs for every signal in
    # every step.
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else 0.5 * (ordered[middle - 1] + ordered[middle])


def deviation_from(center: float, samples: Iterable[float]) -> float:
    """Robust standard deviation of one or more samples around `center`, usually their
    median.
    """
    return MAD_TO_DEVIATION * median_of_sorted(sorted([abs(sample - center) for sample in samples]))
