"""Run the hardware probes, and collect their results.

Collectives are measured along a mesh axis of each size that divides the number of devices. The axis
is the fastest of the mesh and, if there are several hosts, also the slowest.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from optimus_jax.planning.profiles.measurements import (
    ALL_REDUCE,
    CollectiveTime,
    HostCopyTime,
    MatmulTime,
    MemoryTime,
    OverlapTime,
)
from optimus_jax.planning.profiles.probe_programs import (
    KINDS,
    Devices,
    Timing,
    time_collective,
    time_host_copy,
    time_launch,
    time_matmul,
    time_overlap,
    time_pass,
)

T = TypeVar("T", bound=tuple)
ReportTime = Callable[[str, float], None]
"""Called with the name of the next measurement and the share of probes that are done."""
KIB, MIB = 2**10, 2**20


@dataclass(frozen=True, kw_only=True)
class ProbeSizes:
    """Sizes of the probes, and their time budget."""

    matmuls: tuple[tuple[int, int, int], ...]
    """(m, k, n) of each matmul on one device. Some must have k = n, for `time_overlap`."""
    dtypes: tuple[str, ...]
    """Formats of matmuls. Collectives use the first."""
    pass_bytes: tuple[int, ...]
    """Sizes of the array that a pass over memory reads."""
    message_bytes: tuple[int, ...]
    """Message sizes of collectives."""
    timing: Timing
    """How long each probe is measured."""
    host_bytes: tuple[int, ...] = ()
    """Sizes of arrays copied to and from the host; empty if devices have no memory of their own."""
    budget_s: float = 100.0
    """Seconds after which no further probe begins."""

    @classmethod
    def of(cls, platform: str, num_processes: int = 1) -> "ProbeSizes":
        """The default sizes for a platform.

        CPU devices of several processes communicate through sockets, so large messages would use up
        the budget.
        """
        if platform == "cpu":
            messages = (
                (4 * KIB, 64 * KIB, MIB, 8 * MIB)
                if num_processes == 1
                else (4 * KIB, 64 * KIB, MIB)
            )
            weights = ((64, 64), (64, 256), (256, 256), (256, 1024), (1024, 256), (1024, 1024))
            return cls(
                matmuls=tuple((m, k, n) for m in (64, 512) for k, n in weights),
                dtypes=("f32",),
                pass_bytes=(256 * KIB, 4 * MIB, 32 * MIB),
                message_bytes=messages,
                timing=Timing(
                    guessed_flops_per_s=1e10, guessed_bytes_per_s=4e9, program_s=0.01, runs=4
                ),
            )
        weights = (
            (512, 512),
            (1024, 1024),
            (1024, 4096),
            (4096, 1024),
            (4096, 4096),
            (4096, 16384),
            (16384, 4096),
            (8192, 8192),
        )
        return cls(
            matmuls=tuple((m, k, n) for m in (1024, 8192) for k, n in weights),
            dtypes=("bf16", "f32"),
            pass_bytes=(MIB, 16 * MIB, 256 * MIB),
            message_bytes=(64 * KIB, MIB, 16 * MIB, 128 * MIB),
            host_bytes=(16 * MIB, 256 * MIB),
            timing=Timing(
                guessed_flops_per_s=2e14, guessed_bytes_per_s=1e11, program_s=0.01, runs=5
            ),
        )


@dataclass(frozen=True, kw_only=True)
class Probed:
    """The results of all probes."""

    launch_s: float | None
    """Seconds from calling a trivial program until it has finished; None if time ran out."""
    matmuls: tuple[MatmulTime, ...]
    """Matmul times, by shape and format."""
    passes: tuple[MemoryTime, ...]
    """Times of passes over memory, by size."""
    host_copies: tuple[HostCopyTime, ...]
    """Times of copies to and from the host, by size; empty if plans cannot offload."""
    collectives: tuple[CollectiveTime, ...]
    """Times of collectives, by kind, mesh axis and message size."""
    overlap: OverlapTime | None
    """Time of matmuls that overlap with an all-reduce; None with only one device, or if time ran
    out."""
    num_left_out: int
    """Probes skipped for lack of time."""
    took_s: float
    """Seconds for all probes, including compilation."""


def probe(
    devices: Devices, sizes: ProbeSizes, *, several_hosts: bool, progress: ReportTime | None = None
) -> Probed:
    """Measure `devices`, given in the order of the mesh.

    Every process with one of the devices must call it.
    """
    matmuls = [(*shape, dtype) for dtype in sizes.dtypes for shape in sizes.matmuls]
    collectives = list(_collectives(len(devices), sizes, several_hosts))
    overlaps = [()] if len(devices) > 1 else []
    budget = ProbeBudget(
        sizes.budget_s,
        1
        + len(matmuls)
        + len(sizes.pass_bytes)
        + len(sizes.host_bytes)
        + len(collectives)
        + len(overlaps),
        progress,
    )
    launch_s = [time_launch(devices, sizes.timing) for _ in budget.through("launch", [()])]
    # Kinds with few probes come first: if time runs out, each kind has been measured in part.
    passes = [
        time_pass(devices, sizes.timing, *each)
        for each in budget.through("pass over memory", [(size,) for size in sizes.pass_bytes])
    ]
    host_copies = [
        time_host_copy(devices, sizes.timing, *each)
        for each in budget.through(
            "copies from and to the host", [(size,) for size in sizes.host_bytes]
        )
    ]
    matmul_times = [
        time_matmul(devices, sizes.timing, *each) for each in budget.through("matmul", matmuls)
    ]
    collective_times = [
        time_collective(devices, sizes.timing, *each, sizes.dtypes[0])
        for each in budget.through("collective", collectives)
    ]
    beside = [
        time_overlap(
            devices, sizes.timing, *_for_overlap(matmul_times, collective_times, sizes.dtypes[0])
        )
        for _ in budget.through("matmuls beside an all-reduce", overlaps)
    ]
    return Probed(
        launch_s=launch_s[0] if launch_s else None,
        matmuls=tuple(matmul_times),
        passes=tuple(passes),
        host_copies=tuple(host_copies),
        collectives=tuple(collective_times),
        overlap=beside[0] if beside else None,
        num_left_out=budget.num_left_out,
        took_s=budget.elapsed_s(),
    )


def _collectives(
    num_devices: int, sizes: ProbeSizes, several_hosts: bool
) -> Iterator[tuple[str, int, int, int]]:
    """Yield kind, axis size, stride and message bytes of each collective to measure."""
    axis_sizes = [size for size in range(2, num_devices + 1) if num_devices % size == 0]
    axes = {
        (size, stride): None
        for size in axis_sizes
        for stride in (1, num_devices // size if several_hosts else 1)
    }
    ends = (min(sizes.message_bytes), max(sizes.message_bytes))
    every = [
        (kind, *axis, message) for message in sizes.message_bytes for axis in axes for kind in KINDS
    ]
    # Smallest and largest messages first, and among these all-reduces first: if time runs out,
    # every axis, and so every link, has a fit.
    yield from sorted(every, key=lambda each: (each[-1] not in ends, each[0] != ALL_REDUCE))


def _for_overlap(
    matmuls: Iterable[MatmulTime], collectives: Iterable[CollectiveTime], dtype: str
) -> tuple[MatmulTime, CollectiveTime]:
    """The largest all-reduce over all devices, and the square matmul whose time is closest to its
    time.
    """
    all_reduce = max(
        (each for each in collectives if each.kind == ALL_REDUCE),
        key=lambda each: (each.axis_size, each.num_bytes),
    )
    square = [each for each in matmuls if each.k == each.n and each.dtype == dtype]
    return min(square, key=lambda each: abs(math.log(each.time_s / all_reduce.time_s))), all_reduce


class ProbeBudget:
    """Yields probes while there is time left, and reports progress."""

    def __init__(self, budget_s: float, num_probes: int, progress: ReportTime | None) -> None:
        self._end_s, self._num_probes, self._progress = (
            time.perf_counter() + budget_s,
            num_probes,
            progress,
        )
        self._budget_s = budget_s
        self._num_done = self.num_left_out = 0

    def elapsed_s(self) -> float:
        """Seconds since the budget was created."""
        return time.perf_counter() - self._end_s + self._budget_s

    def through(self, what: str, probes: Iterable[T]) -> Iterator[T]:
        """Yield `probes` while there is time; count the rest in `num_left_out`."""
        for each in probes:
            if self._is_over():
                self.num_left_out += 1
                continue
            if self._progress is not None:
                self._progress(" ".join(map(str, (what, *each))), self._num_done / self._num_probes)
            yield each
            self._num_done += 1

    def _is_over(self) -> bool:
        """Whether time is up on any process, because all processes must run the same probes."""
        over = time.perf_counter() > self._end_s
        return (
            over
            if jax.process_count() == 1
            else bool(multihost_utils.process_allgather(np.array(over)).any())
        )
