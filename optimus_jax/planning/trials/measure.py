"""Trying the best candidates before a run: which of them, whether that pays, and which is kept.

A prediction has an interval. Candidates whose intervals overlap with the best one's cannot be told
apart by predicting; running each for a few steps can, and costs compiling and steps. What trying is
worth is predicted from the spread of predictions: the expected time that the fastest of several
takes less than the one predicted to be fastest, for all steps of the run. Only the part of the
spread that differs between plans counts, for what is wrong with all of them alike changes no order.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from optimus_jax.errors import PlanError, explain
from optimus_jax.plan import Plan
from optimus_jax.planning.search.search import Candidate
from optimus_jax.planning.trials.trial import WARM_UP, Trial

TRIAL_STEPS = 3
"""Timed for each candidate."""
OWN_SHARE = 0.5
"""Of a prediction's spread, what is its own and not all plans' alike: assumed, not measured."""
_DRAWS = 4000
"""Of the errors, for the expected gain; from a fixed seed."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The outcome of trying candidates."""

    plan: Plan
    """The fastest."""
    trials: tuple[Trial, ...]
    """In the order of the ranking; fewer than two: trying more did not pay, or all others
    failed."""
    why: str


def measure(
    ranked: Sequence[Candidate],
    run: Callable[[Plan], Trial],
    *,
    num_steps: int,
    most: int,
    spread: float,
) -> Measured:
    """Try up to `most` candidates, as long as that is expected to save time over `num_steps` steps,
    and keep the fastest.

    Args:
      ranked: best prediction first.
      run: tries one plan; a PlanError of it means that it does not fit.
      num_steps: the run has before it.
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
        return Measured(
            plan=ranked[0].plan,
            trials=(),
            why=(
                "no other candidate is within the prediction's interval"
                if most > 1
                else "one candidate was asked for"
            ),
        )
    first_s, *others_s = [candidate.prediction.step_time_s for candidate in close]
    gain_s, cost_s = (
        num_steps * expected_gain(first_s, others_s, OWN_SHARE * spread),
        _steps_s(first_s + sum(others_s)),
    )
    if gain_s < cost_s:
        return Measured(
            plan=close[0].plan,
            trials=(),
            why=(
                f"trying {len(close)} would take more than {cost_s:.1f} s and is expected to save"
                f" {gain_s:.1f} s"
            ),
        )
    tried: list[tuple[float, Trial]] = []
    for candidate in within:  # one that does not fit is none of those tried
        if len(tried) == most:
            break
        predicted_s = candidate.prediction.step_time_s
        if tried:
            # What was measured says how far off all predictions are; the next is expected to be off
            # likewise.
            expected_s = predicted_s * float(
                np.exp(np.mean([np.log(trial.step_time_s / each_s) for each_s, trial in tried]))
            )
            best_s = min(trial.step_time_s for _, trial in tried)
            gain_s = num_steps * expected_gain(best_s, [expected_s], OWN_SHARE * spread)
            cost_s = tried[0][1].compile_s + _steps_s(expected_s)
            if gain_s < cost_s:
                return _kept(
                    tried,
                    f"trying another would take about {cost_s:.1f} s and is expected to save"
                    f" {gain_s:.1f} s",
                )
        with suppress(PlanError):
            tried.append((predicted_s, run(candidate.plan)))
    if not tried:
        raise PlanError(
            explain(
                "none of the planner's best plans fits",
                given=f"{len(within)} plans, compiled for these devices",
                do="use --remat full, more --microbatches, more devices, or a smaller --model",
            )
        )
    return _kept(tried, f"the fastest of {len(tried)} that were tried")


def expected_gain(best_s: float, others_s: Sequence[float], spread: float) -> float:
    """Seconds of a step that the fastest of all is expected to take less than `best_s`.

    Args:
      best_s: the time of a candidate that would be taken otherwise.
      others_s: predicted times of others, each off by a factor whose logarithm is normal with
        deviation `spread`.
    """
    errors = np.random.default_rng(0).normal(0.0, spread, (_DRAWS, len(others_s)))
    fastest = (np.asarray(others_s) * np.exp(errors)).min(axis=1)
    return float(np.maximum(best_s - fastest, 0.0).mean())


def _steps_s(step_time_s: float) -> float:
    return (TRIAL_STEPS + WARM_UP) * step_time_s


def _kept(tried: Sequence[tuple[float, Trial]], why: str) -> Measured:
    trials = tuple(trial for _, trial in tried)
    return Measured(
        plan=min(trials, key=lambda trial: trial.step_time_s).plan, trials=trials, why=why
    )
