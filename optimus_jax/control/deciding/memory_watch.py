"""Detects device memory that something else than the run uses ("taken" memory).

The memory that a plan needs is estimated. If the device reports more in use, the rest is taken by
something else. Readings below the plan's need, or above the device's memory, are ignored.
"""

import math
from collections import deque
from dataclasses import replace
from typing import Literal

from optimus_jax.control.signals import MEMORY_PEAK_SHARE, MEMORY_SHARE, Observation
from optimus_jax.planning.search.search import Pricing
from optimus_jax.robust import MAD_TO_DEVIATION

PRESSED = 0.93
"""Share of memory in use from which the plan has to be replaced."""
TAKEN = 0.1
"""Smallest share that counts as taken: estimates are no more accurate than that."""
GROWN = 0.05
"""The same while the share grows, which an estimation error does not do."""
LEAD_S = 140.0
"""A growing share has to leave room for this long, in seconds, in which a switch is prepared. A
slow compiler needs most of it."""
LONGEST_S, SHORTEST_S = 300.0, 60.0
"""Longest and shortest time over which growth is measured, from where it began."""
CALM_S = 60.0
"""How long less memory has to be taken before that counts."""
AGAIN_S = 120.0
"""How long memory is not called free after it ran short; doubled each time that it does."""
SETTLING_S = 20.0
"""Time after a switch or a change of batch until samples describe the new state."""
AHEAD = 0.03
"""Share kept free beyond what is taken, because more may be taken soon. The share that is taken has
to fall by as much to count as less."""
MOST = 0.9
"""Largest share that plans have to do without."""
BEHIND = 2 / MAD_TO_DEVIATION
"""Distance from the median to the newest of samples on a line, in robust deviations
(SignalSummary.spread): half their range, where the MAD is a quarter of it."""
WIDEST = 0.1
"""Spread beyond which samples come from two plans, so that their median fits neither."""
OVER = 1.05
"""Share of memory in use above which a reading is ignored as impossible."""
OFF = (0.8, 1.25)
"""Smallest and largest factor by which estimates may be off."""


class MemoryWatch:
    """Tracks the share of memory that is taken."""

    def __init__(self) -> None:
        self.taken = 0.0
        """Share of each device's memory that plans must not use."""
        self._answered = 0.0
        """The share that the last shortage was answered with; `taken` may be more."""
        self._off: float | None = None
        """Memory that the present plan uses over its estimate; None: not known before the next
        reading."""
        self._settled_s: float | None = -math.inf
        """Time from which readings count; None: not known before the next reading."""
        self._past: deque[tuple[float, float]] = deque()
        """(time, share taken) over the last LONGEST_S, and one sample before that."""
        self._peak, self._old_peak = math.nan, math.nan
        """The last peak that was read, and the last one under the plan before."""
        self._pressed_s, self._num_pressed = -math.inf, 0
        self._read_s: list[float | None] = []
        """Times of the newest readings."""
        self._is_pressed = False
        """Whether the present plan has to be replaced."""

    def restart(self) -> None:
        """Begin anew for another plan or batch, whose estimate has another error."""
        self._settled_s, self._off, self._old_peak, self._is_pressed = None, None, self._peak, False

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
        # While a switch to save memory is under way, do not ask for another one unless more is
        # taken than the new plan leaves free.
        if (present if self._is_pressed else wanted) <= self._answered or not (
            is_full or (growth > 0 and will_be_full)
        ):
            # The present plan has room for what is taken; another plan might not.
            if present >= TAKEN and present + AHEAD > self.taken:
                self.taken, self._pressed_s = min(MOST, present + AHEAD), time_s
            return None
        self.taken, self._answered, self._is_pressed = max(self.taken, wanted), wanted, True
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

    def _used(self, observation: Observation) -> float | None:
        """Share of the memory in use; None: unknown or impossible.

        A median lags behind growing samples. The newest of samples on a line is BEHIND deviations
        above the median, and equal samples have no deviation. A peak that equals the one before the
        switch is still that of the plan before.
        """
        used = [_newest(observation, MEMORY_SHARE)]
        peak = _newest(observation, MEMORY_PEAK_SHARE)
        if peak != self._old_peak:
            used.append(peak)
        self._peak = peak if peak == peak else self._peak
        largest = max((share for share in used if share > 0), default=math.nan)
        return largest if largest <= OVER else None

    def _expected(self, time_s: float) -> float:
        """Share that is expected to be taken now, extrapolated from the plan before."""
        return (
            self._past[-1][1] + self._growth() * (time_s - self._past[-1][0]) if self._past else 0.0
        )

    def _lately(self) -> float:
        """The largest share that was taken in the last CALM_S."""
        newest_s = self._past[-1][0]
        return max(taken for time_s, taken in self._past if newest_s - time_s <= CALM_S)

    def _wanted(self) -> float:
        """Share that plans should do without: what was taken lately, and what will be taken if
        growth continues for as long as it has.
        """
        lately, begun_s = self._lately(), self._begun()[0]
        lead_s = max(LEAD_S, self._past[-1][0] - begun_s)
        return min(MOST, lately + max(AHEAD, self._growth() * lead_s)) if lately >= GROWN else 0.0

    def _relieved(self, time_s: float) -> Literal["relieved"] | None:
        """Lower `taken` if less has been taken for long enough; each shortage doubles the wait."""
        if (
            time_s - self._past[0][0] < CALM_S
            or time_s - self._pressed_s < AGAIN_S * 2**self._num_pressed
        ):
            return None
        self.taken = self._wanted()
        self._answered = min(self._answered, self.taken)
        return "relieved"

    def _growth(self) -> float:
        """Growth of the share that is taken, per second."""
        time_s, present = self._past[-1]
        if time_s - self._past[0][0] < SHORTEST_S:
            return 0.0
        begun_s, before = self._begun()
        return max(0.0, present - before) / max(SHORTEST_S, time_s - begun_s)

    def _begun(self) -> tuple[float, float]:
        """When growth began, as far as known, and the share that was taken then."""
        return max(
            ((when_s, taken) for when_s, taken in self._past if taken < GROWN / 2),
            default=self._past[0],
        )

    def applied(self, pricing: Pricing) -> Pricing:
        """The pricing with the memory that is left."""
        capacity = pricing.cluster.accelerator.memory_bytes
        if not self.taken or capacity is None:
            return pricing
        accelerator = replace(
            pricing.cluster.accelerator, memory_bytes=int(capacity * max(0.0, 1 - self.taken))
        )
        return replace(pricing, cluster=replace(pricing.cluster, accelerator=accelerator))


def _newest(observation: Observation, name: str) -> float:
    """Newest value of a reading, extrapolated from its median; NaN: the reading is not usable."""
    reading = observation.reading(name)
    if reading.quality != "good" or reading.value is None or (reading.spread or 0.0) > WIDEST:
        return math.nan
    return reading.value + BEHIND * (reading.spread or 0.0)
