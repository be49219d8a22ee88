"""Memory that something else takes from the run.

What a plan needs is estimated; where the device says that more is in use, the rest is taken by
something else. A reading that is less than the plan needs, or more than there is, says nothing.
"""

import math
from collections import deque
from dataclasses import replace
from typing import Literal

from optimus_jax.control.signals import MEMORY_PEAK_SHARE, MEMORY_SHARE, Observation
from optimus_jax.planning.search.search import Pricing
from optimus_jax.robust import MAD_TO_DEVIATION

PRESSED = 0.93
"""Share in use from which on the plan may not be kept."""
TAKEN = 0.1
"""Least share that counts as taken: estimates are not better than that."""
GROWN = 0.05
"""The same where it grows, which no estimate that is off does."""
LEAD_S = 140.0
"""What is taken more and more has to leave room for so long: a switch is prepared in that time, and
a slow compiler needs most of it."""
LONGEST_S, SHORTEST_S = 300.0, 60.0
"""Over which growth is measured: from where it began, but not from further back or over less."""
CALM_S = 60.0
"""For how long less has to be taken before that counts."""
AGAIN_S = 120.0
"""How long memory that ran short is not called free, at the first time; twice as long at each
further one."""
SETTLING_S = 20.0
"""After a switch, or where another batch has begun, until samples are about what holds now."""
AHEAD = 0.03
"""Beyond what is taken, what is left free because more may be taken soon; so much less has to be
taken to count as less."""
MOST = 0.9
"""Share that is given up at most."""
BEHIND = 2 / MAD_TO_DEVIATION
"""From the middle of samples on a line to their end, in robust deviations (signals.Reading.spread):
half over a quarter of their range, in MADs."""
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
        """Memory in use over what is estimated for the present plan; None: not known before the
        next reading."""
        self._settled_s: float | None = -math.inf
        """When readings begin to count; None: not known before the next one."""
        self._past: deque[tuple[float, float]] = deque()
        """(time, share taken), of the last LONGEST_S and one before."""
        self._peak, self._old_peak = math.nan, math.nan
        """The last one that was read, and the last one under the plan before."""
        self._pressed_s, self._num_pressed = -math.inf, 0
        self._read_s: list[float | None] = []
        """When the newest readings were taken."""
        self._is_pressed = False
        """Whether the present plan is to give way."""

    def restart(self) -> None:
        """Another plan or another batch, whose estimate is off by something else."""
        self._settled_s, self._off, self._old_peak, self._is_pressed = None, None, self._peak, False

    def observe(
        self, observation: Observation, needed_share: float | None
    ) -> Literal["pressed", "relieved"] | None:
        """Whether the plan has to give way, or others no longer have to; None: neither.

        Args:
          needed_share: of a device's memory, estimated for the present plan; None: unknown.
        """
        read_s = [observation.reading(name).time_s for name in (MEMORY_SHARE, MEMORY_PEAK_SHARE)]
        if read_s == self._read_s:  # most steps come without a new reading
            return None
        self._read_s = read_s
        time_s, used = observation.time_s, self._used(observation)
        self._settled_s = time_s + SETTLING_S if self._settled_s is None else self._settled_s
        if used is None or not needed_share or time_s < self._settled_s:
            return None
        if self._off is None:
            self._off = min(OFF[1], max(OFF[0], (used - self._expected(time_s)) / needed_share))
        present = max(0.0, used - self._off * needed_share)
        self._past.append((time_s, present))
        while len(self._past) > 2 and time_s - self._past[1][0] >= LONGEST_S:
            self._past.popleft()
        growth, wanted = self._growth(), self._wanted()
        if self.taken and wanted < self.taken - AHEAD:
            return self._relieved(time_s)
        is_full, will_be_full = (
            present >= TAKEN and used >= PRESSED,
            present >= GROWN and used + growth * LEAD_S >= 1.0,
        )
        # While a switch for it is under way another one has to wait until even that one's plan
        # would not do.
        if (present if self._is_pressed else wanted) <= self.taken or not (
            is_full or (growth > 0 and will_be_full)
        ):
            return None
        self.taken, self._is_pressed = wanted, True
        self._pressed_s, self._num_pressed = time_s, self._num_pressed + 1
        return "pressed"

    def settle_for_less(self) -> bool:
        """No plan does without so much: ask for no more than what is taken already.

        False: that is what was asked for.
        """
        if not self.taken:
            return False
        lately = self._lately()
        is_less = lately < self.taken
        self.taken = min(self.taken, lately)
        return is_less

    def _used(self, observation: Observation) -> float | None:
        """Share of the memory in use; None: not known, or nonsense.

        A median lags behind what grows. Of samples on a line the newest is BEHIND deviations above
        it; of samples that are all alike there is no deviation. A peak that is exactly what it was
        before the switch is still that of the plan before.
        """
        used = [_newest(observation, MEMORY_SHARE)]
        peak = _newest(observation, MEMORY_PEAK_SHARE)
        if peak != self._old_peak:
            used.append(peak)
        self._peak = peak if peak == peak else self._peak
        largest = max((share for share in used if share > 0), default=math.nan)
        return largest if largest <= OVER else None

    def _expected(self, time_s: float) -> float:
        """Share that is taken now, going by what was taken under the plan before."""
        return (
            self._past[-1][1] + self._growth() * (time_s - self._past[-1][0]) if self._past else 0.0
        )

    def _lately(self) -> float:
        """The largest share that was taken in the last while."""
        newest_s = self._past[-1][0]
        return max(taken for time_s, taken in self._past if newest_s - time_s <= CALM_S)

    def _wanted(self) -> float:
        """Share that plans should do without: what was taken lately, and what will be if it goes on
        growing for as long as it has.
        """
        lately, begun_s = self._lately(), self._begun()[0]
        lead_s = max(LEAD_S, self._past[-1][0] - begun_s)
        return min(MOST, lately + max(AHEAD, self._growth() * lead_s)) if lately >= GROWN else 0.0

    def _relieved(self, time_s: float) -> Literal["relieved"] | None:
        """Less is taken: for long enough, and for longer each time that it did not stay so."""
        if (
            time_s - self._past[0][0] < CALM_S
            or time_s - self._pressed_s < AGAIN_S * 2**self._num_pressed
        ):
            return None
        self.taken = self._wanted()
        return "relieved"

    def _growth(self) -> float:
        """Share that is taken more in each second."""
        time_s, present = self._past[-1]
        if time_s - self._past[0][0] < SHORTEST_S:
            return 0.0
        begun_s, before = self._begun()
        return max(0.0, present - before) / max(SHORTEST_S, time_s - begun_s)

    def _begun(self) -> tuple[float, float]:
        """When growth began, as far as is known, and the share taken then."""
        return max(
            ((when_s, taken) for when_s, taken in self._past if taken < GROWN / 2),
            default=self._past[0],
        )

    def applied(self, pricing: Pricing) -> Pricing:
        """Prices with the memory that is left."""
        capacity = pricing.cluster.accelerator.memory_bytes
        if not self.taken or capacity is None:
            return pricing
        accelerator = replace(
            pricing.cluster.accelerator, memory_bytes=int(capacity * max(0.0, 1 - self.taken))
        )
        return replace(pricing, cluster=replace(pricing.cluster, accelerator=accelerator))


def _newest(observation: Observation, name: str) -> float:
    """Of a reading that counts; NaN: it says nothing."""
    reading = observation.reading(name)
    if reading.quality != "good" or reading.value is None or (reading.spread or 0.0) > WIDEST:
        return math.nan
    return reading.value + BEHIND * (reading.spread or 0.0)
