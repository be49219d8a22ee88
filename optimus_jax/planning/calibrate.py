"""What measured steps teach about later predictions: each kept beside its prediction, in readable JSON Lines.

The logarithm of measured over predicted time is taken as a sum over the terms of the step, each term's
share of the predicted time multiplied by how far off that term is: a Bayesian linear regression, with every term
expected to be right within PRIOR before anything was seen. One measured step mends a little, several plans with different
shares tell which term is to blame.
"""

import dataclasses
import json
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from optimus_jax.planning.cost import Prediction, shares_of

PRIOR = 0.3
"""Standard deviation of how far off a term is, as a logarithm."""
NOISE = 0.05
"""Of a measured step time, and what terms cannot express."""
KEPT = 500
"""Records that count, the newest."""
_90_PERCENT = 1.645


@dataclass(frozen=True, kw_only=True)
class Record:
    """One plan's steps, predicted and measured."""

    model: str
    plan: str
    """Digest."""
    measured_at: str
    """Date and time."""
    measured_s: float
    """Of a step."""
    terms_s: dict[str, float]
    """As predicted, without calibration."""

    @property
    def predicted_s(self) -> float:
        """Of a step, without calibration."""
        return sum(self.terms_s.values())


@dataclass(frozen=True)
class Calibration:
    """What records say about predictions on the devices that they come from."""

    terms: tuple[str, ...] = ()
    mean: np.ndarray = field(default_factory=lambda: np.zeros(0))
    """[terms]: how far off each is, as a logarithm."""
    covariance: np.ndarray = field(default_factory=lambda: np.zeros((0, 0)))
    """[terms, terms]: of the mean."""

    @classmethod
    def of(cls, records: Sequence[Record]) -> "Calibration":
        """Learnt from these. Without any, predictions stay as they are."""
        if not records:
            return cls()
        terms = tuple(sorted({name for record in records for name in record.terms_s}))
        shares = np.array([_shares(record.terms_s, terms) for record in records])
        errors = np.array([math.log(record.measured_s / record.predicted_s) for record in records])
        covariance = np.linalg.inv(shares.T @ shares / NOISE**2 + np.eye(len(terms)) / PRIOR**2)
        return cls(terms, covariance @ shares.T @ errors / NOISE**2, covariance)

    @cached_property
    def factors(self) -> dict[str, float]:
        """How many times as long as predicted a term takes; terms never seen are left out."""
        return {name: math.exp(mean) for name, mean in zip(self.terms, self.mean, strict=True)}

    def step_time_s(self, terms_s: Mapping[str, float]) -> float:
        """Seconds of a step with these terms, every one mended."""
        factors = self.factors
        return sum(terms_s.values()) if not factors else sum(time_s * factors.get(name, 1.0) for name, time_s in terms_s.items())

    def applied(self, prediction: Prediction) -> Prediction:
        """The prediction, every term mended, with the interval that is left."""
        if not self.terms:
            return prediction
        terms = tuple(replace(term, time_s=term.time_s * self.factors.get(term.name, 1.0)) for term in prediction.terms)
        time_s, before_s = sum(term.time_s for term in terms), prediction.step_time_s
        shares = _shares({term.name: term.time_s for term in prediction.terms}, self.terms)
        unseen = 1.0 - shares.sum()
        spread = math.sqrt(shares @ self.covariance @ shares + (unseen * PRIOR) ** 2 + NOISE**2)
        return replace(
            prediction, terms=terms, step_time_s=time_s, **shares_of({term.name: term.time_s for term in terms}), low_s=time_s * math.exp(-_90_PERCENT * spread), high_s=time_s * math.exp(_90_PERCENT * spread),
            tokens_per_s=prediction.tokens_per_s * before_s / time_s, mfu=prediction.mfu and prediction.mfu * before_s / time_s)


def read_records(path: Path) -> list[Record]:
    """The newest records of a file; none if there is no file. A line that is none is left out with a warning."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError) as error:
        warnings.warn(f"earlier measurements cannot be read and do not count: {error}", stacklevel=2)
        return []
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            record = Record(**json.loads(line))
            if not 0 < record.measured_s < math.inf or not 0 < record.predicted_s < math.inf or min(record.terms_s.values()) < 0:
                raise ValueError("times are finite and above 0")
            records.append(record)
        except (ValueError, TypeError, AttributeError) as error:
            warnings.warn(f"{path}, line {number} is no measurement and does not count: {error}", stacklevel=2)
    return records[-KEPT:]


def append_record(path: Path, record: Record) -> None:
    """Add one line; a warning if that is not possible, for a run does not depend on it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(dataclasses.asdict(record)) + "\n")
    except OSError as error:
        warnings.warn(f"a measurement cannot be kept for later runs: {error}", stacklevel=2)


def _shares(terms_s: dict[str, float], names: Sequence[str]) -> np.ndarray:
    total = sum(terms_s.values())
    return np.array([terms_s.get(name, 0.0) / total for name in names])
