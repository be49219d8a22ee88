"""How far off the terms of the cost model are, as a rule and after what was measured.

A step's predicted time is a sum of terms. The logarithm of how far off each is has a normal
distribution: before anything is measured all terms are off together, exchanges more so, and each by
itself a little. So what is learnt of some terms says something of others too.
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
"""Standard deviation of how far off all terms are together, as a logarithm; so are all below."""
LINKS = 0.25
"""How far off exchanges are together, beyond that."""
TERM = 0.1
"""How far off one term is, beyond those."""
NOISE = 0.05
"""Of a measured step time, and what terms cannot express."""


@dataclass(frozen=True)
class Calibration:
    """What is known of terms. Of nothing, predictions stay as they are."""

    terms: tuple[str, ...] = ()
    mean: Vector = field(default_factory=lambda: np.zeros(0))
    """[terms]: how far off each is, as a logarithm."""
    covariance: Matrix = field(default_factory=lambda: np.zeros((0, 0)))
    """[terms, terms]: of the mean."""

    @cached_property
    def factors(self) -> dict[str, float]:
        """How many times as long as predicted a term takes."""
        return {name: math.exp(mean) for name, mean in zip(self.terms, self.mean, strict=True)}

    def step_time_s(self, terms_s: Mapping[str, float]) -> float:
        """Seconds of a step with these terms, every one mended."""
        if not self.terms:
            return sum(terms_s.values())
        factors = self.covering(terms_s).factors
        return sum(time_s * factors[name] for name, time_s in terms_s.items())

    def covering(self, names: Iterable[str]) -> "Calibration":
        """With these terms too: of one that is not known, what the known ones teach about it."""
        missing = frozenset(names).difference(self.terms)
        if missing and missing not in self._covering:
            self._covering[missing] = self._extended(tuple(sorted({*self.terms, *missing})))
        return self._covering[missing] if missing else self

    @cached_property
    def _covering(self) -> dict[frozenset[str], "Calibration"]:
        return {}

    def _extended(self, names: tuple[str, ...]) -> "Calibration":
        prior, known = _prior(names), [names.index(name) for name in self.terms]
        # Regression on the known terms: what they have in common with another one is known of that
        # too.
        slopes = prior[:, known] @ np.linalg.inv(prior[np.ix_(known, known)])
        learnt = prior[np.ix_(known, known)] - self.covariance
        return Calibration(names, slopes @ self.mean, prior - slopes @ learnt @ slopes.T)

    def applied(self, prediction: Prediction) -> Prediction:
        """The prediction, every term mended, with the interval that is left."""
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
    """[terms, terms]: how far off they are before anything was measured."""
    in_links = np.array([name in COMMUNICATION for name in names], dtype=float)
    return (
        COMMON**2 * np.ones((len(names), len(names)))
        + LINKS**2 * np.outer(in_links, in_links)
        + TERM**2 * np.eye(len(names))
    )
