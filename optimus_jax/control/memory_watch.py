"""Memory that something else takes from the run.

What a plan needs is estimated; where the device says that more is in use, the rest is taken by something else. A
reading that is less than the plan needs, or more than there is, says nothing.
"""

import math
from collections import deque
from dataclasses import replace
from typing import Literal

from optimus_jax.control.signals import MEMORY_PEAK_SHARE, MEMORY_SHARE, Observation
from optimus_jax.planning.search import Pricing

PRESSED = 0.93
"""Share in use from which on the plan may not be kept."""
TAKEN = 0.1
"""Least share that counts as taken: estimates are not better than that."""
GROWN = 0.05
"""The same where it grows, which no estimate that is off does."""
LEAD_S = 120.0
"""What is taken more and more has to leave room for so long: a switch is prepared in that time."""
TREND_S = 60.0
"""Over which growth is measured, and for how long nothing has to be taken before the memory counts as free."""
SETTLING_S = 120.0
"""After a switch, or where another batch has begun, until a window of samples is about what holds now."""
AHEAD = 0.1
"""Beyond what is taken, what is left free because more may be taken soon."""
MOST = 0.9
"""Share that is given up at most."""
BEHIND = 2 / 1.4826
"""From the middle of samples on a line to their end, in robust deviations (signals.Reading.spread): half over a quarter of their range, in MADs."""
WIDEST = 0.1
"""Deviation of samples beyond which they are of two plans, and their median is of neither."""
OVER = 1.05
"""More of the memory than there is, by which a reading is nonsense."""
OFF = (0.8, 1.25)
"""By what factor estimates may be off."""


class MemoryWatch:
    """Follows what is taken."""

    def __init__(self) -> None:
        self.taken = 0.0
        """Share of each device's memory that plans have to do without."""
        self._off: float | None = None
        """Memory in use over what was estimated, at the start of the run."""
        self._settled_s: float | None = -math.inf
        """When readings begin to count; None: not known before the next one."""
        self._past: deque[tuple[float, float]] = deque()
        """(time, share taken), of the last TREND_S and one before."""
        self._pressed_s, self._num_pressed = -math.inf, 0

    def restart(self) -> None:
        """Another plan or another batch."""
        self._settled_s = None
        self._past.clear()

    def observe(self, observation: Observation, needed_share: float | None) -> Literal["pressed", "relieved"] | None:
        """Whether the plan has to give way, or others no longer have to; None: neither.

        Args:
          needed_share: of a device's memory, estimated for the present plan; None: unknown.
        """
        time_s, used = observation.time_s, _used(observation)
        self._settled_s = time_s + SETTLING_S if self._settled_s is None else self._settled_s
        if used is None or needed_share is None or time_s < self._settled_s:
            return None
        self._off = min(OFF[1], max(OFF[0], used / needed_share)) if self._off is None else self._off
        present = max(0.0, used - self._off * needed_share)
        self._past.append((time_s, present))
        while len(self._past) > 2 and time_s - self._past[1][0] >= TREND_S:
            self._past.popleft()
        growth = self._growth()
        if self.taken and self._wanted(growth) < self.taken - TAKEN:
            return self._relieved(time_s, growth)
        is_full, will_be_full = present >= TAKEN and used >= PRESSED, present >= GROWN and used + growth * LEAD_S >= 1.0
        if present < self.taken or not (is_full or (growth > 0 and will_be_full)):
            return None
        self.taken = self._wanted(growth)
        self._pressed_s, self._num_pressed = time_s, self._num_pressed + 1
        return "pressed"

    def _wanted(self, growth: float) -> float:
        """Share that plans should do without: what was taken lately, and what will be soon."""
        lately = max(taken for _, taken in self._past)
        return min(MOST, lately + max(AHEAD, growth * LEAD_S)) if lately >= GROWN else 0.0

    def _relieved(self, time_s: float, growth: float) -> Literal["relieved"] | None:
        """Less is taken: for long enough, and for longer each time that it did not stay so."""
        if time_s - self._past[0][0] < TREND_S or time_s - self._pressed_s < SETTLING_S * 2**self._num_pressed:
            return None
        self.taken = self._wanted(growth)
        return "relieved"

    def _growth(self) -> float:
        """Share that is taken more in each second."""
        (begun_s, before), (time_s, present) = self._past[0], self._past[-1]
        return max(0.0, present - before) / (time_s - begun_s) if time_s - begun_s >= TREND_S else 0.0

    def applied(self, pricing: Pricing) -> Pricing:
        """Prices with the memory that is left."""
        capacity = pricing.cluster.accelerator.memory_bytes
        if not self.taken or capacity is None:
            return pricing
        accelerator = replace(pricing.cluster.accelerator, memory_bytes=int(capacity * max(0.0, 1 - self.taken)))
        return replace(pricing, cluster=replace(pricing.cluster, accelerator=accelerator))


def _used(observation: Observation) -> float | None:
    """Share of the memory in use; None: not known, or nonsense.

    A median lags behind what grows. Of samples on a line the newest is BEHIND deviations above it; of samples that are
    all alike there is no deviation.
    """
    readings = [observation.reading(MEMORY_PEAK_SHARE), observation.reading(MEMORY_SHARE)]
    used = [reading.value + BEHIND * (reading.spread or 0.0) for reading in readings
            if reading.quality == "good" and reading.value is not None and (reading.spread or 0.0) <= WIDEST]
    largest = max((share for share in used if share > 0), default=math.nan)
    return largest if largest <= OVER else None
