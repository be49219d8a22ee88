"""Beliefs about step times: what plans take under the cost model, mended by what was measured.

The logarithm of measured over predicted time is a sum: each cost term's share of the step times how
far off that term is (planning/learning/calibrate.py), what is peculiar to a plan, what to a plan in
some conditions, and what an unexplained regime does to all plans alike. All of these are normal, so
the answer for any set of plans is normal too, with the covariances that comparing them needs: what
is off in both cancels.

Terms that are off are mended where they stand, so the regression is repeated about the mended
shares. Evidence that the rest speaks against counts as peculiar to its plan.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from optimus_jax.planning.cost.cost import COMMUNICATION
from optimus_jax.planning.learning.calibrate import Calibration, Matrix, Vector

Latent = tuple[float, str]
"""Its standard deviation before anything was measured, as a logarithm, and its name."""

PLAN = 0.03
"""What is peculiar to a plan."""
SETTING = 0.02
"""What is peculiar to a plan in some conditions, with some batch."""
READING = 0.12
"""How far off links together are in some conditions: readings of them are rough."""
REGIME = 0.5
"""What an unexplained regime does to all plans."""
REGIME_PLAN = 0.15
"""What it does to one plan and not to others."""
DOUBTED = 2.5
"""Deviations from what all else says, beyond which evidence is peculiar to its plan."""
SURE = 6.0
"""Pieces of evidence that the deviations above count as much as, in how large deviations are."""
OWN = tuple([2.0 ** (power / 2) for power in range(8)])
"""Factors on PLAN and SETTING that evidence may speak for: the cost model fits some machines better
than others."""
UNSURE = 2.0
"""Standard deviation of the logarithm of that factor."""
TAIL = 4.0
"""Degrees of freedom of the t distribution that evidence is held against when that is judged: a few
wild plans are no matter."""
ROUNDS = 4
"""Of mending the shares; the last changes nothing that matters."""


@dataclass(frozen=True, kw_only=True)
class Query:
    """A plan in some conditions."""

    plan: str
    """Digest."""
    setting: str
    """Names conditions and batch."""
    regime: int = 0
    """Unexplained regime; 0: none."""
    terms_s: Mapping[str, float]
    """Seconds of each cost term as the cost model has them in these conditions, before anything
    learnt."""

    @property
    def key(self) -> tuple[str, str, int]:
        """Tells queries apart."""
        return self.plan, self.setting, self.regime

    @property
    def predicted_s(self) -> float:
        """Of a step, by the cost model alone."""
        return sum(self.terms_s.values())


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What steps of a plan took in some conditions."""

    query: Query
    log_time: float
    """Logarithm of their level, seconds."""
    deviation: float
    """Standard deviation of that."""


@dataclass(frozen=True)
class Beliefs:
    """Normal beliefs about everything that step times are made of: terms first, then what is
    peculiar to plans and regimes.
    """

    terms: tuple[str, ...]
    columns: Mapping[Latent, int]
    """Where what is peculiar to a plan, setting or regime stands."""
    mean: Vector
    """[columns]."""
    covariance: Matrix
    """[columns, columns]."""

    @classmethod
    def before(cls, queries: Sequence[Query], calibration: Calibration) -> "Beliefs":
        """Before anything was measured, of all that concerns these queries."""
        known = calibration.covering(name for query in queries for name in query.terms_s)
        terms = known.terms
        latents = list(dict.fromkeys(latent for query in queries for latent in _latents(query)))
        columns = {latent: len(terms) + place for place, latent in enumerate(latents)}
        covariance = np.diag([0.0] * len(terms) + [latent[0] ** 2 for latent in latents])
        covariance[: len(terms), : len(terms)] = known.covariance
        return cls(terms, columns, np.append(known.mean, np.zeros(len(latents))), covariance)

    @property
    def calibration(self) -> Calibration:
        """Of terms alone."""
        num_terms = len(self.terms)
        return Calibration(
            self.terms, self.mean[:num_terms], self.covariance[:num_terms, :num_terms]
        )

    def rows(self, queries: Sequence[Query]) -> tuple[Vector, Matrix]:
        """For each query: the logarithm that is expected, and how that grows with each column."""
        num_terms = len(self.terms)
        times = np.array(
            [[query.terms_s.get(name, 0.0) for name in self.terms] for query in queries]
        ).reshape(len(queries), num_terms)
        mended = times * np.exp(self.mean[:num_terms])
        totals = mended.sum(axis=1)
        slopes = np.zeros((len(queries), len(self.mean)))
        slopes[:, :num_terms] = mended / totals[:, None]
        in_links = slopes[:, :num_terms] @ np.array(
            [name in COMMUNICATION for name in self.terms], dtype=float
        )
        for row, query in enumerate(queries):
            slopes[row, [self.columns[latent] for latent in _latents(query)]] = 1.0
            slopes[row, self.columns[_of_links(query)]] = in_links[row]
        return np.log(totals) + slopes[:, num_terms:] @ self.mean[num_terms:], slopes

    def after(self, evidence: Sequence[Evidence]) -> "Beliefs":
        """The same once the evidence is in."""
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
            if deviation in (PLAN, SETTING)
        ]
        doubted = np.array(
            [
                self.columns[_latents(query)[-1] if query.regime else (PLAN, query.plan)]
                for query in queries
            ]
        )
        doubt = np.zeros(len(queries))
        for _ in range(ROUNDS):
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
            # How far each is from what the others say of it: beyond DOUBTED deviations it is
            # peculiar to its plan, or its regime.
            variance = 1 / np.diag(inverse)
            doubt = np.maximum(doubt, (inverse @ left * variance / DOUBTED) ** 2 - variance)
        # Evidence that agrees, or does not, tells how large deviations are altogether.
        size = (SURE + left @ inverse @ left) / (SURE + len(queries))
        return replace(believed, covariance=size * believed.covariance)


def _likeliest(left: Vector, covariance: Matrix, own: Matrix) -> float:
    """Square of the factor on what is peculiar to plans under which each measurement is likeliest,
    given all others.

    Args:
      left: [measured], over what is expected.
      covariance: [measured, measured] of that.
      own: [measured, measured], the part of it that is peculiar to plans.
    """

    def score(factor: float) -> float:
        inverse = np.linalg.inv(covariance + (factor**2 - 1) * own)
        precision = np.diag(inverse)
        surprise = np.log1p((inverse @ left) ** 2 / precision / TAIL)
        return (
            float(np.sum(np.log(precision) - (TAIL + 1) * surprise)) / 2
            - (math.log(factor) / UNSURE) ** 2 / 2
        )

    return max(OWN, key=score) ** 2


def _of_links(query: Query) -> Latent:
    """What all exchanges have in common in its conditions."""
    return READING, f"links in {query.setting}"


def _latents(query: Query) -> tuple[Latent, ...]:
    """What is peculiar to it, as (deviation, name)."""
    own = (_of_links(query), (PLAN, query.plan), (SETTING, f"{query.plan} in {query.setting}"))
    return (
        own
        if not query.regime
        else (*own, (REGIME, f"{query.regime}"), (REGIME_PLAN, f"{query.plan} in {query.regime}"))
    )
