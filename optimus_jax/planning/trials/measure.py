"""Time the best candidates before a run, if the expected gain exceeds the cost.

Candidates whose prediction intervals overlap with the best one's cannot be ranked by prediction.
Running each for a few steps ranks them, but costs the time to compile and run them. The expected
gain is the time by which the fastest candidate is expected to beat the one predicted to be fastest,
over all steps of the run. It is computed from the spread of the predictions. Only the part of the
spread that differs between plans counts, since an error common to all plans does not change their
order.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from optimus_jax.errors import PlanError, explain
from optimus_jax.plan import Plan
from optimus_jax.planning.search.search import Candidate
from optimus_jax.planning.trials.trial import WARM_UP, PlanTrial

TRIAL_STEPS = 3
"""Timed steps per candidate."""
OWN_SHARE = 0.5
"""Share of a prediction's spread that differs between plans: assumed, not measured."""
_DRAWS = 4000
"""Monte Carlo samples for the expected gain, drawn with a fixed seed."""


@dataclass(frozen=True, kw_only=True)
class TrialsResult:
    """The result of timing candidates."""

    plan: Plan
    """The fastest plan."""
    trials: tuple[PlanTrial, ...]
    """The trials, in ranking order; fewer than two if more would cost more than they gain, or the
    others failed."""
    why: str


def measure(
    ranked: Sequence[Candidate],
    run: Callable[[Plan], PlanTrial],
    *,
    num_steps: int,
    most: int,
    spread: float,
) -> TrialsResult:
    """Try up to `most` candidates while that is expected to save time, and return the fastest.

    Args:
      ranked: the candidates, best prediction first.
      run: tries one plan; raises PlanError if the plan does not fit.
      num_steps: steps that the run has left.
      spread: standard deviation of the logarithm of measured over predicted times.
    Raises:
      PlanError: candidates were tried, and none of them could run.
    """
    within = [
        candidate
        for candidate in ranked
        if candidate.prediction.low_s < ranked[0].prediction.high_s
    ]
    close = within[:most]
    if len(close) < 2:
        return TrialsResult(
            plan=ranked[0].plan,
            trials=(),
            why=(
                "no other candidate is within the prediction's interval"
                if most > 1
                else "one candidate was requested"
            ),
        )
    first_s, *others_s = [candidate.prediction.step_time_s for candidate in close]
    gain_s, cost_s = (
        num_steps * expected_gain(first_s, others_s, OWN_SHARE * spread),
        _steps_s(first_s + sum(others_s)),
    )
    if gain_s < cost_s:
        return TrialsResult(
            plan=close[0].plan,
            trials=(),
            why=(
                f"trying {len(close)} would take more than {cost_s:.1f} s and is expected to save"
                f" {gain_s:.1f} s"
            ),
        )
    trials_so_far: list[tuple[float, PlanTrial]] = []
    for candidate in within:  # candidates that do not fit do not count towards `most`
        if len(trials_so_far) == most:
            break
        predicted_s = candidate.prediction.step_time_s
        if trials_so_far:
            # Scale the next prediction by the mean error of the candidates measured so far.
            expected_s = predicted_s * float(
                np.exp(
                    np.mean([np.log(trial.step_time_s / each_s) for each_s, trial in trials_so_far])
                )
            )
            best_s = min(trial.step_time_s for _, trial in trials_so_far)
            gain_s = num_steps * expected_gain(best_s, [expected_s], OWN_SHARE * spread)
            cost_s = trials_so_far[0][1].compile_s + _steps_s(expected_s)
            if gain_s < cost_s:
                return _fastest(
                    trials_so_far,
                    f"trying another would take about {cost_s:.1f} s and is expected to save"
                    f" {gain_s:.1f} s",
                )
        with suppress(PlanError):
            trials_so_far.append((predicted_s, run(candidate.plan)))
    if not trials_so_far:
        raise PlanError(
            explain(
                "none of the planner's best plans fits",
                given=f"{len(within)} plans, compiled for these devices",
                do="use --remat full, more --microbatches, more devices, or a smaller --model",
            )
        )
    return _fastest(trials_so_far, f"the fastest of {len(trials_so_far)} that were tried")


def expected_gain(best_s: float, others_s: Sequence[float], spread: float) -> float:
    """Expected seconds per step by which the fastest of the others beats `best_s`, at least 0.

    Args:
      best_s: step time of the candidate that would be used otherwise.
      others_s: predicted step times of the others, with log-normal errors of deviation `spread`.
    """
    errors = np.random.default_rng(0).normal(0.0, spread, (_DRAWS, len(others_s)))
    fastest = (np.asarray(others_s) * np.exp(errors)).min(axis=1)
    return float(np.maximum(best_s - fastest, 0.0).mean())


def _steps_s(step_time_s: float) -> float:
    return (TRIAL_STEPS + WARM_UP) * step_time_s


def _fastest(trials_so_far: Sequence[tuple[float, PlanTrial]], why: str) -> TrialsResult:
    trials = tuple(trial for _, trial in trials_so_far)
    return TrialsResult(
        plan=min(trials, key=lambda trial: trial.step_time_s).plan, trials=trials, why=why
    )
