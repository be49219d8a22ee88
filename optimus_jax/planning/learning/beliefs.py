"""Bayesian regression of step times: predictions of the cost model, corrected by measurements.

The logarithm of measured over predicted time is a sum of errors: each cost term's share of the step
times that term's log error (planning/learning/calibrate.py), an error of the plan, an error of the
plan in given conditions, and an error that an unexplained regime causes in all plans. (An
*unexplained regime* is a period that begins when step times change without a reading that explains
the change.) Step times of any set of plans are compared by their joint distribution, because common
errors cancel.

How large the errors are is not known: the cost model fits some machines better than others. So the
regression is done under many hypotheses (planning/learning/sizes.py), in each of which all errors
are normally distributed. The evidence weights the hypotheses, and predictions are averages over
them.

Corrections change the terms' shares of the step, so the regression is iterated. Outliers are
attributed to an error of their plan.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from optimus_jax.planning.cost.cost import COMMUNICATION
from optimus_jax.planning.learning.calibrate import Calibration, Matrix, Vector
from optimus_jax.planning.learning.sizes import Sizes

SAME_PLAN = 0.7
"""Correlation of a plan's own error in two conditions or with two batches."""
LINK_NOISE = 0.12
"""Error common to all links in given conditions, because their speeds are measured roughly; a
standard deviation of the logarithm. The next two are too."""
REGIME = 0.5
"""Error that an unexplained regime causes in all plans."""
REGIME_PLAN = 0.15
"""Additional error that a regime causes in a single plan."""
ANOTHER_RUN = 0.1
"""Error that all step times of an earlier run have in common, since neighbours, driver or room
temperature differed."""
DRIFT = 0.01
"""Change common to all step times of a run in 1,000 steps: a random walk, as devices, links and
neighbours change slowly. Chosen in simulation (decision 32)."""
OUTLIER_DEVIATIONS = 4.0
"""A measurement counts as an outlier if it is more than this many standard deviations from the
prediction based on the others."""
NUM_ITERATIONS = 4
"""Iterations of the regression; more make no relevant difference."""


@dataclass(frozen=True, kw_only=True)
class Query:
    """A plan in given conditions."""

    plan: str
    """Digest of the plan."""
    setting: str
    """Name of the conditions and the batch."""
    regime: int = 0
    """Number of the unexplained regime in which the plan runs; 0: none."""
    terms_s: Mapping[str, float]
    """Seconds of each term that the cost model predicts in these conditions, without
    corrections."""

    @property
    def key(self) -> tuple[str, str, int]:
        """Identifies the query."""
        return self.plan, self.setting, self.regime

    @property
    def predicted_s(self) -> float:
        """Seconds of a step that the cost model predicts, without corrections."""
        return sum(self.terms_s.values())


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """Measured step time of a plan in given conditions."""

    query: Query
    log_time: float
    """Logarithm of the measured seconds."""
    deviation: float
    """Standard deviation of `log_time`."""
    runs_ago: int = 0
    """0: this run measured it; 1: the run before on the same hardware."""
    steps_ago: float = 0.0
    """Number of steps of this run since it was measured."""


@dataclass(frozen=True)
class Beliefs:
    """What evidence says of the cost model's errors and of the step times of some queries."""

    calibration: Calibration
    """The terms' errors."""
    sizes: Sizes
    """How large errors are."""
    mean: Vector
    """[queries]: expected logarithms of step times in seconds."""
    covariance: Matrix
    """[queries, queries]: their covariance."""

    @classmethod
    def given(
        cls,
        evidence: Sequence[Evidence],
        prior: Calibration,
        queries: Sequence[Query] = (),
    ) -> "Beliefs":
        """The beliefs given the evidence.

        Args:
          evidence: what was measured.
          prior: what is known of the terms besides.
          queries: what to predict.
        """
        asked = [*(each.query for each in evidence), *queries]
        prior = prior.covering(name for query in asked for name in query.terms_s)
        measured = np.array([each.log_time for each in evidence])
        runs_ago = [each.runs_ago for each in evidence]
        steps_ago = np.array([each.steps_ago for each in evidence])
        is_earlier = np.array(runs_ago, dtype=int) > 0
        noise = (
            np.diag([each.deviation**2 for each in evidence])
            + ANOTHER_RUN**2 * _same(runs_ago) * is_earlier
            + DRIFT**2 / 1000 * np.minimum.outer(steps_ago, steps_ago)
        )
        step_times = _LogTimes.of(asked, len(evidence), prior, Sizes.unknown())
        for _ in range(NUM_ITERATIONS if evidence else 1):
            fit = _Fit.of(step_times, measured, noise)
            step_times = replace(step_times, point=fit.calibration.mean, doubt=fit.doubt)
        return cls(fit.calibration, fit.sizes, *fit.predicted())


