"""Conditions: how much slower links and processes are now than in the hardware profile.

Applied to a `Pricing`, conditions give another `Pricing` with slower links and slower matmuls.
Factors are rounded to a coarse grid, so that only a real change needs a new search.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from optimus_jax.config.axes import MESH_AXES, AxisSizes
from optimus_jax.control import constants
from optimus_jax.control.baselines import byte_part_s, messages_of
from optimus_jax.control.deciding.factors import (
    OF_ALL,
    process_of,
    process_time,
)
from optimus_jax.control.deciding.rebalancing import effective_skew
from optimus_jax.control.signals import (
    COMPUTE_SLOWDOWN,
    LINK_SLOWDOWN,
    PROCESS_TIME,
    UNKNOWN,
    Observation,
    SignalSummary,
)
from optimus_jax.plan import Plan
from optimus_jax.planning.profiles.cluster import INTER_HOST, INTRA_HOST, Cluster
from optimus_jax.planning.profiles.links import Link
from optimus_jax.planning.profiles.measurements import ALL_REDUCE, WIRE_SHARE
from optimus_jax.planning.search.search import Pricing


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """Factors of present times over normal ones: those of the hardware profile (links) or of the
    run's first measurement (compute)."""

    intra_host: float = 1.0
    """Factor on the time of communication inside a host."""
    inter_host: float = 1.0
    """Factor on the time of communication between hosts."""
    compute: float = 1.0
    """Factor on the time of compute on all devices."""
    slow: tuple[tuple[int, float], ...] = ()
    """Slow processes, in rising order, each with its own time for a step over the median
    process's."""

    @property
    def skew(self) -> float:
        """The slowest process's own time for a step over the median process's."""
        return max((factor for _, factor in self.slow), default=1.0)

    def factor(self, name: str) -> float:
        """The factor of this name; 1 for a process that is not slow."""
        if (process := process_of(name)) is None:
            return getattr(self, name)
        return dict(self.slow).get(process, 1.0)

    def with_factors(self, factors: Mapping[str, float]) -> "Conditions":
        """These conditions with other factors, by name."""
        slow = dict(self.slow) | {
            process: factor
            for name, factor in factors.items()
            if (process := process_of(name)) is not None
        }
        return replace(
            self,
            **{name: factor for name, factor in factors.items() if process_of(name) is None},
            slow=tuple(sorted((process, each) for process, each in slow.items() if each != 1)),
        )

    def differing(self, other: "Conditions") -> list[str]:
        """Names of the factors that differ."""
        names = [*OF_ALL, *[process_time(process) for process, _ in self.slow + other.slow]]
        return [name for name in dict.fromkeys(names) if self.factor(name) != other.factor(name)]

    def distance(self, other: "Conditions") -> float:
        """Largest absolute difference of a factor's logarithm."""
        return max(
            [
                abs(math.log(self.factor(name) / other.factor(name)))
                for name in self.differing(other)
            ],
            default=0.0,
        )

    def among(self, processes: Collection[int]) -> "Conditions":
        """The conditions of a run that uses these processes only."""
        return replace(self, slow=tuple([each for each in self.slow if each[0] in processes]))

    def device_factors(self, processes: Sequence[int]) -> list[float]:
        """Factor on the compute time of each device.

        Args:
          processes: the process of each device in use, in mesh order.
        """
        slow = dict(self.slow)
        return [slow.get(process, 1.0) for process in processes]

    def as_seen_by(
        self, plan: Plan, processes: Sequence[int], shares: Sequence[float]
    ) -> "Conditions":
        """These conditions as the plan is affected by them on devices of these processes: by slow
        compute everywhere, which is less slow if slow stages have less to compute.

        Args:
          shares: as of `effective_skew`.
        """
        if not self.slow:
            return self
        skew = effective_skew(plan, self.device_factors(processes), shares)
        return replace(self, slow=(), compute=self.compute * skew)

    def applied(self, pricing: Pricing) -> Pricing:
        """The pricing of plans in these conditions, for plans whose slow stages have as much to
        compute as the others.
        """
        cluster, rates = pricing.cluster, pricing.rates
        platform = cluster.accelerator.platform
        compute = self.compute * self.skew
        return replace(
            pricing,
            cluster=replace(
                cluster,
                intra_host=slowed(
                    cluster.intra_host, self.intra_host, cluster.devices_per_host, platform
                ),
                inter_host=cluster.inter_host
                and slowed(cluster.inter_host, self.inter_host, cluster.num_hosts, platform),
            ),
            rates=rates
            if compute == 1
            else replace(
                rates,
                matmul_flops_per_s=rates.matmul_flops_per_s / compute,
                f32_matmul_flops_per_s=rates.f32_matmul_flops_per_s / compute,
                memory_bytes_per_s=rates.memory_bytes_per_s / compute,
                launch_s=rates.launch_s * compute,
            ),
        )

    def as_json(self) -> dict[str, float]:
        """The factors that are not 1, rounded, by name."""
        factors = {name: self.factor(name) for name in OF_ALL} | {"skew": self.skew}
        return {name: round(factor, 3) for name, factor in factors.items() if factor != 1}


