"""What steps take under any plan: the cost model, mended by what was measured while the run went on.

The logarithm of measured over predicted time is a sum: each cost term's share of the step times how far off that term is
(as in planning/calibrate.py, whose result is the prior), what is peculiar to a plan, what to a plan in some
conditions, and what an unexplained regime does to all plans alike. All of these are normal, so the answer for any
set of plans is normal too, with the covariances that comparing them needs: what is off in both cancels.

Terms that are off are mended where they stand, so the regression is repeated about the mended shares. Evidence that
the rest speaks against counts as peculiar to its plan; old evidence counts for less.
"""

import json
import math
import os
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from optimus_jax.planning.calibrate import Calibration
from optimus_jax.planning.cost import COMMUNICATION, NINE_IN_TEN

Vector = NDArray[np.float64]
Matrix = NDArray[np.float64]
Latent = tuple[float, str]
"""Its standard deviation before anything was measured, and its name."""

COMMON = 0.15
"""Standard deviation of how far off all terms are together, as a logarithm; so are all below."""
LINKS = 0.25
"""How far off exchanges are together, beyond that."""
TERM = 0.1
"""How far off one term is, beyond those."""
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
ANOTHER_RUN = 0.1
"""Of levels from one run to the next on the same hardware, which may find other neighbours, another driver, another room temperature."""
HALF_LIFE = 3000.0
FORGOTTEN = 100.0
"""Half-lives after which evidence says nothing any more."""
"""Steps after which the variance of a measurement counts twice."""
DOUBTED = 2.5
"""Deviations from what all else says, beyond which evidence is peculiar to its plan."""
KEPT = 60
"""Pieces of evidence, the newest."""
SURE = 6.0
"""Pieces of evidence that the deviations above count as much as, in how large deviations are."""
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
    """Seconds of each cost term as the cost model has them in these conditions, before anything learnt."""

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
    step: int
    """When it was last seen."""

    def as_json(self) -> dict[str, object]:
        """Readable: times in seconds."""
        return {"plan": self.query.plan, "setting": self.query.setting, "measured_s": math.exp(self.log_time), "deviation": self.deviation,
                "terms_s": dict(self.query.terms_s)}


@dataclass(frozen=True)
class Forecast:
    """Logarithms of the step times of some plans."""

    mean: Vector
    """[plans]."""
    covariance: Matrix
    """[plans, plans]: of levels, not of single steps."""

    def step_time_s(self, index: int) -> float:
        """Median."""
        return float(np.exp(self.mean[index]))

    def interval_s(self, index: int) -> tuple[float, float]:
        """Between these lie nine tenths."""
        margin = math.exp(NINE_IN_TEN * math.sqrt(self.covariance[index, index]))
        return self.step_time_s(index) / margin, self.step_time_s(index) * margin

    def ratio(self, index: int, other: int) -> tuple[float, float]:
        """Mean and deviation of the logarithm of `index`'s time over `other`'s."""
        variance = self.covariance[index, index] + self.covariance[other, other] - 2 * self.covariance[index, other]
        return float(self.mean[index] - self.mean[other]), math.sqrt(max(0.0, float(variance)))


