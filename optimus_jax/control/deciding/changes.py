"""When step times have changed for good, and how long such a regime is going to last.

A *regime* is a stretch of time in which step times scatter about one level. A change is found by
two sums of log-likelihood ratios (Page 1954, doi:10.1093/biomet/41.1-2.100), one for each
direction, whose terms are bounded: no spike counts for more than one vote, so several steps in a
row have to agree.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from optimus_jax.robust import deviation_from, median_of_sorted

SHIFT = math.log(1.1)
"""Least change of the logarithm of a step time that is looked for."""
VOTES = 5
"""Fewest steps in a row that can tell of a change; spikes in p of all steps do it about once in
p^-5."""
BACK = 3
"""Fewest steps in a row that can tell that a level is again what it was before the last change."""
APART = 5.0
"""Deviations of a sample between those levels at least: less could be noise."""
THRESHOLD = 12.0
"""Of a sum: odds of e^12 for a change."""
LEAST = 8
"""Samples of a regime before a change can be told."""
UNSURE = 1.0
"""Of the deviation of a mean, that a level may be off by."""
KEPT = 200
"""Samples that a level rests on, the newest."""
LARGEST = 50.0
"""Logarithm of a time that there can be: e^50 s are longer than there has been time."""
LEAST_NOISE = 0.01
"""Deviation of the logarithm of step times that is always allowed for."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """One regime has ended, another begun."""

    before: float
    """Level of the old one: logarithm of seconds."""
    after: float
    """Of the new one."""
    num_steps: int
    """Samples of the new one so far."""


class ChangeDetector:
    """Finds changes of at least `SHIFT` in a sequence of logarithms."""

    def __init__(self) -> None:
        self._samples: deque[float] = deque(maxlen=KEPT)
        self._up = self._down = 0.0
        self._since_up = self._since_down = 0
        self._refreshed_at = self._seen = 0
        self._former: float | None = None
        """Level before the last change; None: there was none."""
        self.level: float | None = None
        """Median of the regime, without samples that may belong to the next; None below three
        samples."""
        self.noise = LEAST_NOISE
        """Robust deviation of a sample."""

    @property
    def count(self) -> int:
        """Samples that the level rests on."""
        return len(self._samples) - self._suspects

    @property
    def suspects(self) -> int:
        """The newest samples that may belong to another regime."""
        return self._suspects

    @property
    def _suspects(self) -> int:
        return max(self._since_up, self._since_down)

    def recent(self, count: int) -> float | None:
        """Median of the newest `count` samples; None if there are fewer."""
        return (
            None
            if len(self._samples) < count
            else median_of_sorted(sorted(list(self._samples)[-count:]))
        )

    def in_a_row(self, before: float, after: float) -> int:
        """How many of the newest samples in a row are nearer to `after` than to `before`."""
        count = 0
        for value in reversed(self._samples):
            if abs(value - after) >= abs(value - before):
                break
            count += 1
        return count

    def begin_with(self, count: int) -> None:
        """A regime is known to have begun with the newest `count` samples."""
        self._up = self._down = 0.0
        self._since_up = self._since_down = 0
        self._former, self.level = self.level, None
        self._restart(list(self._samples)[len(self._samples) - count :])

    def add(self, value: float) -> Change | None:
        """Take a sample; what has changed, if that has become clear.

        What cannot be a logarithm of seconds is left out.
        """
        if not abs(value) < LARGEST:
            return None
        if len(self._samples) >= LEAST and self.level is not None:
            self._vote(value - self.level)
        self._samples.append(value)
        self._seen += 1
        if max(self._up, self._down) >= THRESHOLD or self._is_back():
            return self._changed()
        self._refresh()
        return None

    def _vote(self, off: float) -> None:
        # With few samples neither level nor noise are known well.
        variance = self.noise**2 * (1.0 + 6.0 / len(self._samples))
        bound = THRESHOLD / VOTES
        slack = UNSURE * self.noise / math.sqrt(len(self._samples))
        for_up, for_down = (
            SHIFT * (sign * off - SHIFT / 2 - slack) / variance for sign in (1.0, -1.0)
        )
        self._up = max(0.0, self._up + min(bound, max(-bound, for_up)))
        self._down = max(0.0, self._down + min(bound, max(-bound, for_down)))
        # Float sums of votes: five times a fifth of the threshold has to reach it.
        self._up, self._down = round(self._up, 9), round(self._down, 9)
        self._since_up = self._since_up + 1 if self._up > 0 else 0
        self._since_down = self._since_down + 1 if self._down > 0 else 0

    def _is_back(self) -> bool:
        """Whether the newest samples are at the level before the last change, which takes fewer of
        them than one that was never seen.
        """
        if (
            self._former is None
            or self.level is None
            or self._suspects < BACK
            or abs(self._former - self.level) < max(SHIFT, APART * self.noise)
        ):
            return False
        near = max(SHIFT / 2, UNSURE * self.noise)
        return all(abs(value - self._former) < near for value in list(self._samples)[-BACK:])

    def _changed(self) -> Change | None:
        num_steps = self._since_up if self._up >= self._down else self._since_down
        new = list(self._samples)[-num_steps:]
        before, after = self.level, median_of_sorted(sorted(new))
        assert before is not None, "votes are cast against a level"
        self._up = self._down = 0.0
        self._since_up = self._since_down = 0
        if abs(after - before) < SHIFT / 2:  # a drift: what is old no longer counts
            self._restart(list(self._samples)[-max(num_steps, LEAST) :])
            return None
        self._former = before
        self._restart(new)
        return Change(before=before, after=after, num_steps=num_steps)

    def _restart(self, samples: Sequence[float]) -> None:
        self._samples.clear()
        self._samples.extend(samples)
        self._refreshed_at = 0
        self._refresh()

    def _refresh(self) -> None:
        """Level and noise; of many samples not after each."""
        if len(self._samples) >= 40 and self._seen - self._refreshed_at < 8:
            return
        self._refreshed_at = self._seen
        settled = list(self._samples)[: len(self._samples) - self._suspects]
        if len(settled) < 3:
            return
        self.level = median_of_sorted(sorted(settled))
        self.noise = max(LEAST_NOISE, deviation_from(self.level, settled))


class Durations:
    """How long regimes of one kind last.

    Exponential with a rate that is not known: given past durations, the time that is left has a
    Lomax distribution. Its shape is that of Jeffreys' prior of a rate, one half, and one more for
    each that has ended. Before any has, the chance to last x times as long again as so far is (1 +
    x)^-1/2: heavy-tailed, as disturbances are: on a cluster of 10,000 GPUs they lasted from tens of
    seconds to nearly ten hours (arXiv:2410.12588). "Wait until what staying has lost is a good part
    of what switching costs" (ski rental) is the special case of switching when the odds of earning
    the cost back are even.

    Args:
      prior_s: how long one is expected to have lasted when nothing is known at all.
    """

    UNKNOWN_SHAPE = 0.5
    """Of the distribution before any has ended: Gamma(1/2, 0) is Jeffreys' prior of a Poisson rate
    (doi:10.1098/rspa.1946.0056)."""
    LEARNT_FROM = 8
    """Past regimes that count, the newest."""

    def __init__(self, prior_s: float) -> None:
        self.prior_s = prior_s
        self.past_s: deque[float] = deque(maxlen=self.LEARNT_FROM)
        """How long the regimes lasted that it was learnt from."""

    def ended(self, duration_s: float) -> None:
        """One lasted so long."""
        self.past_s.append(max(0.0, duration_s))

    def survival(self, elapsed_s: float, further_s: float) -> float:
        """Probability that one that has lasted `elapsed_s` lasts `further_s` more."""
        scale, shape = self._scale(elapsed_s), self._shape
        return (scale / (scale + max(0.0, further_s))) ** shape

    def expected_s(self, elapsed_s: float, horizon_s: float) -> float:
        """Expected time left, or the horizon if that comes first."""
        scale, shape = self._scale(elapsed_s), self._shape
        if horizon_s <= 0:
            return 0.0
        return min(
            horizon_s,
            -scale / (shape - 1) * math.expm1(-(shape - 1) * math.log1p(horizon_s / scale)),
        )

    def wait_s(self, elapsed_s: float, further_s: float, probability: float) -> float:
        """How much longer it has to last until it is expected, with `probability`, to last
        `further_s` more.
        """
        needed = further_s / (probability ** (-1 / self._shape) - 1)
        return max(0.0, needed - self._scale(elapsed_s))

    def over_s(self, elapsed_s: float, probability: float) -> float:
        """After how much more time it is over with this probability."""
        return self._scale(elapsed_s) * ((1 - probability) ** (-1 / self._shape) - 1)

    @property
    def _shape(self) -> float:
        return self.UNKNOWN_SHAPE + len(self.past_s)

    def _scale(self, elapsed_s: float) -> float:
        return self.prior_s + sum(self.past_s) + max(0.0, elapsed_s)
