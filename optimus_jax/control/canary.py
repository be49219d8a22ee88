"""The first steps under a new plan: whether it is kept or taken back."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from optimus_jax.robust import deviation_from

NOISE = 2.0
"""Standard errors by which two medians may differ by luck."""
CLEARLY, CLEAR_STEPS = 1.5, 2
"""If so many steps are each longer than the longest before by this factor, nobody has to see more
of them."""
MEDIAN_ERROR = math.sqrt(math.pi / 2)
"""Standard error of a median over that of a mean, in normal samples."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What the first steps say."""

    keep: bool
    why: str
    """One sentence for people."""
    step_time_s: float | None
    """Median under the new plan, measured; None: no step was timed."""
    before_s: float | None
    """Median under the old one, measured; None: there is nothing to compare with."""
    predicted_s: float
    """Under the new plan, predicted."""


def is_clearly_slower(step_times_s: Sequence[float], before_s: Sequence[float]) -> bool:
    """Whether the first steps are so slow that the rest of the trial would only cost time.

    Arguments as for `judge`.
    """
    times_s = step_times_s[1:]
    return bool(before_s) and len(times_s) >= CLEAR_STEPS and min(times_s) > CLEARLY * max(before_s)


def judge(
    step_times_s: Sequence[float],
    *,
    losses: Sequence[float],
    before_s: Sequence[float],
    predicted_s: float,
    steps_left: int,
    back_s: float,
) -> Verdict:
    """Keep the new plan unless it is slower than the old by more than noise and going back pays, or
    it does not train.

    The first step is left out where there are others: buffers are mapped and caches filled in it. A
    prediction that was missed is told, and is no reason to go back from a plan that is faster.

    Args:
      step_times_s: of the steps since the switch.
      losses: of the same steps.
      before_s: times of steps under the old plan, under conditions as they are now; empty: there
        are none, or the run had to leave it and may be slower.
      predicted_s: prediction for the new plan.
      steps_left: of the run.
      back_s: delay of the run by going back.
    """
    times_s = step_times_s[1:] if len(step_times_s) > 1 else step_times_s
    old_s = statistics.median(before_s) if before_s else None
    new_s = statistics.median(times_s) if times_s else None

    def verdict(keep: bool, why: str) -> Verdict:
        return Verdict(
            keep=keep, why=why, step_time_s=new_s, before_s=old_s, predicted_s=predicted_s
        )

    if not all(map(math.isfinite, losses)):
        return verdict(False, "the loss is not finite")
    if new_s is None:
        return verdict(True, "no step was timed")
    if old_s is None:
        return verdict(
            True,
            f"{new_s:.3g} s per step, {predicted_s:.3g} s predicted; before is not to be compared",
        )
    told = f"{new_s:.3g} s per step, {predicted_s:.3g} s predicted, {old_s:.3g} s before"
    noise_s = NOISE * math.hypot(_error_s(times_s), _error_s(before_s))
    lost_s = (new_s - old_s) * steps_left
    if new_s - old_s <= noise_s:
        return verdict(True, told)
    if lost_s <= back_s:
        return verdict(
            True, f"{told}; going back would take {back_s:.3g} s and save {lost_s:.3g} s"
        )
    return verdict(False, told)


def _error_s(times_s: Sequence[float]) -> float:
    """Standard error of the median of a sample; 0 where one step says nothing about it."""
    middle = statistics.median(times_s)
    return MEDIAN_ERROR * deviation_from(middle, times_s) / math.sqrt(len(times_s))
