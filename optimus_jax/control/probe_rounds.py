"""Rounds of probes at step boundaries: when they are due within a budget, and their results.

In a round every process times all-reduces along each mesh axis and some matmuls, then all processes
exchange their times. The next round depends on exchanged numbers only, so all processes begin it at
the same step.
"""

import math
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from statistics import median_low

import jax
import numpy as np
from jax.experimental import multihost_utils

from optimus_jax.control.baselines import SCATTER, Baseline, Baselines, byte_part_s
from optimus_jax.control.mesh_probes import Programs
from optimus_jax.control.signals import (
    COMPUTE_SLOWDOWN,
    FEW,
    LINK_SLOWDOWN,
    PROCESS_TIME,
)

GatherSamples = Callable[[np.ndarray], np.ndarray]
"""Gathers the values of all P processes: [N] of this process -> [P, N]."""
LONGEST_S = 0.2
"""A large message that would take longer than this, in seconds, by the time of the small one, is
skipped: on a link that has become slow, one round would use up the budget of many. Small messages
between virtual CPU devices take one or two scheduler time slices of 4 ms; the limit is high enough
that this does not count as a slow link."""
LOAN = 1.0
"""How far a requested round may overdraw the budget, in costs of a round."""
URGENT_LOAN = 5.0
"""The same for an urgent round: enough for a disturbance and its end, but not for every spike of a
noisy machine."""


class Budget:
    """Decides when rounds are due: as often as their cost allows, with the cost of one round kept
    in reserve for requests.

    The first round overdraws the budget, and a requested round may overdraw it by LOAN. When steps
    have changed, the reason has to be found at once: such an urgent round may overdraw it by
    URGENT_LOAN, and regular rounds are delayed until that is paid back. A requested round that
    costs at most its `worth_s` is due in any case: steps have become so slow that a round is cheap
    in comparison.

    Args:
      share: share of wall time that rounds may take.
    """

    def __init__(self, share: float) -> None:
        self._share = share
        self._last_step: int | None = None
        self._cost_s = self._step_time_s = 0.0
        self._left_s = 0.0
        self._asked_at: int | None = None
        self._is_urgent, self._worth_s = False, 0.0

    def is_due(self, step: int) -> bool:
        """Whether a round is due after `step`; every process gets the same answer."""
        if not self._share or self._last_step is None:
            return bool(self._share)
        is_asked = self._asked_at is not None and step >= self._asked_at
        if is_asked and self._cost_s <= self._worth_s:
            return True
        return self._left_at(step) >= self._cost_s * (
            (-URGENT_LOAN if self._is_urgent else -LOAN) if is_asked else 2
        )

    def ask(self, step: int, *, urgent: bool = False, worth_s: float = 0.0) -> None:
        """Request a round after `step`, or as soon as the budget allows.

        Every process has to make the same request.

        Args:
          step: the earliest step for the round.
          urgent: it may overdraw the budget by more.
          worth_s: seconds that it may take at no cost to the budget.
        """
        self._asked_at = step
        self._is_urgent |= urgent
        self._worth_s = max(self._worth_s, worth_s)

    def spent(self, step: int, cost_s: float, step_time_s: float) -> None:
        """Charge a round after `step` that took `cost_s`; steps now take `step_time_s`. One that
        nobody asked for ends what an earlier request was worth.

        Both times are exchanged numbers, the same in every process.
        """
        self._worth_s = 0.0 if self._asked_at is None else self._worth_s
        paid_s = min(cost_s, self._worth_s)
        self._left_s = (0.0 if self._last_step is None else self._left_at(step)) - (cost_s - paid_s)
        self._worth_s -= paid_s
        self._last_step, self._cost_s, self._step_time_s, self._asked_at, self._is_urgent = (
            step,
            cost_s,
            step_time_s,
            None,
            False,
        )

    @property
    def interval_s(self) -> float:
        """Seconds until the next round, if none is requested; infinite before the first."""
        return (
            max(0.0, 2 * self._cost_s - self._left_s) / self._share
            if self._last_step is not None
            else math.inf
        )

    def _left_at(self, step: int) -> float:
        assert self._last_step is not None
        return self._left_s + self._share * self._step_time_s * (step - self._last_step)