class Predictor:
    """Learns from levels of step times, and foretells others.

    Args:
      calibration: what earlier measurements on these devices teach about terms.
    """

    def __init__(self, calibration: Calibration | None = None) -> None:
        self._calibration = calibration or Calibration()
        self._evidence: dict[tuple[str, str, int], Evidence] = {}
        self._step = 0

    @property
    def evidence(self) -> tuple[Evidence, ...]:
        """All that counts."""
        return tuple(self._evidence.values())

    def learn(self, query: Query, *, log_time: float, noise: float, count: int, step: int) -> None:
        """Steps have this level. Replaces what was known of the same query; what makes no sense is left out.

        Args:
          noise: robust deviation of a single step's logarithm.
          count: steps that the level rests on.
        """
        if count < 1 or not math.isfinite(log_time) or not math.isfinite(noise) or not 0 < query.predicted_s < math.inf:
            return
        self._evidence.pop(query.key, None)
        self._evidence[query.key] = Evidence(query=query, log_time=log_time, deviation=max(noise, 0.005) / math.sqrt(count), step=step)
        while len(self._evidence) > KEPT:
            self._evidence.pop(next(iter(self._evidence)))
        self._step = max(self._step, step)

    def forget_regime(self, regime: int) -> None:
        """It is over, and its number will not come again."""
        self._evidence = {key: each for key, each in self._evidence.items() if key[2] != regime}

    def forget(self, query: Query) -> None:
        """It was not what it was called."""
        self._evidence.pop(query.key, None)

    def foretell(self, queries: Sequence[Query]) -> Forecast:
        """Step times of all queries, jointly."""
        believed = self._believed(queries)
        expected, slopes = believed.rows(queries)
        return Forecast(expected, slopes @ believed.covariance @ slopes.T)

    def calibration(self) -> Calibration:
        """How far off terms are believed to be: what a search multiplies them by."""
        believed = self._believed(())
        num_terms = len(believed.terms)
        return Calibration(believed.terms, believed.mean[:num_terms], believed.covariance[:num_terms, :num_terms])

    def _believed(self, queries: Sequence[Query]) -> "_Believed":
        evidence = list(self._evidence.values())
        return _Believed.before([*(each.query for each in evidence), *queries], self._calibration).after(evidence, self._step)

    def save(self, path: Path) -> None:
        """Keep what was learnt outside unexplained regimes, as JSON; a warning if that is not possible."""
        kept = [each.as_json() for each in self._evidence.values() if not each.query.regime]
        text = json.dumps({"evidence": kept}, indent=1) + "\n"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
                file.write(text)
            os.replace(file.name, path)
        except OSError as error:
            warnings.warn(f"what was learnt about this hardware cannot be kept: {error}", stacklevel=2)

    def load(self, path: Path) -> None:
        """Take what `save` has kept, as a run's worth older; a warning if the file is damaged, nothing if there is none."""
        try:
            found = [_evidence(each) for each in json.loads(path.read_text(encoding="utf-8"))["evidence"]]
        except FileNotFoundError:
            return
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            warnings.warn(f"{path} cannot be read and does not count: {error}", stacklevel=2)
            return
        for each in found[-KEPT:]:
            self._evidence.setdefault(each.query.key, each)


def _evidence(value: Mapping[str, object]) -> Evidence:
    """From `Evidence.as_json`. Raises ValueError, TypeError or KeyError."""
    terms, measured_s, deviation = value["terms_s"], value["measured_s"], value["deviation"]
    if not isinstance(terms, Mapping) or not isinstance(measured_s, float) or not isinstance(deviation, float):
        raise TypeError("terms_s, measured_s and deviation are numbers")
    terms_s = {str(name): float(time_s) for name, time_s in terms.items()}
    times = (measured_s, deviation, sum(terms_s.values()))
    if not all(math.isfinite(number) and number > 0 for number in times) or min(terms_s.values()) < 0:
        raise ValueError("times are finite and above 0")
    query = Query(plan=str(value["plan"]), setting=str(value["setting"]), terms_s=terms_s)
    return Evidence(query=query, log_time=math.log(measured_s), deviation=max(deviation, ANOTHER_RUN), step=-int(HALF_LIFE))


