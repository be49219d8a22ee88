"""Detects lasting changes of step times, and predicts how long a regime lasts.

A *regime* is a stretch of time in which step times scatter about one level. A change is found by
two sums of log-likelihood ratios (CUSUM, Page 1954, doi:10.1093/biomet/41.1-2.100), one for each
direction. Their terms are clipped to CHANGE_LOG_ODDS / MIN_SHIFTED_STEPS, so that a single spike
cannot report a change: several steps in a row have to agree.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from optimus_jax.control import constants
from optimus_jax.robust import deviation_from, median_of_sorted

MAX_LOG_TIME = 50.0
"""Largest plausible logarithm of a step time: e^50 s exceed the age of the universe."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """The end of one regime and the beginning of another."""

    before: float
    """Level of the old regime, as a logarithm of seconds."""
    after: float
    """Level of the new regime."""
    num_steps: int
    """Samples of the new regime so far."""


class ChangeDetector:
    """Finds changes of at least `MIN_LEVEL_SHIFT` in a sequence of logarithms."""

    def __init__(self) -> None:
        self._samples: deque[float] = deque(maxlen=constants.MAX_LEVEL_STEPS)
        self._up = self._down = 0.0
        self._since_up = self._since_down = 0
        self._refreshed_at = self._seen = 0
        self.level: float | None = None
        """Median of the present regime, without samples that may belong to the next one; None:
        there are fewer than three samples."""
        self.noise = constants.MIN_STEP_NOISE
        """Robust deviation of a sample."""

    @property
    def count(self) -> int:
        """Number of samples that the level is estimated from."""
        return len(self._samples) - self.suspects

    @property
    def suspects(self) -> int:
        """Number of newest samples that may belong to another regime."""
        return max(self._since_up, self._since_down)

    def recent(self, count: int) -> float | None:
        """Median of the newest `count` samples; None if there are fewer."""
        return (
            None
            if len(self._samples) < count
            else median_of_sorted(sorted(list(self._samples)[-count:]))
        )

    def add(self, value: float) -> Change | None:
        """Add a sample, and return the change if it completes the evidence for one.

        Samples that cannot be a logarithm of seconds are ignored.
        """
        if not abs(value) < MAX_LOG_TIME:
            return None
        if len(self._samples) >= constants.MIN_LEVEL_STEPS and self.level is not None:
            self._add_evidence(value - self.level)
        self._samples.append(value)
        self._seen += 1
        if max(self._up, self._down) >= constants.CHANGE_LOG_ODDS:
            return self._changed()
        self._refresh()
        return None

    def _add_evidence(self, off: float) -> None:
        # With few samples, neither level nor noise is known well.
        variance = self.noise**2 * (1.0 + constants.FEW_STEPS_VARIANCE / len(self._samples))
        bound = constants.CHANGE_LOG_ODDS / constants.MIN_SHIFTED_STEPS
        shift = constants.MIN_LEVEL_SHIFT
        slack = constants.MAX_LEVEL_ERROR * self.noise / math.sqrt(len(self._samples))
        for_up, for_down = (
            shift * (sign * off - shift / 2 - slack) / variance for sign in (1.0, -1.0)
        )
        self._up = max(0.0, self._up + min(bound, max(-bound, for_up)))
        self._down = max(0.0, self._down + min(bound, max(-bound, for_down)))
        # Rounding makes MIN_SHIFTED_STEPS full terms reach the threshold exactly.
        self._up, self._down = round(self._up, 9), round(self._down, 9)
        self._since_up = self._since_up + 1 if self._up > 0 else 0
        self._since_down = self._since_down + 1 if self._down > 0 else 0

    def _changed(self) -> Change | None:
        num_steps = self._since_up if self._up >= self._down else self._since_down
        new = list(self._samples)[-num_steps:]
        before, after = self.level, median_of_sorted(sorted(new))
        assert before is not None, "changes are relative to a level"
        self._up = self._down = 0.0
        self._since_up = self._since_down = 0
        if abs(after - before) < constants.SAME_LEVEL:  # a drift: forget old samples
            self._restart(list(self._samples)[-max(num_steps, constants.MIN_LEVEL_STEPS) :])
            return None
        self._restart(new)
        return Change(before=before, after=after, num_steps=num_steps)

    def _restart(self, samples: Sequence[float]) -> None:
        self._samples.clear()
        self._samples.extend(samples)
        self._refreshed_at = 0
        self._refresh()

    def _refresh(self) -> None:
        """Update level and noise; with many samples, only after every eighth one."""
        if len(self._samples) >= 40 and self._seen - self._refreshed_at < 8:
            return
        self._refreshed_at = self._seen
        settled = list(self._samples)[: len(self._samples) - self.suspects]
        if len(settled) < 3:
            return
        self.level = median_of_sorted(sorted(settled))
        self.noise = max(constants.MIN_STEP_NOISE, deviation_from(self.level, settled))


class Durations:
    """How long regimes of one kind last.

    Durations are modelled as exponential with an unknown rate. Given past durations, the time that
    is left then has a Lomax distribution, whose shape is one half (Jeffreys' prior of a rate) plus
    the number of regimes that have ended. Before any has ended, the probability of lasting x times
    as long again as so far is (1 + x)^-1/2. This is heavy-tailed, as real disturbances are: on a
    cluster of 10,000 GPUs they lasted from tens of seconds to nearly ten hours (arXiv:2410.12588).

    Args:
      prior_s: prior duration in seconds, which counts like observed time.
    """

    def __init__(self, prior_s: float) -> None:
        self.prior_s = prior_s
        self.past_s: deque[float] = deque(maxlen=constants.MAX_PAST_REGIMES)
        """Durations of the newest past regimes, in seconds."""

    def ended(self, duration_s: float) -> None:
        """Record the duration of a regime that has ended."""
        self.past_s.append(max(0.0, duration_s))

    def survival(self, elapsed_s: float, further_s: float) -> float:
        """Probability that a regime that has lasted `elapsed_s` lasts `further_s` more."""
        scale, shape = self._scale(elapsed_s), self._shape
        return (scale / (scale + max(0.0, further_s))) ** shape

    def expected_s(self, elapsed_s: float, horizon_s: float) -> float:
        """Expected time that is left, where time after the horizon does not count."""
        scale, shape = self._scale(elapsed_s), self._shape
        if horizon_s <= 0:
            return 0.0
        return min(
            horizon_s,
            -scale / (shape - 1) * math.expm1(-(shape - 1) * math.log1p(horizon_s / scale)),
        )

    def over_s(self, elapsed_s: float, probability: float) -> float:
        """Time from now until the regime is over with this probability."""
        return self._scale(elapsed_s) * ((1 - probability) ** (-1 / self._shape) - 1)

    @property
    def _shape(self) -> float:
        return constants.UNKNOWN_DURATION_SHAPE + len(self.past_s)

    def _scale(self, elapsed_s: float) -> float:
        return self.prior_s + sum(self.past_s) + max(0.0, elapsed_s)
