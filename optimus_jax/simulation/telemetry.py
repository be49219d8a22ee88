"""Telemetry of a simulated run: observations like those of a real run's sources.

Step times come with every step, and readings of the driver and the allocator every few seconds.
Links and compute are probed within the run's probe budget, so their readings are late and noisy. If
the scenario says so, readings are missing, stale or wrong.
"""

import fnmatch
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median_low

import numpy as np

from optimus_jax.config import ControlConfig
from optimus_jax.config.axes import MESH_AXES
from optimus_jax.control import signals
from optimus_jax.control.baselines import SCATTER
from optimus_jax.control.signals import Observation, SignalSummary, Window
from optimus_jax.control.sources import OF_MEMORY, OF_STEPS, STALE_ROUNDS
from optimus_jax.planning.cost.cost import shares_of
from optimus_jax.planning.profiles.cluster import INTER_HOST, INTRA_HOST
from optimus_jax.planning.search.search import Pricing
from optimus_jax.simulation.events import MetricsEvent
from optimus_jax.simulation.timeline import ClusterConditions
from optimus_jax.simulation.world import PlacedPlan, World

STEP_TIMES = "step_times"
"""Name by which a scenario refers to the run's own record of its step times."""
HEALTH_EVERY_S = 10.0
"""Time between two readings of memory and the driver."""
FIRST_PROBE_STEP = 3
DISPATCH_S = 1e-3
"""Time that the host takes to dispatch a step."""


@dataclass(frozen=True, kw_only=True)
class Now:
    """The present state of a run."""

    step: int
    time_s: float
    place: PlacedPlan
    phase: int
    conditions: ClusterConditions
    faults: tuple[MetricsEvent, ...] = ()
    """The faults of readings that are active."""