@dataclass(frozen=True)
class _Believed:
    """Normal beliefs about everything that step times are made of: terms first, then what is peculiar to plans and regimes."""

    terms: tuple[str, ...]
    columns: Mapping[Latent, int]
    """Where what is peculiar to a plan, setting or regime stands."""
    mean: Vector
    """[columns]."""
    covariance: Matrix
    """[columns, columns]."""

    @classmethod
    def before(cls, queries: Sequence[Query], calibration: Calibration) -> "_Believed":
        """Before anything was measured, of all that concerns these queries."""
        terms = tuple(sorted({name for query in queries for name in query.terms_s} | set(calibration.terms)))
        latents = list(dict.fromkeys(latent for query in queries for latent in _latents(query)))
        columns = {latent: len(terms) + place for place, latent in enumerate(latents)}
        term_mean, term_covariance = _prior(terms, calibration)
        covariance = np.diag([0.0] * len(terms) + [latent[0] ** 2 for latent in latents])
        covariance[: len(terms), : len(terms)] = term_covariance
        return cls(terms, columns, np.append(term_mean, np.zeros(len(latents))), covariance)

    def rows(self, queries: Sequence[Query]) -> tuple[Vector, Matrix]:
        """For each query: the logarithm that is expected, and how that grows with each column."""
        num_terms = len(self.terms)
        times = np.array([[query.terms_s.get(name, 0.0) for name in self.terms] for query in queries]).reshape(len(queries), num_terms)
        mended = times * np.exp(self.mean[:num_terms])
        totals = mended.sum(axis=1)
        slopes = np.zeros((len(queries), len(self.mean)))
        slopes[:, :num_terms] = mended / totals[:, None]
        in_links = slopes[:, :num_terms] @ np.array([name in COMMUNICATION for name in self.terms], dtype=float)
        for row, query in enumerate(queries):
            slopes[row, [self.columns[latent] for latent in _latents(query)]] = 1.0
            slopes[row, self.columns[_of_links(query)]] = in_links[row]
        return np.log(totals) + slopes[:, num_terms:] @ self.mean[num_terms:], slopes

    def after(self, evidence: Sequence[Evidence], step: int) -> "_Believed":
        """The same once the evidence is in."""
        if not evidence:
            return self
        queries, measured = [each.query for each in evidence], np.array([each.log_time for each in evidence])
        ages = np.array([step - each.step for each in evidence]) / HALF_LIFE
        noise = np.array([each.deviation**2 for each in evidence]) * np.exp2(np.minimum(ages, FORGOTTEN))
        prior, believed = self.covariance.copy(), self
        left, inverse = np.zeros(len(queries)), np.eye(len(queries))
        peculiar = [_latents(query)[-1] if query.regime else (PLAN, query.plan) for query in queries]
        columns, expected_variance = np.array([self.columns[latent] for latent in peculiar]), np.array([latent[0] ** 2 for latent in peculiar])
        for _ in range(ROUNDS):
            expected, slopes = believed.rows(queries)
            left = measured - expected + slopes @ (believed.mean - self.mean)
            gain = prior @ slopes.T
            inverse = np.linalg.inv(slopes @ gain + np.diag(noise))
            believed = replace(self, mean=self.mean + gain @ inverse @ left, covariance=prior - gain @ inverse @ gain.T)
            # How far each is from what the others say of it: beyond DOUBTED deviations it is peculiar to its plan, or its regime.
            variance = 1 / np.diag(inverse)
            doubt = (inverse @ left * variance / DOUBTED) ** 2 - variance
            np.maximum.at(prior, (columns, columns), expected_variance + doubt)
        # Evidence that agrees, or does not, tells how large deviations are altogether.
        size = (SURE + left @ inverse @ left) / (SURE + len(queries))
        return replace(believed, covariance=size * believed.covariance)


def _of_links(query: Query) -> Latent:
    """What all exchanges have in common in its conditions."""
    return READING, f"links in {query.setting}"


def _latents(query: Query) -> tuple[Latent, ...]:
    """What is peculiar to it, as (deviation, name)."""
    own = (_of_links(query), (PLAN, query.plan), (SETTING, f"{query.plan} in {query.setting}"))
    return own if not query.regime else (*own, (REGIME, f"{query.regime}"), (REGIME_PLAN, f"{query.plan} in {query.regime}"))


def _prior(names: Sequence[str], calibration: Calibration) -> tuple[Vector, Matrix]:
    """[terms], [terms, terms]: how far off they are before anything was measured in this run."""
    in_links = np.array([name in COMMUNICATION for name in names], dtype=float)
    prior = COMMON**2 * np.ones((len(names), len(names))) + LINKS**2 * np.outer(in_links, in_links) + TERM**2 * np.eye(len(names))
    mean = np.zeros(len(names))
    known = [index for index, name in enumerate(names) if name in calibration.terms]
    places = [calibration.terms.index(names[index]) for index in known]
    if known:
        unknown = [index for index in range(len(names)) if index not in known]
        mean[known] = calibration.mean[places]
        prior[np.ix_(known, unknown)] = prior[np.ix_(unknown, known)] = 0.0
        prior[np.ix_(known, known)] = calibration.covariance[np.ix_(places, places)]
    return mean, prior
