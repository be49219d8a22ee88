"""Conditions: how much slower than in the hardware profile links and devices are at the moment.

What plans cost in other conditions is another `Pricing`: slower links, slower matmuls. Factors are
kept on a coarse grid, so that a search is needed only when something has really changed.
"""

import math
from dataclasses import dataclass, replace

from optimus_jax.config.axes import MESH_AXES, AxisSizes
from optimus_jax.control.baselines import byte_part_s, messages_of
from optimus_jax.control.deciding.rebalancing import ANYWHERE, SlowPart, felt_skew
from optimus_jax.control.signals import (
    COMPUTE_SLOWDOWN,
    LINK_SLOWDOWN,
    PROCESS_SKEW,
    UNKNOWN,
    Observation,
    SignalSummary,
)
from optimus_jax.plan import Plan
from optimus_jax.planning.profiles.cluster import Cluster
from optimus_jax.planning.profiles.links import Link
from optimus_jax.planning.profiles.measurements import ALL_REDUCE, WIRE_SHARE
from optimus_jax.planning.search.search import Pricing

GRID = math.log(1.1)
"""Factors are told apart if they differ by a tenth."""
FASTEST, SLOWEST = 0.01, 1e4
"""What is beyond is no slowdown but nonsense."""
INSIDE, BETWEEN, *_ = NAMES = ("inside", "between", "compute", "skew")


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """Time now over time as in the hardware profile; 1 is normal."""

    inside: float = 1.0
    """Of exchanges inside a host."""
    between: float = 1.0
    """Of exchanges between hosts."""
    compute: float = 1.0
    """Of computing, on all devices."""
    skew: float = 1.0
    """Of computing on the slowest process, over the others."""
    slow_part: SlowPart = ANYWHERE
    """Where that process's devices lie in the mesh."""

    def distance(self, other: "Conditions") -> float:
        """Largest difference of the logarithm of a factor."""
        return max(abs(math.log(getattr(self, name) / getattr(other, name))) for name in NAMES)

    def without_skew(self) -> "Conditions":
        """Of the devices that are not slow."""
        return replace(self, skew=1.0)

    def felt_by(self, plan: Plan) -> "Conditions":
        """The same, with what is left of the skew under a plan whose slow stages have fewer
        layers."""
        return (
            self
            if self.skew == 1
            else replace(self, skew=felt_skew(plan, self.slow_part, self.skew))
        )

    def applied(self, pricing: Pricing) -> Pricing:
        """What plans cost in these conditions."""
        cluster, rates = pricing.cluster, pricing.rates
        platform = cluster.accelerator.platform
        compute = self.compute * self.skew
        return replace(
            pricing,
            cluster=replace(
                cluster,
                intra_host=slowed(
                    cluster.intra_host, self.inside, cluster.devices_per_host, platform
                ),
                inter_host=cluster.inter_host
                and slowed(cluster.inter_host, self.between, cluster.num_hosts, platform),
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
        """Factors that are not 1."""
        return {name: round(value, 3) for name in NAMES if (value := getattr(self, name)) != 1}


def on_grid(factor: float) -> float:
    """The nearest factor of the grid; 1 is one of them."""
    return math.exp(round(math.log(min(SLOWEST, max(FASTEST, factor))) / GRID) * GRID)


def claims(observation: Observation, cluster: Cluster, axes: AxisSizes) -> dict[str, SignalSummary]:
    """What readings say of each factor: only those that are new enough and make sense."""
    found = {
        INSIDE: _of_link(observation, INSIDE, cluster, axes),
        BETWEEN: _of_link(observation, BETWEEN, cluster, axes) if cluster.inter_host else UNKNOWN,
        "compute": observation.reading(COMPUTE_SLOWDOWN),
        "skew": observation.reading(PROCESS_SKEW),
    }
    return {name: reading for name, reading in found.items() if is_usable(reading)}


def is_usable(reading: SignalSummary) -> bool:
    """Whether it says anything: neither unknown nor stale, and a number that can be a factor."""
    return (
        reading.quality in ("good", "few")
        and reading.value is not None
        and FASTEST <= reading.value <= SLOWEST
    )


def _of_link(
    observation: Observation, name: str, cluster: Cluster, axes: AxisSizes
) -> SignalSummary:
    """Of the link itself, else of the slowest mesh axis that crosses it."""
    direct = observation.reading(LINK_SLOWDOWN + name)
    if is_usable(direct):
        return direct
    link = cluster.intra_host if name == INSIDE else cluster.inter_host
    crossing = [
        reading
        for axis in MESH_AXES
        if axes[axis] > 1
        and cluster.link_of(axes, axis) is link
        and is_usable(reading := observation.reading(LINK_SLOWDOWN + axis))
    ]
    return max(crossing, key=lambda reading: reading.value or 0.0, default=UNKNOWN)


def slowed(link: Link, factor: float, num_members: int, platform: str) -> Link:
    """`link` whose probe takes `factor` times as long, its latency left out.

    Probes count slowdowns in no less than half of what a message usually takes. Where latency is
    most of that, the bytes of a message are so much slower that they make up for it.

    Args:
      num_members: devices or hosts that it joins, whose all-reduce is the probe.
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
