"""Predicts step times under any plan: by the cost model, corrected by step times measured during
the run.

The corrections are the beliefs of planning/learning/beliefs.py. The first and the newest level of a
plan in the same conditions count: their difference shows a drift, which all plans have in common.
What earlier runs on the same hardware have learnt is read from a file.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from optimus_jax.control import constants
from optimus_jax.planning.cost.cost import NINE_IN_TEN
from optimus_jax.planning.learning.beliefs import Beliefs, Evidence, Query
from optimus_jax.planning.learning.calibrate import Calibration, Matrix, Vector

EARLIER = -1
"""The step of what an earlier run has measured."""


@dataclass(frozen=True, kw_only=True)
class ObservedStep(Evidence):
    """A measured step time."""

    step: int
    """The step after which it was last measured; negative: an earlier run measured it."""

    def at(self, step: int) -> Evidence:
        """The evidence as it counts at `step`."""
        return replace(self, steps_ago=float(step - max(0, self.step)))

    def as_json(self) -> dict[str, object]:
        """The evidence as JSON, with times in seconds."""
        return {
            "plan": self.query.plan,
            "setting": self.query.setting,
            "measured_s": math.exp(self.log_time),
            "deviation": self.deviation,
            "runs_ago": self.runs_ago,
            "terms_s": dict(self.query.terms_s),
        }


@dataclass(frozen=True)
class Forecast:
    """Predicted logarithms of the step times of some plans: moments of their joint distribution."""

    mean: Vector
    """Means, [plans]."""
    covariance: Matrix
    """Covariance, [plans, plans], of levels of step times, not of single steps."""

    def step_time_s(self, index: int) -> float:
        """Median step time of a plan, in seconds."""
        return float(np.exp(self.mean[index]))

    def interval_s(self, index: int) -> tuple[float, float]:
        """Bounds of the step time of a plan, with a probability of nine tenths."""
        margin = math.exp(NINE_IN_TEN * math.sqrt(self.covariance[index, index]))
        return self.step_time_s(index) / margin, self.step_time_s(index) * margin

    def ratio(self, index: int, other: int) -> tuple[float, float]:
        """Mean and deviation of the logarithm of (step time of `index` / that of `other`)."""
        variance = (
            self.covariance[index, index]
            + self.covariance[other, other]
            - 2 * self.covariance[index, other]
        )
        return float(self.mean[index] - self.mean[other]), math.sqrt(max(0.0, float(variance)))


class Predictor:
    """Learns from measured levels of step times, and predicts others.

    Args:
      calibration: corrections of the cost model's terms, from earlier measurements on these
        devices; None: there are none.
    """

    def __init__(self, calibration: Calibration | None = None) -> None:
        self._calibration = calibration or Calibration()
        self._evidence: dict[tuple[str, str, int], ObservedStep] = {}
        self._first: dict[tuple[str, str, int], ObservedStep] = {}
        """The first levels of this run, where there is a newer one."""
        self._set_aside: list[ObservedStep] = []
        """What earlier runs have learnt and this one does not use, but later ones may."""
        self._step = 0

    @property
    def evidence(self) -> tuple[ObservedStep, ...]:
        """All evidence that is kept."""
        return tuple(self._evidence.values())

    def learn(self, query: Query, *, log_time: float, noise: float, count: int, step: int) -> None:
        """Record a measured level of step times.

        It replaces earlier evidence of the same query, but for the first of this run. Values that
        make no sense are ignored.

        Args:
          query: the plan and conditions that were measured.
          log_time: logarithm of the level, in seconds.
          noise: robust deviation of the logarithm of a single step's time.
          count: number of steps that the level is based on.
          step: number of steps done.
        """
        if (
            count < 1
            or not math.isfinite(log_time)
            or not math.isfinite(noise)
            or not 0 < query.predicted_s < math.inf
        ):
            return
        if (before := self._evidence.pop(query.key, None)) and before.step >= 0:
            self._first.setdefault(query.key, before)
        self._evidence[query.key] = ObservedStep(
            query=query,
            log_time=log_time,
            deviation=max(noise, constants.MIN_LEARNT_NOISE) / math.sqrt(count),
            step=step,
        )
        while len(self._evidence) + len(self._first) > constants.MAX_EVIDENCE:
            earlier = (key for key, each in self._evidence.items() if each.step < 0)
            if (oldest := next(earlier, None)) is not None:
                self._set_aside.append(self._evidence.pop(oldest))
            else:
                kept = self._first or self._evidence
                kept.pop(next(iter(kept)))
        self._step = max(self._step, step)

    def forget_regime(self, regime: int) -> None:
        """Drop the evidence of a regime that is over, since its number is not used again."""
        self._evidence = {key: each for key, each in self._evidence.items() if key[2] != regime}
        self._first = {key: each for key, each in self._first.items() if key[2] != regime}

    def forget(self, query: Query) -> None:
        """Drop the evidence of `query`, which was recorded under the wrong conditions."""
        self._evidence.pop(query.key, None)
        self._first.pop(query.key, None)

    def forget_earlier_runs(self) -> None:
        """Use the calibration and the evidence of earlier runs no more.

        The hardware is not what their predictions assumed, so the ratios of measured to predicted
        times teach nothing now.
        """
        self._calibration = Calibration()
        self._set_aside += [each for each in self._evidence.values() if each.step < 0]
        self._evidence = {key: each for key, each in self._evidence.items() if each.step >= 0}

    def predict(self, queries: Sequence[Query], *, without: Query | None = None) -> Forecast:
        """Predict the step times of all queries jointly, without the evidence of one if it is
        given.
        """
        believed = self._believed(queries, without)
        return Forecast(believed.mean, believed.covariance)

    def calibration(self) -> Calibration:
        """The believed corrections of the cost model's terms, which a search multiplies them by."""
        return self._believed(()).calibration

    def _believed(self, queries: Sequence[Query], without: Query | None = None) -> Beliefs:
        known = (*self._evidence.values(), *self._first.values())
        evidence = [
            each.at(self._step)
            for each in known
            if without is None or each.query.key != without.key
        ]
        return Beliefs.given(evidence, self._calibration, queries)

    def learnt(self) -> list[dict[str, object]]:
        """The evidence as JSON, oldest first, except that of unexplained regimes."""
        newer = self._evidence.keys()
        kept = [each for each in self._set_aside if each.query.key not in newer]
        kept += [each for each in self._evidence.values() if not each.query.regime]
        return [each.as_json() for each in kept[-constants.MAX_EVIDENCE :]]

    def recall(self, value: Sequence[Mapping[str, object]]) -> None:
        """Take over what `learnt` has returned in an earlier run.

        Raises ValueError, TypeError, KeyError or AttributeError if it is damaged.
        """
        for each in [_evidence(item) for item in value][-constants.MAX_EVIDENCE :]:
            self._evidence.setdefault(each.query.key, each)


