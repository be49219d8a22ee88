"""Baselines: how long a probe takes when nothing is wrong, from the hardware profile or from the
first rounds of this run.

The profile is better, since something may be wrong already when the run begins. Each baseline says
where it comes from.
"""

import math
from dataclasses import dataclass

from optimus_jax.control.signals import FEW
from optimus_jax.planning.profiles.hardware import HardwareProfile
from optimus_jax.planning.profiles.measurements import ALL_REDUCE
from optimus_jax.robust import median_of_sorted

PROFILE = "the hardware profile"
SCATTER = math.log(2)
"""Scatter of single samples of a healthy link's slowdown, as a logarithm: a sample that is further
off means a real change. Between processes on a CPU 0.5 to 0.9 were seen."""
MOST = 2.0
"""Largest gauge (the smallest is its inverse): a larger difference has another cause."""
MESSAGES = {"cpu": (2**16, 2**20), "gpu": (2**20, 2**24)}
"""Bytes of a small and a large message, by platform. The time of the small one shows whether the
large one can be afforded; the large one should take longer than its latency. All-reduces of 1 MiB
over NVLink are mostly latency (NVIDIA's nccl-tests)."""
FIRST_ROUNDS = f"the first {FEW} rounds of this run"


def messages_of(platform: str) -> tuple[int, int]:
    """Bytes of the small and the large message of a probe."""
    return MESSAGES.get(platform, MESSAGES["gpu"])


def byte_part_s(time_s: float, latency_s: float) -> float:
    """The part of a message's time that grows with its size; a link's slowdown is measured on it.

    It is at least half of the time, since the difference of two nearly equal times is noise.
    """
    return time_s - min(max(0.0, latency_s), 0.5 * time_s)


@dataclass(frozen=True, kw_only=True)
class AllReduce:
    """A probe of one mesh axis."""

    axis_size: int
    """Devices along the axis."""
    stride: int
    """Distance between neighbouring devices of the axis, in the order of the mesh."""
    num_bytes: int
    """Bytes of each device's message."""
    repeats: int
    """Number of all-reduces in one program."""


@dataclass(frozen=True, kw_only=True)
class Matmuls:
    """A probe of each device."""

    m: int
    """Rows of the left operand."""
    k: int
    """Size of the contracted dimension, and columns of the result."""
    dtype: str
    """`f32` or `bf16`."""
    repeats: int
    """Number of matmuls in one program."""


ProbeWork = AllReduce | Matmuls


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """The baseline of one probe."""

    time_s: float
    """Seconds that the probe takes when nothing is wrong."""
    source: str
    """PROFILE or FIRST_ROUNDS."""


class Baselines:
    """The baselines of all probes of a run. They outlive a mesh, since the run may come back to it.

    Args:
      profile: the hardware profile of the devices; None: they have not been measured.
    """

    def __init__(self, profile: HardwareProfile | None) -> None:
        self.slowdowns: dict[str, float] = {}
        """Slowdown of each link when it was last probed."""
        self._gauges: dict[ProbeWork, float] = {}
        """Divisors of the logarithm of a slowdown, which make it agree with earlier probes of the
        same link."""
        self._profile = profile
        self._first: dict[ProbeWork, list[float]] = {}

    def learn(self, work: ProbeWork, time_s: float, link: str = "") -> None:
        """Record a time of `work` over `link`; only the first FEW are used.

        After a re-mesh other axes cross the same links. The known slowdown of the link is divided
        out, or a link that is already slow would look healthy from then on.
        """
        first = self._first.setdefault(work, [])
        if len(first) < FEW:
            first.append(time_s / self.slowdowns.get(link, 1.0))

    def gauge(self, work: ProbeWork, slowdown: float, known: float) -> None:
        """Calibrate `work` against the `known` slowdown of its link.

        `work`, which was never timed while its link was slow, now measures `slowdown`. The two may
        differ: the devices of a host may share their link to other hosts, so a slow link costs
        more, the more of them use it at once, and that differs from mesh to mesh. On a healthy
        link all probes agree.
        """
        if (
            work not in self._gauges
            and min(abs(math.log(slowdown)), abs(math.log(known))) > SCATTER
            and (slowdown > 1) == (known > 1)
        ):
            self._gauges[work] = min(MOST, max(1 / MOST, math.log(slowdown) / math.log(known)))

    def gauged(self, work: ProbeWork, slowdown: float) -> float:
        """The slowdown of the link, where `work` has measured `slowdown`."""
        if abs(math.log(slowdown)) > SCATTER:
            self._gauges.setdefault(work, 1.0)
        return math.exp(math.log(slowdown) / self._gauges.get(work, 1.0))

    def of(self, work: ProbeWork) -> Baseline | None:
        """The baseline of `work`; None: it is not in the profile, and was not yet measured FEW
        times in this run.
        """
        time_s = None if self._profile is None else _expected_s(self._profile, work)
        if time_s is not None:
            return Baseline(time_s=time_s, source=PROFILE)
        first = self._first.get(work, [])
        return (
            Baseline(time_s=median_of_sorted(sorted(first)), source=FIRST_ROUNDS)
            if len(first) == FEW
            else None
        )


def _expected_s(profile: HardwareProfile, work: ProbeWork) -> float | None:
    """Expected seconds of the whole program, its launch included; None: not measured."""
    launch_s = profile.probed.launch_s
    if isinstance(work, AllReduce):
        fit = profile.fit(ALL_REDUCE, work.axis_size, work.stride)
        each_s = None if fit is None else fit.time_s(work.num_bytes)
    else:
        shape = (work.m, work.k, work.k, work.dtype)
        each_s = next(
            (
                each.time_s
                for each in profile.probed.matmuls
                if (each.m, each.k, each.n, each.dtype) == shape
            ),
            None,
        )
    return None if each_s is None or launch_s is None else launch_s + work.repeats * each_s
