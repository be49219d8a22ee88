"""Errors of the cost model's terms: a prior, and corrections after measurements.

A step's predicted time is a sum of terms. A term's log error is the logarithm of its true over its
predicted time, and is normally distributed. In the prior it is the sum of an error common to all
terms, one common to communication terms, and a small one of each term. Because errors are
correlated, measuring some terms also informs about others.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from optimus_jax.planning.cost.cost import COMMUNICATION, NINE_IN_TEN, Prediction, shares_of

Vector = NDArray[np.float64]
Matrix = NDArray[np.float64]

COMMON = 0.15
"""Standard deviation of the log error common to all terms. The next three are standard deviations
of log errors too."""
LINKS = 0.25
"""Additional error common to all communication terms."""
TERM = 0.1
"""Additional error of a single term."""
NOISE = 0.05
"""Error of a measured step time, including effects that terms cannot express."""


@dataclass(frozen=True)
class Calibration:
    """Posterior distribution of the terms' log errors. Without terms, predictions are unchanged."""

    terms: tuple[str, ...] = ()
    mean: Vector = field(default_factory=lambda: np.zeros(0))
    """[terms]: expected log error of each term."""
    covariance: Matrix = field(default_factory=lambda: np.zeros((0, 0)))
    """[terms, terms]: covariance of the log errors."""

    @cached_property
    def factors(self) -> dict[str, float]:
        """Factor from predicted to expected time, by term."""
        return {name: math.exp(mean) for name, mean in zip(self.terms, self.mean, strict=True)}

    def step_time_s(self, terms_s: Mapping[str, float]) -> float:
        """Seconds of a step with these predicted terms, after correction."""
        if not self.terms:
            return sum(terms_s.values())
        factors = self.covering(terms_s).factors
        return sum(time_s * factors[name] for name, time_s in terms_s.items())

    def least_factor(self, names: Iterable[str]) -> float:
        """The smallest factor that `step_time_s` applies to terms of these names."""
        return min(self.covering(names).factors.values()) if self.terms else 1.0

    def covering(self, names: Iterable[str]) -> "Calibration":
        """This calibration extended to further terms, whose errors are inferred from those of known
        terms.
        """
        missing = frozenset(names).difference(self.terms)
        if missing and missing not in self._covering:
            self._covering[missing] = self._extended(tuple(sorted({*self.terms, *missing})))
        return self._covering[missing] if missing else self

    @cached_property
    def _covering(self) -> dict[frozenset[str], "Calibration"]:
        return {}

    def _extended(self, names: tuple[str, ...]) -> "Calibration":
        prior, known = _prior(names), [names.index(name) for name in self.terms]
        # Regression on the known terms: new terms share errors with them.
        slopes = prior[:, known] @ np.linalg.inv(prior[np.ix_(known, known)])
        learnt = prior[np.ix_(known, known)] - self.covariance
        return Calibration(names, slopes @ self.mean, prior - slopes @ learnt @ slopes.T)

    def applied(self, prediction: Prediction) -> Prediction:
        """The prediction with corrected terms, and an interval for the remaining uncertainty."""
        if not self.terms:
            return prediction
        known = self.covering(term.name for term in prediction.terms)
        terms = tuple(
            replace(term, time_s=term.time_s * known.factors[term.name])
            for term in prediction.terms
        )
        time_s, before_s = sum(term.time_s for term in terms), prediction.step_time_s
        times = {term.name: term.time_s for term in terms}
        shares = np.array([times.get(name, 0.0) for name in known.terms]) / time_s
        spread = math.sqrt(shares @ known.covariance @ shares + NOISE**2)
        return replace(
            prediction,
            terms=terms,
            step_time_s=time_s,
            **shares_of(times),
            low_s=time_s * math.exp(-NINE_IN_TEN * spread),
            high_s=time_s * math.exp(NINE_IN_TEN * spread),
            tokens_per_s=prediction.tokens_per_s * before_s / time_s,
            mfu=prediction.mfu and prediction.mfu * before_s / time_s,
        )


def _prior(names: Sequence[str]) -> Matrix:
    """[terms, terms]: covariance of log errors before any measurement."""
    in_links = np.array([name in COMMUNICATION for name in names], dtype=float)
    return (
        COMMON**2 * np.ones((len(names), len(names)))
        + LINKS**2 * np.outer(in_links, in_links)
        + TERM**2 * np.eye(len(names))
    )
