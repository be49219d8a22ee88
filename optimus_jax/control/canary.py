"""Judges the first steps under a new plan: whether it is kept or taken back."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from optimus_jax.control import constants
from optimus_jax.robust import deviation_from

MEDIAN_ERROR = math.sqrt(math.pi / 2)
"""Ratio of the standard error of a median to that of a mean, for normal samples."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The verdict on a new plan after its first steps."""

    keep: bool
    why: str
    """The reason, in one sentence."""


def judge(
    step_times_s: Sequence[float],
    *,
    num_waited: int = 0,
    losses: Sequence[float],
    before_s: Sequence[float],
    predicted_s: float,
    steps_left: int,
    back_s: float,
    mandatory: bool = False,
) -> Verdict:
    """Judge a new plan by its first steps.

    It is kept unless its loss is not finite, or it is slower than the old plan by more than noise
    and going back saves more time than it costs. It is kept in any case if the run could not keep
    the old plan.

    The first step is ignored if there are others: it maps buffers and fills caches. A wrong
    prediction is reported, but is no reason to leave a plan that is faster than the old one.

    Args:
      step_times_s: times of the steps since the switch, in seconds, without those that waited for
        their data.
      num_waited: number of those that did.
      losses: losses of the same steps.
      before_s: times of steps under the old plan in present conditions; empty: there are none, or
        the run had to leave the old plan and may be slower now.
      predicted_s: predicted step time of the new plan.
      steps_left: number of steps that the run has left.
      back_s: delay of the run by going back, in seconds.
      mandatory: whether the run could not keep the old plan.
    """
    times_s = step_times_s[1:] if len(step_times_s) > 1 else step_times_s
    old_s = statistics.median(before_s) if before_s else None
    new_s = statistics.median(times_s) if times_s else None

    if not all(map(math.isfinite, losses)):
        why = "the loss is not finite"
        return Verdict(
            keep=mandatory, why=f"{why}, but the plan before cannot be used" if mandatory else why
        )
    if num_waited and len(step_times_s) <= constants.NUM_COMPARED_STEPS:
        return Verdict(keep=True, why="steps wait for data, so its own step time is unknown")
    if new_s is None:
        return Verdict(keep=True, why="no step was timed")
    if old_s is None:
        return Verdict(
            keep=True,
            why=f"{new_s:.3g} s per step, {predicted_s:.3g} s predicted; nothing to compare with",
        )
    told = f"{new_s:.3g} s per step, {predicted_s:.3g} s predicted, {old_s:.3g} s before"
    noise_s = constants.CANARY_NOISE * math.hypot(_error_s(times_s), _error_s(before_s))
    lost_s = (new_s - old_s) * steps_left
    if new_s - old_s <= noise_s:
        return Verdict(keep=True, why=told)
    if lost_s <= back_s:
        return Verdict(
            keep=True, why=f"{told}; going back would take {back_s:.3g} s and save {lost_s:.3g} s"
        )
    return Verdict(keep=False, why=told)


def has_lost(step_times_s: Sequence[float], *, before_s: Sequence[float], back_s: float) -> bool:
    """Whether the plan on trial is far slower, and has lost as much time as going back costs before
    the trial is over. One slow step is not enough.

    Args:
      step_times_s, before_s, back_s: as in `judge`.
    """
    times_s = step_times_s[1:]
    if len(times_s) < constants.NUM_COMPARED_STEPS or not before_s:
        return False
    new_s, old_s = statistics.median(times_s), statistics.median(before_s)
    return new_s > constants.STEADY_FACTOR * old_s and len(times_s) * (new_s - old_s) > back_s


def _error_s(times_s: Sequence[float]) -> float:
    """Standard error of the median of the sample; 0 if the sample is a single step."""
    middle = statistics.median(times_s)
    return MEDIAN_ERROR * deviation_from(middle, times_s) / math.sqrt(len(times_s))