def claims(observation: Observation, cluster: Cluster, axes: AxisSizes) -> dict[str, SignalSummary]:
    """The usable reading of each factor, by name. Stale and implausible readings are left out."""
    compute = observation.reading(COMPUTE_SLOWDOWN)
    intra_host = _of_link(observation, INTRA_HOST, cluster, axes)
    if cluster.accelerator.platform == "cpu":
        intra_host = _beside(intra_host, compute)
    found = {
        INTRA_HOST: intra_host,
        INTER_HOST: _of_link(observation, INTER_HOST, cluster, axes)
        if cluster.inter_host
        else UNKNOWN,
        "compute": compute,
        **{
            name: reading
            for name, reading in observation.readings.items()
            if name.startswith(PROCESS_TIME)
        },
    }
    return {name: reading for name, reading in found.items() if is_usable(reading)}


def is_usable(reading: SignalSummary) -> bool:
    """Whether the reading is neither unknown nor stale, and its value is a plausible factor."""
    return (
        reading.quality in ("good", "few")
        and reading.value is not None
        and constants.MIN_FACTOR <= reading.value <= constants.MAX_FACTOR
    )


def _beside(link: SignalSummary, compute: SignalSummary) -> SignalSummary:
    """The reading of a link between devices that are a CPU's cores, beside that of compute.

    Its bytes are copied by the cores that multiply matrices. What slows both, another load or a
    lower clock, is compute's slowdown; the link's is what exceeds it.
    """
    if not is_usable(compute):
        return link
    assert compute.value is not None
    return link if link.value is None else replace(link, value=link.value / max(1.0, compute.value))


def _of_link(
    observation: Observation, name: str, cluster: Cluster, axes: AxisSizes
) -> SignalSummary:
    """The reading of the link itself, else that of the slowest mesh axis that crosses it."""
    direct = observation.reading(LINK_SLOWDOWN + name)
    if is_usable(direct):
        return direct
    link = cluster.intra_host if name == INTRA_HOST else cluster.inter_host
    crossing = [
        reading
        for axis in MESH_AXES
        if axes[axis] > 1
        and cluster.link_of(axes, axis) is link
        and is_usable(reading := observation.reading(LINK_SLOWDOWN + axis))
    ]
    return max(crossing, key=lambda reading: reading.value or 0.0, default=UNKNOWN)


def slowed(link: Link, factor: float, num_members: int, platform: str) -> Link:
    """`link` with a bandwidth so low that its probe, without latency, takes `factor` times as long.

    A probe relates a slowdown to at least half of a message's usual time (`byte_part_s`). If most
    of that time is latency, the bandwidth is lowered further to make up for it.

    Args:
      link: the link in normal conditions.
      factor: time of the probe over its usual time.
      num_members: devices or hosts that the link joins, whose all-reduce is the probe.
      platform: JAX platform, which decides the size of the probe's message.
    """
    if factor == 1 or link.bytes_per_s is None or num_members == 1:
        return link
    latency_s, share = (
        2 * (num_members - 1) * (link.latency_s or 0.0),
        WIRE_SHARE[ALL_REDUCE](num_members),
    )
    bytes_s = share * messages_of(platform)[1] / link.bytes_per_s
    counted_in = byte_part_s(latency_s + bytes_s, latency_s) / bytes_s
    return replace(
        link,
        bytes_per_s=link.bytes_per_s / (1 + (factor - 1) * counted_in if factor > 1 else factor),
    )