def _evidence(value: Mapping[str, object]) -> ObservedStep:
    """The inverse of `ObservedStep.as_json`. Raises ValueError, TypeError or KeyError."""
    terms, measured_s, deviation = value["terms_s"], value["measured_s"], value["deviation"]
    runs_ago = value.get("runs_ago", 0)  # older versions did not write it
    if (
        not isinstance(terms, Mapping)
        or not isinstance(measured_s, float)
        or not isinstance(deviation, float)
        or not isinstance(runs_ago, int)
    ):
        raise TypeError("terms_s, measured_s, deviation and runs_ago are numbers")
    terms_s = {str(name): float(time_s) for name, time_s in terms.items()}
    times = (measured_s, deviation, sum(terms_s.values()))
    if (
        not all(math.isfinite(number) and number > 0 for number in times)
        or min(terms_s.values()) < 0
        or runs_ago < 0
    ):
        raise ValueError("times are finite and above 0, and no run is yet to come")
    query = Query(plan=str(value["plan"]), setting=str(value["setting"]), terms_s=terms_s)
    return ObservedStep(
        query=query,
        log_time=math.log(measured_s),
        deviation=max(deviation, constants.EARLIER_RUN_PLAN_LOG_STD),
        runs_ago=runs_ago + 1,
        step=EARLIER,
    )
