"""Bayesian regression of step times: predictions of the cost model, corrected by measurements.

The logarithm of measured over predicted time is a sum of errors: each cost term's share of the step
times that term's log error (planning/learning/calibrate.py), an error of the plan, an error of the
plan in given conditions, and an error that an unexplained regime causes in all plans. (An
*unexplained regime* is a period that begins when step times change without a reading that explains
the change.) All errors are normally distributed, so step times of any set of plans are jointly
log-normal. Their covariances are needed to compare plans, because common errors cancel.

Corrections change the terms' shares of the step, so the regression is iterated. Outliers are
attributed to an error of their plan.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from optimus_jax.planning.cost.cost import COMMUNICATION
from optimus_jax.planning.learning.calibrate import Calibration, Matrix, Vector

Latent = tuple[float, str]
"""An error: its prior standard deviation (logarithm) and its name."""

PLAN = 0.03
"""Error of a plan, as a standard deviation of the logarithm. The next four are too."""
PLAN_SETTING = 0.02
"""Additional error of a plan in given conditions and with a given batch."""
LINK_NOISE = 0.12
"""Error common to all links in given conditions, because their speeds are measured roughly."""
REGIME = 0.5
"""Error that an unexplained regime causes in all plans."""
REGIME_PLAN = 0.15
"""Additional error that a regime causes in a single plan."""
OUTLIER_DEVIATIONS = 2.5
"""A measurement counts as an outlier if it is more than this many standard deviations from the
prediction based on the others."""
PRIOR_COUNT = 6.0
"""Weight of the prior deviations above, in measurements, when the overall scale is estimated."""
OWN_FACTORS = tuple([2.0 ** (power / 2) for power in range(8)])
"""Candidate factors on the PLAN and PLAN_SETTING errors: the cost model fits some machines better
than others."""
FACTOR_DEVIATION = 2.0
"""Prior standard deviation of the logarithm of that factor."""
T_DEGREES = 4.0
"""Degrees of freedom of the t likelihood used for that factor, which tolerates a few outliers."""
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


@dataclass(frozen=True)
class Beliefs:
    """Joint normal distribution of all errors: terms first, then errors of plans and regimes."""

    terms: tuple[str, ...]
    columns: Mapping[Latent, int]
    """Column of each error of a plan, setting or regime."""
    mean: Vector
    """[columns]: expected errors."""
    covariance: Matrix
    """[columns, columns]: covariance of the errors."""

    @classmethod
    def before(cls, queries: Sequence[Query], calibration: Calibration) -> "Beliefs":
        """The prior of all errors that affect these queries."""
        known = calibration.covering(name for query in queries for name in query.terms_s)
        terms = known.terms
        latents = list(dict.fromkeys(latent for query in queries for latent in _latents(query)))
        columns = {latent: len(terms) + place for place, latent in enumerate(latents)}
        covariance = np.diag([0.0] * len(terms) + [latent[0] ** 2 for latent in latents])
        covariance[: len(terms), : len(terms)] = known.covariance
        return cls(terms, columns, np.append(known.mean, np.zeros(len(latents))), covariance)

    @property
    def calibration(self) -> Calibration:
        """The marginal distribution of the terms."""
        num_terms = len(self.terms)
        return Calibration(
            self.terms, self.mean[:num_terms], self.covariance[:num_terms, :num_terms]
        )

    def rows(self, queries: Sequence[Query]) -> tuple[Vector, Matrix]:
        """For each query, the expected log time and its derivative with respect to each column."""
        num_terms = len(self.terms)
        times = np.array(
            [[query.terms_s.get(name, 0.0) for name in self.terms] for query in queries]
        ).reshape(len(queries), num_terms)
        corrected = times * np.exp(self.mean[:num_terms])
        totals = corrected.sum(axis=1)
        slopes = np.zeros((len(queries), len(self.mean)))
        slopes[:, :num_terms] = corrected / totals[:, None]
        in_links = slopes[:, :num_terms] @ np.array(
            [name in COMMUNICATION for name in self.terms], dtype=float
        )
        for row, query in enumerate(queries):
            slopes[row, [self.columns[latent] for latent in _latents(query)]] = 1.0
            slopes[row, self.columns[_of_links(query)]] = in_links[row]
        return np.log(totals) + slopes[:, num_terms:] @ self.mean[num_terms:], slopes

    def after(self, evidence: Sequence[Evidence]) -> "Beliefs":
        """The posterior given the evidence."""
        if not evidence:
            return self
        queries, measured = (
            [each.query for each in evidence],
            np.array([each.log_time for each in evidence]),
        )
        noise, believed = np.diag([each.deviation**2 for each in evidence]), self
        left, inverse = np.zeros(len(queries)), np.eye(len(queries))
        own = [
            column
            for (deviation, _), column in self.columns.items()
            if deviation in (PLAN, PLAN_SETTING)
        ]
        doubted = np.array(
            [
                self.columns[_latents(query)[-1] if query.regime else (PLAN, query.plan)]
                for query in queries
            ]
        )
        doubt = np.zeros(len(queries))
        for _ in range(NUM_ITERATIONS):
            expected, slopes = believed.rows(queries)
            left = measured - expected + slopes @ (believed.mean - self.mean)
            prior = self.covariance.copy()
            np.add.at(prior, (doubted, doubted), doubt)
            usual = self.covariance[own, own]
            prior[own, own] += usual * (
                _likeliest(
                    left,
                    slopes @ prior @ slopes.T + noise,
                    (slopes[:, own] * usual) @ slopes[:, own].T,
                )
                - 1
            )
            gain = prior @ slopes.T
            inverse = np.linalg.inv(slopes @ gain + noise)
            believed = replace(
                self,
                mean=self.mean + gain @ inverse @ left,
                covariance=prior - gain @ inverse @ gain.T,
            )
            # Leave-one-out residuals. Beyond OUTLIER_DEVIATIONS they are attributed to the plan or
            # regime.
            variance = 1 / np.diag(inverse)
            doubt = np.maximum(
                doubt, (inverse @ left * variance / OUTLIER_DEVIATIONS) ** 2 - variance
            )
        # Rescale all deviations by how well the evidence agrees.
        size = (PRIOR_COUNT + left @ inverse @ left) / (PRIOR_COUNT + len(queries))
        return replace(believed, covariance=size * believed.covariance)


def _likeliest(left: Vector, covariance: Matrix, own: Matrix) -> float:
    """Squared factor on the errors of plans that maximises the leave-one-out likelihood.

    Args:
      left: [measured], the residuals.
      covariance: [measured, measured], of the residuals.
      own: [measured, measured], the part of `covariance` due to errors of plans.
    """

    def score(factor: float) -> float:
        inverse = np.linalg.inv(covariance + (factor**2 - 1) * own)
        precision = np.diag(inverse)
        surprise = np.log1p((inverse @ left) ** 2 / precision / T_DEGREES)
        return (
            float(np.sum(np.log(precision) - (T_DEGREES + 1) * surprise)) / 2
            - (math.log(factor) / FACTOR_DEVIATION) ** 2 / 2
        )

    return max(OWN_FACTORS, key=score) ** 2


def _of_links(query: Query) -> Latent:
    """The error common to all communication in the query's conditions."""
    return LINK_NOISE, f"links in {query.setting}"


def _latents(query: Query) -> tuple[Latent, ...]:
    """The errors that affect a query, besides those of terms."""
    own = (_of_links(query), (PLAN, query.plan), (PLAN_SETTING, f"{query.plan} in {query.setting}"))
    return (
        own
        if not query.regime
        else (*own, (REGIME, f"{query.regime}"), (REGIME_PLAN, f"{query.plan} in {query.regime}"))
    )
