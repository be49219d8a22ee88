"""How large the errors of the cost model are on some hardware: hypotheses and their weights.

A hypothesis says how far plans deviate each by itself (`own`), and how many times as far off as
usual the cost terms are (`terms`). The prior is log-normal in both.
"""

import itertools
from dataclasses import dataclass, replace

import numpy as np

from optimus_jax.planning.learning.calibrate import Matrix, Vector

OWN = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32)
"""Standard deviations of the plans' own log errors that are considered."""
USUAL_OWN, OWN_SPREAD = 0.06, 0.7
"""Median of that deviation before anything is measured, and the standard deviation of its
logarithm."""
TERMS = (0.5, 1.0, 2.0)
"""Factors on the usual deviations of the terms' errors that are considered."""
TERMS_SPREAD = 0.5
"""Standard deviation of that factor's logarithm."""


@dataclass(frozen=True)
class Sizes:
    """Hypotheses of the errors' sizes; all arrays are [hypotheses]."""

    own: Vector
    """Standard deviation of each plan's own log error."""
    terms: Vector
    """Factor on the deviations of the terms' errors."""
    weights: Vector
    """Probabilities."""

    @classmethod
    def unknown(cls) -> "Sizes":
        """The prior."""
        own, terms = np.array(list(itertools.product(OWN, TERMS))).T
        logs = (np.log(own / USUAL_OWN) / OWN_SPREAD) ** 2 + (np.log(terms) / TERMS_SPREAD) ** 2
        return cls(own, terms, np.ones(len(own)))._weighted(-logs / 2)

    def after(self, log_likelihoods: Vector) -> "Sizes":
        """The same hypotheses, with weights given evidence of these likelihoods."""
        with np.errstate(divide="ignore"):
            return self._weighted(np.log(self.weights) + log_likelihoods)

    def _weighted(self, logs: Vector) -> "Sizes":
        weights = np.exp(logs - logs.max())
        return replace(self, weights=weights / weights.sum())

    def moments(self, means: Matrix, covariances: Matrix) -> tuple[Vector, Matrix]:
        """Mean and covariance of the average over the hypotheses.

        Args:
          means: [hypotheses, n].
          covariances: [hypotheses, n, n].
        """
        mean = self.weights @ means
        off = means - mean
        within = np.tensordot(self.weights, covariances, 1)
        return mean, within + (off.T * self.weights) @ off