@dataclass(frozen=True)
class _LogTimes:
    """Logarithms of the step times of all queries before the evidence, by hypothesis.

    The first queries are those of the evidence.
    """

    num_seen: int
    """Number of queries of the evidence."""
    prior: Calibration
    sizes: Sizes
    terms_s: Matrix
    """[queries, terms]: predicted seconds of each term."""
    own: Matrix
    """[queries, queries]: correlation of the plans' own errors."""
    conditions: Matrix
    """[queries, queries]: 1 for the same conditions."""
    regime: Matrix
    """[queries, queries]: covariance by unexplained regimes."""
    doubtful: Matrix
    """[queries, evidence]: 1 where an outlier of the evidence makes the query doubtful: for the
    same plan, and in the same regime if it was measured in one."""
    point: Vector
    """[terms]: log errors of the terms around which step times are made linear."""
    doubt: Matrix
    """[hypotheses, evidence]: additional variance of plans that are outliers."""

    @classmethod
    def of(
        cls, queries: Sequence[Query], num_seen: int, prior: Calibration, sizes: Sizes
    ) -> "_LogTimes":
        plan = _same([query.plan for query in queries])
        conditions = _same([query.setting for query in queries])
        regime = _same([query.regime for query in queries])
        unexplained = np.array([query.regime != 0 for query in queries], dtype=float)
        terms_s = [[query.terms_s.get(name, 0.0) for name in prior.terms] for query in queries]
        return cls(
            num_seen=num_seen,
            prior=prior,
            sizes=sizes,
            terms_s=np.array(terms_s).reshape(len(queries), len(prior.terms)),
            own=plan * (SAME_PLAN + (1 - SAME_PLAN) * conditions),
            conditions=conditions,
            regime=regime * unexplained * (REGIME**2 + REGIME_PLAN**2 * plan),
            doubtful=(plan * np.maximum(regime, 1 - unexplained))[:, :num_seen],
            point=prior.mean,
            doubt=np.zeros((len(sizes.weights), num_seen)),
        )

    def linear(self) -> tuple[Vector, Matrix]:
        """Expected log step times, [queries], and their slopes with respect to the terms' log
        errors, [queries, terms].
        """
        corrected = self.terms_s * np.exp(self.point)
        totals = corrected.sum(axis=1)
        slopes = corrected / totals[:, None]
        return np.log(totals) - slopes @ (self.point - self.prior.mean), slopes

    def covariance(self, slopes: Matrix, rows: slice, columns: slice) -> Matrix:
        """[hypotheses, rows, columns]: covariance of log step times."""
        in_links = slopes @ np.array([name in COMMUNICATION for name in self.prior.terms], float)
        parts = (
            (self.sizes.terms**2, slopes[rows] @ self.prior.covariance @ slopes[columns].T),
            (self.sizes.own**2, self.own[rows, columns]),
        )
        links = self.conditions[rows, columns] * np.outer(in_links[rows], in_links[columns])
        found = self.regime[rows, columns] + LINK_NOISE**2 * links
        found = found + sum(np.multiply.outer(*part) for part in parts)
        if self.doubt.any():
            hit = self.doubtful[rows] * self.doubt[:, None, :]
            found += hit @ self.doubtful[columns].T
        return found


@dataclass(frozen=True)
class _Fit:
    """The regression in each hypothesis."""

    step_times: _LogTimes
    sizes: Sizes
    """The hypotheses, with weights given the evidence."""
    calibration: Calibration
    doubt: Matrix
    """[hypotheses, evidence]: as in _LogTimes, after this regression."""
    expected: Vector
    """[queries]: expected log step times before the evidence."""
    slopes: Matrix
    """[queries, terms]: derivatives of log step times."""
    inverse: Matrix
    """[hypotheses, evidence, evidence]: inverse of the covariance of what was measured."""
    pull: Matrix
    """[hypotheses, evidence]: `inverse` times the residuals."""

    @classmethod
    def of(cls, step_times: _LogTimes, measured: Vector, noise: Matrix) -> "_Fit":
        seen, (expected, slopes) = slice(step_times.num_seen), step_times.linear()
        left = measured - expected[seen]
        before = step_times.covariance(slopes, seen, seen) + noise
        inverse = np.asarray(np.linalg.inv(before), dtype=np.float64)
        pull = inverse @ left
        sizes = step_times.sizes.after((np.linalg.slogdet(inverse)[1] - pull @ left) / 2)
        # Leave-one-out residuals. Beyond OUTLIER_DEVIATIONS they are attributed to the plan or
        # regime.
        variance = 1 / np.diagonal(inverse, axis1=1, axis2=2)
        excess = (pull * variance / OUTLIER_DEVIATIONS) ** 2 - variance
        prior = step_times.prior
        factors = sizes.terms[:, None, None] ** 2
        gain = factors * (prior.covariance @ slopes[seen].T)
        calibration = Calibration(
            prior.terms,
            *sizes.moments(
                prior.mean + _applied(gain, pull),
                factors * prior.covariance - gain @ inverse @ gain.transpose(0, 2, 1),
            ),
        )
        doubt = np.maximum(step_times.doubt, excess)
        return cls(step_times, sizes, calibration, doubt, expected, slopes, inverse, pull)

    def predicted(self) -> tuple[Vector, Matrix]:
        """Mean and covariance of the log step times of the queries that were not measured."""
        seen, asked = slice(self.step_times.num_seen), slice(self.step_times.num_seen, None)
        gain = self.step_times.covariance(self.slopes, asked, seen)
        before = self.step_times.covariance(self.slopes, asked, asked)
        return self.sizes.moments(
            self.expected[asked] + _applied(gain, self.pull),
            before - gain @ self.inverse @ gain.transpose(0, 2, 1),
        )


def _applied(gain: Matrix, pull: Matrix) -> Matrix:
    """The product in each hypothesis: [hypotheses, n, evidence] times [hypotheses, evidence]."""
    return (gain @ pull[:, :, None])[:, :, 0]


def _same(values: Sequence[object]) -> Matrix:
    """[values, values]: 1 where two are equal."""
    numbers = {value: number for number, value in enumerate(dict.fromkeys(values))}
    codes = np.array([numbers[value] for value in values], dtype=int)
    return (codes[:, None] == codes).astype(float)
