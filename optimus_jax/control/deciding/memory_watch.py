"""Watches device memory: what something else than the run takes, and whether it grows.

Memory in use is what the plan needs, its estimate times a factor (memory_factor.py), plus what
something else takes. Under one plan only the second changes. If it grows, the plan has to be
replaced in time: before it would run out. If it is large and stays so, that is no reason to leave.
Plans have to leave room for what is taken, and for the error of estimates. Readings above the
device's memory are ignored.
"""

import math
from collections import deque
from dataclasses import replace
from typing import Literal

from optimus_jax.control import constants
from optimus_jax.control.deciding.memory_factor import MemoryFactor
from optimus_jax.control.signals import MEMORY_PEAK_SHARE, MEMORY_SHARE, Observation
from optimus_jax.planning.search.search import USABLE_SHARE, Pricing
from optimus_jax.robust import MAD_TO_DEVIATION

BEHIND = 2 / MAD_TO_DEVIATION
"""Distance from the median to the newest of samples on a line, in robust deviations
(SignalSummary.spread): half their range, where the MAD is a quarter of it."""


class MemoryWatch:
    """Tracks the share of memory that is taken, and how far the run's estimates are off."""

    def __init__(self) -> None:
        self.taken = 0.0
        """Share of each device's memory that plans must not use."""
        self._factor = MemoryFactor()
        self._answered = 0.0
        """The share that the last shortage was answered with; `taken` may be more."""
        self._own: float | None = None
        """True over estimated memory of the present plan; None: not known before the next
        reading."""
        self._is_measured = False
        """Whether that is known from a peak. Memory in use between steps is less."""
        self._settled_s: float | None = -math.inf
        """Time from which readings count; None: not known before the next reading."""
        self._past: deque[tuple[float, float]] = deque()
        """(time, share taken) over the last MAX_MEMORY_GROWTH_S, and one sample before that."""
        self._peak, self._old_peak = math.nan, math.nan
        """The last peak that was read, and the last one under the plan before."""
        self._pressed_s, self._num_pressed = -math.inf, 0
        self._read_s: list[float | None] = []
        """Times of the newest readings."""
        self._now_s = -math.inf
        self.is_pressed = False
        """Whether the present plan has to be replaced."""

    def restart(self) -> None:
        """Begin anew for another plan or batch. The run's factor is kept, and what is taken."""
        self._settled_s, self._own, self._old_peak = None, None, self._peak
        self._is_measured = self.is_pressed = False

    def observe(
        self, observation: Observation, needed_share: float | None
    ) -> Literal["pressed", "relieved"] | None:
        """Add readings. "pressed": the plan has to be replaced by one that needs less memory.
        "relieved": plans may use more memory again. None: neither.

        Args:
          observation: the newest readings.
          needed_share: estimated share of a device's memory that the present plan needs; None:
            unknown.
        """
        self._now_s = observation.time_s
        read_s = [observation.reading(name).time_s for name in (MEMORY_SHARE, MEMORY_PEAK_SHARE)]
        if read_s == self._read_s:  # most steps come without a new reading
            return None
        self._read_s = read_s
        time_s, (used, is_peak) = observation.time_s, self._used(observation)
        self._settled_s = (
            time_s + constants.MEMORY_SETTLING_S if self._settled_s is None else self._settled_s
        )
        if used is None or not needed_share or time_s < self._settled_s:
            return None
        present = self._present(used, needed_share, time_s, is_peak=is_peak)
        self._past.append((time_s, present))
        while len(self._past) > 2 and time_s - self._past[1][0] >= constants.MAX_MEMORY_GROWTH_S:
            self._past.popleft()
        growth, wanted = self._growth(), self._wanted()
        if self.taken and wanted < self.taken - constants.MEMORY_RESERVE_SHARE:
            return self._relieved(time_s)
        # While a switch to save memory is under way, do not ask for another one unless more is
        # taken than the new plan leaves free.
        if (present if self.is_pressed else wanted) <= self._answered or not (
            growth > 0 and used + growth * constants.MEMORY_LEAD_S >= 1.0
        ):
            # The present plan has room for what is taken; another plan might not.
            if (
                present >= constants.MEMORY_RESERVE_SHARE
                and present + constants.MEMORY_RESERVE_SHARE > self.taken
            ):
                self.taken, self._pressed_s = (
                    min(constants.MAX_TAKEN_SHARE, present + constants.MEMORY_RESERVE_SHARE),
                    time_s,
                )
            return None
        self.taken, self._answered, self.is_pressed = max(self.taken, wanted), wanted, True
        self._pressed_s, self._num_pressed = time_s, self._num_pressed + 1
        return "pressed"

    def settle_for_less(self) -> bool:
        """Lower `taken` to what was really taken lately, because no plan does without so much.

        Returns False if it was no higher than that.
        """
        if not self.taken:
            return False
        lately = self._lately()
        is_less = lately < self.taken
        self.taken = min(self.taken, lately)
        self._answered = min(self._answered, self.taken)
        return is_less

    @property
    def left(self) -> float:
        """Memory that plans may be estimated to need, as a share of what the planner allows, in
        whole percents: where it shrinks all the time, each step would need another search.
        """
        most = self._factor.mean + constants.MEMORY_SAFETY_STDS * self._factor.plan_std
        taken = max(self.taken, self._foreseen()) if self.taken else 0.0
        return math.floor(100 * (1 - taken) * min(1.0, 1 / (USABLE_SHARE * most))) / 100

    def applied(self, pricing: Pricing) -> Pricing:
        """The pricing with the memory that is left."""
        capacity = pricing.cluster.accelerator.memory_bytes
        if capacity is None or self.left == 1.0:
            return pricing
        accelerator = replace(
            pricing.cluster.accelerator, memory_bytes=int(capacity * max(0.0, self.left))
        )
        return replace(pricing, cluster=replace(pricing.cluster, accelerator=accelerator))

    def _present(self, used: float, needed: float, time_s: float, *, is_peak: bool) -> float:
        """Share that something else takes; a peak says how far the estimate is off."""
        if is_peak and not self._is_measured:
            self._own, self._factor = self._factor.explained(needed, used, self._expected(time_s))
            self._is_measured = True
        elif self._own is None:
            own = max(0.0, used - self._expected(time_s)) / needed
            self._own = min(self._factor.mean, own)
        if (
            is_peak and used < self._own * needed - constants.MEMORY_READING_STD
        ):  # what counted as needed was taken
            self._own, self._factor = self._factor.learnt(needed, used)
        present = used - self._own * needed
        return present if present > constants.MEMORY_READING_STD else 0.0

    def _used(self, observation: Observation) -> tuple[float | None, bool]:
        """Share of the memory in use, and whether that is a peak; None: unknown or impossible.

        A median lags behind growing samples. The newest of samples on a line is BEHIND deviations
        above the median, and equal samples have no deviation. A peak that equals the one before the
        switch is still that of the plan before.
        """
        peak = _newest(observation, MEMORY_PEAK_SHARE)
        is_peak = peak > 0 and peak != self._old_peak
        self._peak = self._peak if math.isnan(peak) else peak
        used = [_newest(observation, MEMORY_SHARE), *[peak] * is_peak]
        largest = max((share for share in used if share > 0), default=math.nan)
        return (largest if largest <= constants.MAX_MEMORY_SHARE else None), is_peak

    def _expected(self, time_s: float) -> float:
        """Share that is expected to be taken now, extrapolated from the plan before."""
        return (
            self._past[-1][1] + self._growth() * (time_s - self._past[-1][0]) if self._past else 0.0
        )

    def _lately(self) -> float:
        """The largest share that was taken in the last MEMORY_CALM_S."""
        newest_s = self._past[-1][0]
        return max(
            taken for time_s, taken in self._past if newest_s - time_s <= constants.MEMORY_CALM_S
        )

    def _wanted(self) -> float:
        """Share that plans should do without: what was taken lately, and what will be taken if
        growth continues for as long as it has.
        """
        lately = self._lately()
        return self._grown(lately) if lately >= constants.MEMORY_RESERVE_SHARE else 0.0

    def _foreseen(self) -> float:
        """The same if it has grown on since the newest reading: there is none while processes
        restart or a new plan settles.
        """
        return self._grown(self._expected(self._now_s)) if self._past and self._growth() else 0.0

    def _grown(self, share: float) -> float:
        lead_s = max(constants.MEMORY_LEAD_S, self._past[-1][0] - self._begun()[0])
        grown = share + max(constants.MEMORY_RESERVE_SHARE, self._growth() * lead_s)
        return min(constants.MAX_TAKEN_SHARE, grown)

    def _relieved(self, time_s: float) -> Literal["relieved"] | None:
        """Lower `taken` if less has been taken for long enough; each shortage doubles the wait."""
        if (
            time_s - self._past[0][0] < constants.MEMORY_CALM_S
            or time_s - self._pressed_s < constants.MEMORY_SHORT_S * 2**self._num_pressed
        ):
            return None
        self.taken, self.is_pressed = self._wanted(), False
        self._answered = min(self._answered, self.taken)
        return "relieved"

    def _growth(self) -> float:
        """Growth of the share that is taken, per second, after the jump that it began with."""
        time_s, present = self._past[-1]
        since_s, before = self._begun()
        return max(0.0, present - before) / max(constants.MIN_MEMORY_GROWTH_S, time_s - since_s)

    def _begun(self) -> tuple[float, float]:
        """When growth began, as far as known, and the share that was taken then. A large jump is
        not growth, but what follows it is.
        """
        least = min(taken for _, taken in self._past) + constants.MEMORY_READING_STD
        low = max(each for each in self._past if each[1] <= least)
        after = [each for each in self._past if each[0] > low[0]]
        if not after:
            return low
        jumped = max(each for each in after if each[0] <= after[0][0] + constants.MEMORY_JUMP_S)
        return jumped if jumped[1] - low[1] > constants.MEMORY_JUMP_SHARE else low


def _newest(observation: Observation, name: str) -> float:
    """Newest value of a reading, extrapolated from its median; NaN: the reading is not usable."""
    reading = observation.reading(name)
    if (
        reading.quality != "good"
        or reading.value is None
        or (reading.spread or 0.0) > constants.MAX_MEMORY_SPREAD
    ):
        return math.nan
    return reading.value + BEHIND * (reading.spread or 0.0)