class ProbeRounds:
    """Runs the probe rounds of one mesh.

    Args:
      programs: the programs to time.
      links: the link that each mesh axis crosses, `intra_host` or `inter_host`
        (planning/profiles/cluster.py).
      baselines: how long probes take when nothing is wrong.
      budget: decides when rounds are due.
      exchange: gathers values of all processes; None: JAX's all-gather.
      lost: returns the ids of devices that must not be used.
      clock: returns the time in seconds.
    """

    def __init__(
        self,
        programs: Programs,
        links: Mapping[str, str],
        baselines: Baselines,
        budget: Budget,
        *,
        exchange: GatherSamples | None = None,
        lost: Callable[[], Collection[int]] = frozenset,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.budget = budget
        self.at_first: list[dict[str, float]] = []
        """Samples of links, by signal: one dict for each measurement before the first step on this
        mesh."""
        self._programs, self._links, self._baselines = programs, links, baselines
        self._messages = self._small_bytes, self._large_bytes = programs.messages
        self._exchange, self._lost, self._clock = exchange or _among_processes, lost, clock

    def settle(self) -> None:
        """Run all probes once before the first step on this mesh, since a first run also connects
        devices.

        They run FEW more times if baselines have to be learnt, or if a link has changed since it
        was last probed: one sample proves nothing. `at_first` has the results for links. The budget
        is not charged.
        """
        works = [
            self._programs.work(axis, num_bytes)
            for axis in self._programs.axes
            for num_bytes in self._messages
        ] + [self._programs.compute]
        is_known = all(self._baselines.of(work) is not None for work in works)
        before = dict(self._baselines.slowdowns)
        found = self._measure(0.0)
        if is_known:
            self._gauge(found)
            self.at_first = [self._link_samples(found)]
        if not is_known or any(
            abs(math.log(now / before.get(name, 1.0))) > SCATTER
            for name, now in self._baselines.slowdowns.items()
        ):
            self.at_first = [
                self._link_samples(self._learnt(self._measure(0.0))) for _ in range(FEW)
            ]

    def run(self, step: int, *, step_time_s: float) -> dict[str, float]:
        """Run a round after `step`, which the devices have finished; every process has to call it.

        Args:
          step: the last step done.
          step_time_s: time of the newest steps.
        Returns:
          Samples by signal; a signal without a baseline is left out.
        """
        found = self._measure(step_time_s)
        self.budget.spent(step, max(found.cost_s), min(found.step_time_s))
        self._learnt(found)
        return self._link_samples(found) | self._compute_sample(found) | self._skew_samples(found)

    def sources(self) -> dict[str, str]:
        """The source of each signal's baseline; a signal without a baseline is left out."""
        found = {
            LINK_SLOWDOWN + axis: self._baselines.of(self._programs.work(axis, self._large_bytes))
            for axis in self._programs.axes
        }
        found[COMPUTE_SLOWDOWN] = self._baselines.of(self._programs.compute)
        return {name: baseline.source for name, baseline in found.items() if baseline is not None}

    def _measure(self, step_time_s: float) -> "_ProbeTimes":
        start_s, axes = self._clock(), self._programs.axes
        small_s = self._fastest([self._programs.time_s(axis, self._small_bytes) for axis in axes])
        # Decided by exchanged numbers: all processes have to skip the same messages.
        affordable = [
            axis
            for axis, time_s in zip(axes, small_s, strict=True)
            if time_s * self._large_bytes / self._small_bytes <= LONGEST_S
        ]
        large_s = [self._programs.time_s(axis, self._large_bytes) for axis in affordable]
        outside = self._programs.outside_ratios(self._lost())
        own = [self._programs.compute_time_s(), step_time_s, self._clock() - start_s]
        everyones = self._exchange(np.array([*large_s, *own], np.float32)).astype(float)
        compute_s, steps_s, cost_s = everyones[:, len(large_s) :].T.tolist()
        return _ProbeTimes(
            small_s=dict(zip(axes, small_s, strict=True)),
            large_s=dict(
                zip(affordable, everyones[:, : len(large_s)].min(axis=0).tolist(), strict=True)
            ),
            compute_s=compute_s,
            step_time_s=steps_s,
            cost_s=cost_s,
            outside=outside,
        )

    def _fastest(self, own_s: list[float]) -> list[float]:
        """The shortest times among processes: the last one to enter a collective waits for none."""
        return (
            self._exchange(np.array(own_s, np.float32)).min(axis=0).astype(float).tolist()
            if own_s
            else []
        )

    def _learnt(self, found: "_ProbeTimes") -> "_ProbeTimes":
        for num_bytes, times_s in (
            (self._small_bytes, found.small_s),
            (self._large_bytes, found.large_s),
        ):
            for axis, time_s in times_s.items():
                self._baselines.learn(
                    self._programs.work(axis, num_bytes), time_s, self._links[axis]
                )
        self._baselines.learn(self._programs.compute, median_low(found.compute_s), COMPUTE_SLOWDOWN)
        return found

    def _link_samples(self, found: "_ProbeTimes") -> dict[str, float]:
        slowdowns = {
            axis: self._baselines.gauged(self._programs.work(axis, self._large_bytes), slowdown)
            for axis in found.small_s
            if (slowdown := self._link_slowdown(axis, found)) is not None
        }
        # A slow link affects all axes that cross it; other load on the machine often affects only
        # one of them. So the link's slowdown is the median over its axes.
        links = {
            link: median_low(
                [slowdown for axis, slowdown in slowdowns.items() if self._links[axis] == link]
            )
            for link in {self._links[axis] for axis in slowdowns}
        }
        self._baselines.slowdowns |= links
        return {LINK_SLOWDOWN + name: slowdown for name, slowdown in (slowdowns | links).items()}

    def _gauge(self, found: "_ProbeTimes") -> None:
        """Calibrate this mesh's probes against the slowdowns of links known from the last mesh."""
        for axis in found.small_s:
            slowdown, known = (
                self._link_slowdown(axis, found),
                self._baselines.slowdowns.get(self._links[axis]),
            )
            if slowdown is not None and known is not None:
                self._baselines.gauge(self._programs.work(axis, self._large_bytes), slowdown, known)

    def _link_slowdown(self, axis: str, found: "_ProbeTimes") -> float | None:
        """Time per byte of a large message over that of the baseline; None: there is no baseline.

        If large messages could never be afforded, it is the ratio of a small message's times.
        """
        small, large = (
            self._baselines.of(self._programs.work(axis, num_bytes)) for num_bytes in self._messages
        )
        if large is None:
            return (
                None
                if small is None or axis in found.large_s
                else found.small_s[axis] / small.time_s
            )
        usual_s = byte_part_s(large.time_s, self._latency_s(small, large))
        latency_s = large.time_s - usual_s
        if axis in found.large_s:
            bytes_s = found.large_s[axis] - latency_s
        else:  # too slow to send: scale the part of the small one's time that grows with its size
            bytes_s = (found.small_s[axis] - latency_s) * self._large_bytes / self._small_bytes
        # A time below the latency is a measurement error.
        return max(bytes_s, 0.1 * found.small_s[axis]) / usual_s

    def _latency_s(self, small: Baseline | None, large: Baseline) -> float:
        """The part of a message's time that does not grow with its size, in seconds."""
        if small is None:
            return 0.0
        return (
            small.time_s
            - max(0.0, large.time_s - small.time_s)
            / (self._large_bytes - self._small_bytes)
            * self._small_bytes
        )

    def _compute_sample(self, found: "_ProbeTimes") -> dict[str, float]:
        baseline = self._baselines.of(self._programs.compute)
        if baseline is None:
            return {}
        slowdown = self._baselines.slowdowns[COMPUTE_SLOWDOWN] = (
            median_low(found.compute_s) / baseline.time_s
        )
        return {COMPUTE_SLOWDOWN: slowdown}

    def _skew_samples(self, found: "_ProbeTimes") -> dict[str, float]:
        if len(found.compute_s) == 1:
            return {f"{PROCESS_TIME}{device}": ratio for device, ratio in found.outside.items()}
        typical_s = median_low(found.compute_s)  # of two, the slow one over the fast one
        return {
            f"{PROCESS_TIME}{process}": each_s / typical_s
            for process, each_s in enumerate(found.compute_s)
        }


@dataclass(frozen=True, kw_only=True)
class _ProbeTimes:
    """The times measured in a round, of all processes; lists are by process."""

    small_s: dict[str, float]
    """Time of the small message by axis; the shortest among processes."""
    large_s: dict[str, float]
    """The same for the large message, without axes on which it takes too long."""
    compute_s: list[float]
    step_time_s: list[float]
    cost_s: list[float]
    """Time of the round itself."""
    outside: dict[int, float]
    """Compute time of each device outside the mesh, by id, over that of devices in it."""


def _among_processes(own: np.ndarray) -> np.ndarray:
    if jax.process_count() == 1:
        return own[None]
    return np.asarray(multihost_utils.process_allgather(own))