class Telemetry:
    """Windows over the samples of a simulated run.

    Args:
      world: the true cluster, which is measured.
      assumed: pricing by the hardware profile, to which readings of links and compute are relative.
      settings: length of the windows and the probe budget.
      seed: draws the noise.
    """

    def __init__(self, world: World, assumed: Pricing, settings: ControlConfig, seed: int):
        self._world, self._assumed, self._settings = world, assumed, settings
        self._random = np.random.default_rng([seed, 3])
        bias = world.scenario.misfit.probe_bias
        self._bias = {
            name: math.exp(bias * self._random.standard_normal())
            for name in (INTRA_HOST, INTER_HOST, "compute")
        }
        self._windows: dict[str, Window] = {}
        self._phase = 0
        self._probe_left_s, self._probed_at_s, self._health_at_s = 0.0, 0.0, -math.inf
        self._newest: dict[str, float] = {}
        """Newest sample of each probe."""
        self._frozen: dict[str, SignalSummary] = {}
        self._shares: tuple[PlacedPlan, ClusterConditions, int, dict[str, float]] | None = None

    def forget(self) -> None:
        """Clear the windows of steps, memory and mesh axes, which do not describe the new plan."""
        for name in (*OF_STEPS, *OF_MEMORY, *[signals.LINK_SLOWDOWN + axis for axis in MESH_AXES]):
            if name in self._windows:
                self._windows[name].clear()
        self._health_at_s = -math.inf

    def settle_s(self, now: Now) -> float:
        """Probe the links before the first step under another plan, several times if they have
        changed since the last probes. Returns the time it took.
        """
        cost_s, found = self._world.scenario.switching.probe_s, self._links(now)
        if all(
            abs(math.log(value / self._newest.get(name, 1.0))) <= SCATTER
            for name, value in found.items()
        ):
            self._take(found, now)
            return cost_s
        for name, window in self._windows.items():
            if name.startswith(signals.LINK_SLOWDOWN):
                window.clear()
        for _ in range(signals.FEW):
            self._take(self._links(now), now)
        return cost_s * (1 + signals.FEW)

    def probe_s(self, now: Now, *, asked: bool) -> float:
        """Take a round of probes if it is due. Returns the time it took."""
        share, cost_s = self._settings.probe_share, self._world.scenario.switching.probe_s
        self._probe_left_s += share * (now.time_s - self._probed_at_s)
        self._probed_at_s = now.time_s
        first = self._probe_left_s >= 0 and not any(
            name.startswith(signals.LINK_SLOWDOWN) for name in self._windows
        )
        if (
            not share
            or now.step < FIRST_PROBE_STEP
            or not (first or self._probe_left_s >= cost_s * (1 if asked else 2))
        ):
            return 0.0
        self._probe_left_s -= cost_s
        self._take(self._links(now) | self._computing(now), now)
        return cost_s

    def steps(self, times_s: Sequence[float], now: Now) -> None:
        """Add the times of steps that have been done."""
        if now.phase != self._phase:
            self._phase = now.phase
            self.forget()
        tokens = self._tokens(now)
        for time_s in times_s[-self._settings.window_steps :]:
            self._add(signals.STEP_TIME_S, time_s, now.time_s, self._settings.window_steps)
            self._add(
                signals.TOKENS_PER_S, tokens / time_s, now.time_s, self._settings.window_steps
            )
        if times_s and now.time_s - self._health_at_s >= HEALTH_EVERY_S:
            self._health_at_s = now.time_s
            for name, value in self._health(now, times_s[-1]).items():
                self._add(
                    name,
                    value,
                    now.time_s,
                    signals.FEW if name in OF_MEMORY else self._settings.window_steps,
                    6 * HEALTH_EVERY_S,
                )

    def observation(
        self, times_s: Sequence[float], now: Now, waits_s: Sequence[float] = ()
    ) -> Observation:
        """The observation that the run is given now: with the times of new steps, and how long each
        waited for data.
        """
        config = self._world.pricings[now.phase].config
        readings = {name: window.reading(now.time_s) for name, window in self._windows.items()}
        hides_steps = any(
            fault.fault == "missing" and _concerns(fault, STEP_TIMES) for fault in now.faults
        )
        return Observation(
            step=now.step,
            time_s=now.time_s,
            step_times_s=() if hides_steps else tuple(times_s),
            data_waits_s=() if hides_steps else tuple(waits_s),
            readings=self._faulty(readings, now.faults),
            global_batch=config.data.global_batch,
            seq_len=config.seq_len,
            lost_devices=now.conditions.reported,
        )

    def _faulty(
        self, readings: Mapping[str, SignalSummary], faults: Sequence[MetricsEvent]
    ) -> dict[str, SignalSummary]:
        given, stale = dict(readings), set[str]()
        for fault in faults:
            for name in [name for name in given if _concerns(fault, name)]:
                reading = given[name]
                if fault.fault == "missing":
                    del given[name]
                elif fault.fault == "stale":
                    stale.add(name)
                    given[name] = self._frozen.setdefault(name, reading)
                elif reading.value is not None:
                    given[name] = replace(
                        reading, value=reading.value * fault.factor, quality="good"
                    )
        self._frozen = {name: reading for name, reading in self._frozen.items() if name in stale}
        return given

    def _add(
        self, name: str, value: float, time_s: float, size: int, stale_s: float | None = None
    ) -> None:
        if name not in self._windows:
            self._windows[name] = Window(size)
        self._windows[name].add(value, time_s, stale_s)

    def _tokens(self, now: Now) -> int:
        config = self._world.pricings[now.phase].config
        return config.data.global_batch * config.seq_len

    def _noisy(self, value: float, spread: float) -> float:
        return value * math.exp(spread * self._random.standard_normal())

    def _take(self, samples: Mapping[str, float], now: Now) -> None:
        """Add samples of probes, which become stale once newer ones are overdue."""
        stale_s = (
            STALE_ROUNDS * 2 * self._world.scenario.switching.probe_s / self._settings.probe_share
        )
        for name, value in samples.items():
            self._newest[name] = value
            self._add(name, value, now.time_s, signals.FEW, stale_s)

    def _links(self, now: Now) -> dict[str, float]:
        """Probe the plan's mesh axes: slowdowns by axis and by link."""
        world, conditions, axes, noise = (
            self._world,
            now.conditions,
            now.place.plan.axes,
            self._world.scenario.misfit.probes,
        )
        found: dict[str, float] = {}
        for axis in MESH_AXES:
            if axes[axis] > 1:
                link = (
                    INTER_HOST
                    if world.cluster.inter_host
                    and world.cluster.link_of(axes, axis) is world.cluster.inter_host
                    else INTRA_HOST
                )
                value = self._noisy(
                    world.link_slowdown(link, conditions)
                    * self._assumed_over_nominal(link)
                    * self._bias[link],
                    noise,
                )
                found[signals.LINK_SLOWDOWN + axis] = value
                name = signals.LINK_SLOWDOWN + link
                found[name] = max(value, found.get(name, 0.0))
        return found

    def _computing(self, now: Now) -> dict[str, float]:
        """Probe the compute of all processes: the typical slowdown, and each process's own."""
        world, noise, found = self._world, self._world.scenario.misfit.probes, dict[str, float]()
        by_process, in_use = self._process_times(now)
        typical = median_low([by_process[process] for process in in_use])
        assumed = (
            self._assumed.rates.matmul_flops_per_s / world.pricings[0].rates.matmul_flops_per_s
        )
        found[signals.COMPUTE_SLOWDOWN] = self._noisy(
            typical * assumed / world.matmul * self._bias["compute"], noise
        )
        if len(by_process) > 1:
            found |= {
                f"{signals.PROCESS_TIME}{process}": time / typical
                for process, time in by_process.items()
            }
        return found

    def _assumed_over_nominal(self, link: str) -> float:
        """Speed of a link by the hardware profile over its nominal speed."""
        assumed, nominal = (
            cluster.intra_host
            if link == INTRA_HOST or cluster.inter_host is None
            else cluster.inter_host
            for cluster in (self._assumed.cluster, self._world.cluster)
        )
        return (
            1.0
            if assumed.bytes_per_s is None or nominal.bytes_per_s is None
            else assumed.bytes_per_s / nominal.bytes_per_s
        )

    def _process_times(self, now: Now) -> tuple[dict[int, float], set[int]]:
        """Compute time of each process over the usual time, and the processes in use.

        Each host has one process. Hosts that the run leaves out are probed as well, unless they
        have lost devices.
        """
        cluster, slow = self._world.cluster, dict(now.conditions.slow)
        size, used = cluster.devices_per_host, set(now.place.devices)
        in_use, lost = (
            {device // size for device in devices} for devices in (used, now.conditions.reported)
        )
        found: dict[int, float] = {}
        for device in range(cluster.num_devices):
            if device in used or device // size not in in_use | lost:
                found[device // size] = max(found.get(device // size, 1.0), slow.get(device, 1.0))
        noisy = {process: self._noisy(factor, 0.01) for process, factor in found.items()}
        return noisy, in_use

    def _health(self, now: Now, step_time_s: float) -> dict[str, float]:
        world, plan = self._world, now.place.plan
        capacity, peak = (
            world.cluster.accelerator.memory_bytes,
            world.cluster.accelerator.dense_peak_flops,
        )
        wait_s = world.data_wait_s(now.place, now.conditions, now.phase)
        found = {
            signals.DATA_WAIT_S: wait_s + self._noisy(DISPATCH_S, 0.1),
            signals.DISPATCH_S: self._noisy(DISPATCH_S, 0.1),
            # The driver counts a kernel that waits for others as work, but not a stage without a
            # task.
            signals.UTILISATION: max(
                0.0,
                min(
                    1.0,
                    self._noisy(1 - self._bubble(now) - wait_s / step_time_s, 0.01),
                ),
            ),
        }
        if capacity is not None:
            used = world.memory_bytes(plan, now.phase) / capacity
            found |= {
                signals.MEMORY_PEAK_SHARE: used + now.conditions.taken,
                signals.MEMORY_SHARE: 0.9 * used + now.conditions.taken,
            }
        if peak is not None:
            found[signals.MFU] = world.model_flops(now.phase) / (
                step_time_s * peak * plan.num_devices
            )
        return found

    def _bubble(self, now: Now) -> float:
        if self._shares is None or self._shares[:3] != (now.place, now.conditions, now.phase):
            shares = shares_of(self._world.term_times(now.place, now.conditions, now.phase))
            self._shares = (now.place, now.conditions, now.phase, shares)
        return self._shares[3]["bubble"]


def _concerns(fault: MetricsEvent, name: str) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in fault.names)
