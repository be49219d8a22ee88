"""What a probe takes when nothing is wrong: by the hardware profile, or by the first rounds of this
run.

The profile is better, for a run may begin when something is wrong already; which of the two it was
is said.
"""

import math
from dataclasses import dataclass

from optimus_jax.control.signals import FEW
from optimus_jax.planning.profiles.hardware import HardwareProfile
from optimus_jax.planning.profiles.measurements import ALL_REDUCE
from optimus_jax.robust import median_of_sorted

PROFILE = "the hardware profile"
SCATTER = math.log(2)
"""Of single samples of a sound link's slowdown, as a logarithm: what is further off is another
thing. Between processes on a CPU 0.5 to 0.9 were seen."""
MOST = 2.0
"""Of a gauge, and the least is its inverse: what differs by more is another thing."""
MESSAGES = {"cpu": (2**16, 2**20), "gpu": (2**20, 2**24)}
"""Bytes of a small and a large message, by platform: the first tells whether the second can be
afforded, the second should take longer than its latency. All-reduces of 1 MiB over NVLink are
mostly latency (NVIDIA's nccl-tests)."""
FIRST_ROUNDS = f"the first {FEW} rounds of this run"


def messages_of(platform: str) -> tuple[int, int]:
    """Bytes of the small and the large message of probes."""
    return MESSAGES.get(platform, MESSAGES["gpu"])


def byte_part_s(time_s: float, latency_s: float) -> float:
    """What grows with a message, of its time; half of it at least, as the difference of two times
    that are nearly alike is noise. A link's slowdown is that of this part.
    """
    return time_s - min(max(0.0, latency_s), 0.5 * time_s)


@dataclass(frozen=True, kw_only=True)
class AllReduce:
    """A probe of one mesh axis."""

    axis_size: int
    """Devices along it."""
    stride: int
    """From one of its devices to the next, in the order of the mesh."""
    num_bytes: int
    """Of each device's message."""
    repeats: int
    """All-reduces in one program."""


@dataclass(frozen=True, kw_only=True)
class Matmuls:
    """A probe of each device."""

    m: int
    """Rows."""
    k: int
    """Contracted, and columns."""
    dtype: str
    """`f32` or `bf16`."""
    repeats: int
    """Matmuls in one program."""


Work = AllReduce | Matmuls


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """Of one probe."""

    time_s: float
    """What it takes when nothing is wrong."""
    source: str
    """PROFILE or FIRST_ROUNDS."""


class Baselines:
    """Of all probes of a run; they outlive a mesh, as the same probe may be back later.

    Args:
      profile: of the devices, if they have been measured.
    """

    def __init__(self, profile: HardwareProfile | None) -> None:
        self.slowdowns: dict[str, float] = {}
        """How slow each link was when last probed."""
        self._gauges: dict[Work, float] = {}
        """What the logarithm of a slowdown is divided by, so that it says the same as what was
        probed of the link before."""
        self._profile = profile
        self._first: dict[Work, list[float]] = {}

    def learn(self, work: Work, time_s: float, link: str = "") -> None:
        """What `work` took just now, over `link`; the first few count.

        After a re-mesh other axes cross the same links. What was known of a link's slowdown before
        is taken out, or a link that was cut would look sound from then on.
        """
        first = self._first.setdefault(work, [])
        if len(first) < FEW:
            first.append(time_s / self.slowdowns.get(link, 1.0))

    def gauge(self, work: Work, slowdown: float, known: float) -> None:
        """A link is `known` to be so slow, and `work`, which was never done while its link was
        slow, now says `slowdown`.

        Devices of a host may share what leads to others, so that a slow one slows them the more,
        the more of them use it at once; and that differs from mesh to mesh. A sound link is sound
        by all of them.
        """
        if (
            work not in self._gauges
            and min(abs(math.log(slowdown)), abs(math.log(known))) > SCATTER
            and (slowdown > 1) == (known > 1)
        ):
            self._gauges[work] = min(MOST, max(1 / MOST, math.log(slowdown) / math.log(known)))

    def gauged(self, work: Work, slowdown: float) -> float:
        """What `slowdown` by `work` says of its link."""
        if abs(math.log(slowdown)) > SCATTER:
            self._gauges.setdefault(work, 1.0)
        return math.exp(math.log(slowdown) / self._gauges.get(work, 1.0))

    def of(self, work: Work) -> Baseline | None:
        """None: not in the profile, and not yet measured FEW times in this run."""
        time_s = None if self._profile is None else _expected_s(self._profile, work)
        if time_s is not None:
            return Baseline(time_s=time_s, source=PROFILE)
        first = self._first.get(work, [])
        return (
            Baseline(time_s=median_of_sorted(sorted(first)), source=FIRST_ROUNDS)
            if len(first) == FEW
            else None
        )


def _expected_s(profile: HardwareProfile, work: Work) -> float | None:
    """Of the whole program, its launch included; None: not measured."""
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
