"""Timeline of a simulated run: a scenario's events as intervals of constant conditions."""

import bisect
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from optimus_jax.planning.profiles.cluster import INTER_HOST, INTRA_HOST
from optimus_jax.simulation.events import (
    ComputeEvent,
    DataEvent,
    LinkEvent,
    LostEvent,
    MemoryEvent,
    Timed,
)
from optimus_jax.simulation.scenarios import Scenario

RAMP_LEVELS = 8
"""Smallest number of levels in which a ramp grows to its full size."""
LEVEL_S = 150.0
"""Longest time that a ramp stays at one level."""
HORIZON = 30
"""Multiple of the undisturbed run's duration after which conditions no longer change."""


@dataclass(frozen=True, kw_only=True)
class ClusterConditions:
    """Conditions of the simulated cluster at one moment."""

    intra_host: float = 1.0
    """Factor on the speed of the link inside hosts."""
    inter_host: float = 1.0
    """Factor on the speed of the link between hosts."""
    slow: tuple[tuple[int, float], ...] = ()
    """Slow devices, in rising order, each with the factor on its compute time."""
    taken: float = 0.0
    """Share of every device's memory that something else takes."""
    wait_s: float = 0.0
    """Seconds for which steps of the first plan, in normal conditions, wait for their batch."""
    lost: frozenset[int] = frozenset()
    """Devices that are lost."""
    reported: frozenset[int] = frozenset()
    """Devices that are reported bad: those that are lost, and those that soon will be."""


NORMAL = ClusterConditions()


@dataclass(frozen=True)
class _Interval:
    """An event in an interval of time, at a share (`level`) of its full size."""

    event: Timed
    start_s: float
    end_s: float
    level: float


class Timeline:
    """Conditions by time. They change only at `bounds_s`.

    Args:
      scenario: the scenario whose timed events happen.
      num_devices, devices_per_host: size of the cluster.
      horizon_s: conditions do not change after this time.
      seed: draws the jitter.
      began_s: start times of the events that a phase of a switch has begun early
        (`LostEvent.during`).
    """

    def __init__(
        self,
        scenario: Scenario,
        *,
        num_devices: int,
        devices_per_host: int,
        horizon_s: float,
        seed: int,
        began_s: Mapping[LostEvent, float] | None = None,
    ):
        self._num_devices, self._devices_per_host = num_devices, devices_per_host
        self._intervals = [
            interval
            for place, event in enumerate(scenario.events)
            if isinstance(event, Timed)
            for interval in _intervals(
                event, (began_s or {}), horizon_s, np.random.default_rng([seed, place])
            )
        ]
        times = {
            0.0,
            *[
                time
                for each in self._intervals
                for time in (each.start_s, each.end_s)
                if time < horizon_s
            ],
        }
        times |= {
            max(0.0, each.start_s - each.event.notice_s)
            for each in self._intervals
            if isinstance(each.event, LostEvent)
        }
        self.bounds_s = sorted(times)
        self._known: dict[int, ClusterConditions] = {}

    def index(self, time_s: float) -> int:
        """Index of the interval that contains this time."""
        return bisect.bisect_right(self.bounds_s, time_s) - 1

    def end_s(self, index: int) -> float:
        """When this interval ends."""
        return self.bounds_s[index + 1] if index + 1 < len(self.bounds_s) else np.inf

    def at(self, time_s: float) -> ClusterConditions:
        """The conditions at this time."""
        return self.conditions(self.index(time_s))

    def conditions(self, index: int) -> ClusterConditions:
        """The conditions in this interval."""
        if index not in self._known:
            self._known[index] = self._made(self.bounds_s[index])
        return self._known[index]

    def _made(self, time_s: float) -> ClusterConditions:
        link, slow = {INTRA_HOST: 1.0, INTER_HOST: 1.0}, dict[int, float]()
        taken, wait_s = 0.0, 0.0
        lost, reported = set[int](), set[int]()
        for each in self._intervals:
            event, active = each.event, each.start_s <= time_s < each.end_s
            if isinstance(event, LostEvent):
                devices = self._devices(event.devices, event.host)
                lost |= devices if active else set()
                reported |= (
                    devices if each.start_s - event.notice_s <= time_s < each.end_s else set()
                )
            elif not active:
                continue
            elif isinstance(event, LinkEvent):
                link[event.link] *= event.factor**each.level
            elif isinstance(event, ComputeEvent):
                for device in self._devices(event.devices, event.host) or range(self._num_devices):
                    slow[device] = slow.get(device, 1.0) * event.factor**each.level
            elif isinstance(event, MemoryEvent):
                taken = 1 - (1 - taken) * (1 - event.share * each.level)
            elif isinstance(event, DataEvent):
                wait_s += event.wait_s * each.level
        return ClusterConditions(
            **link,
            slow=tuple(sorted(slow.items())),
            taken=taken,
            wait_s=wait_s,
            lost=frozenset(lost),
            reported=frozenset(reported),
        )

    def _devices(self, devices: Sequence[int], host: int | None) -> set[int]:
        """These devices and those of the host, as far as the cluster has them."""
        of_host = (
            range(host * self._devices_per_host, (host + 1) * self._devices_per_host)
            if host is not None
            else ()
        )
        return {device for device in (*devices, *of_host) if device < self._num_devices}


def _intervals(
    event: Timed, began_s: Mapping[LostEvent, float], horizon_s: float, random: np.random.Generator
) -> Iterator[_Interval]:
    for start_s in _starts(event, began_s, horizon_s, random):
        end_s = horizon_s if event.for_s is None else start_s + event.for_s
        levels = max(RAMP_LEVELS, math.ceil(event.ramp_s / LEVEL_S)) if event.ramp_s else 1
        for level in range(1, levels + 1):
            begins_s = start_s + event.ramp_s * (level - 1) / levels
            ends_s = (
                end_s if level == levels else min(end_s, start_s + event.ramp_s * level / levels)
            )
            if begins_s < ends_s:
                yield _Interval(event, begins_s, ends_s, level / levels)


def _starts(
    event: Timed, began_s: Mapping[LostEvent, float], horizon_s: float, random: np.random.Generator
) -> Iterator[float]:
    if isinstance(event, LostEvent) and event in began_s:
        yield began_s[event]
        return
    for number in itertools.count():
        # Draw for the first start too, so that later ones do not depend on what comes before.
        off = event.jitter * random.uniform(-1.0, 1.0)
        start_s = event.start_s + (number + (off if number else 0.0)) * (event.every_s or 0.0)
        if start_s >= horizon_s or (
            number and event.until_s is not None and start_s >= event.until_s
        ):
            return
        yield start_s
        if event.every_s is None:
            return
