"""Results of the probes: how long a matmul, a pass over memory or a collective takes.

Times are the shortest of several runs with all devices busy, as in training. The *message* of a
collective is the whole array: each device's operand of an all-reduce, reduce-scatter, all-to-all or
permute, or each device's result of an all-gather. WIRE_SHARE gives how much of it a device sends.
"""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

ALL_REDUCE = "all-reduce"
ALL_GATHER = "all-gather"
REDUCE_SCATTER = "reduce-scatter"
ALL_TO_ALL = "all-to-all"
PERMUTE = "collective-permute"

WIRE_SHARE = {
    ALL_REDUCE: lambda size: 2 * (size - 1) / size,
    ALL_GATHER: lambda size: (size - 1) / size,
    REDUCE_SCATTER: lambda size: (size - 1) / size,
    ALL_TO_ALL: lambda size: (size - 1) / size,
    PERMUTE: lambda size: 1.0,
}
"""Bytes that each of `size` devices sends per byte of the message, in a ring (Thakur et al. 2005,
doi:10.1177/1094342005051521)."""


@dataclass(frozen=True, kw_only=True)
class MatmulTime:
    """A matmul of [m, k] by [k, n] on one device."""

    m: int
    """Rows (tokens)."""
    k: int
    """Size of the contracted dimension."""
    n: int
    """Columns."""
    dtype: str
    """Format of operands and result: `f32` or `bf16`."""
    time_s: float
    """Seconds of one matmul."""


@dataclass(frozen=True, kw_only=True)
class MemoryTime:
    """A pass over memory on one device: it reads an array and writes one of the same size."""

    num_bytes: int
    """Bytes read and written together."""
    time_s: float
    """Seconds of one pass."""

    @property
    def bytes_per_s(self) -> float:
        """Bytes read and written per second."""
        return self.num_bytes / self.time_s


@dataclass(frozen=True, kw_only=True)
class HostCopyTime:
    """A copy from host memory to each device while an array of the same size is copied back, as for
    moments in an offloaded step.
    """

    num_bytes: int
    """Bytes of one of the two arrays."""
    time_s: float
    """Seconds until both copies are complete."""

    @property
    def bytes_per_s(self) -> float:
        """Bytes per second per device in each direction."""
        return self.num_bytes / self.time_s


@dataclass(frozen=True, kw_only=True)
class CollectiveTime:
    """One collective, run by all groups of a mesh axis at once."""

    kind: str
    """A key of WIRE_SHARE."""
    axis_size: int
    """Devices per group."""
    stride: int
    """Distance between neighbours of a group in mesh order: 1 along the fastest axis."""
    num_bytes: int
    """Bytes of the message."""
    time_s: float
    """Seconds of one collective."""

    @property
    def wire_bytes(self) -> float:
        """Bytes that each device sends."""
        return WIRE_SHARE[self.kind](self.axis_size) * self.num_bytes


@dataclass(frozen=True, kw_only=True)
class CollectiveFit:
    """The time of one kind of collective over one mesh axis: latency_s + wire bytes /
    bytes_per_s.
    """

    kind: str
    """A key of WIRE_SHARE."""
    axis_size: int
    """Devices per group."""
    stride: int
    """Distance between neighbours of a group in mesh order."""
    latency_s: float
    """Latency of the collective as a whole, not of one hop."""
    bytes_per_s: float | None
    """Bytes per second per device; None if the time did not grow with the message."""

    def time_s(self, num_bytes: float) -> float:
        """Seconds for a message of `num_bytes`."""
        return self.latency_s + (
            WIRE_SHARE[self.kind](self.axis_size) * num_bytes / self.bytes_per_s
            if self.bytes_per_s
            else 0.0
        )


@dataclass(frozen=True, kw_only=True)
class OverlapTime:
    """Times of matmuls and an independent all-reduce: each alone, and both in one program."""

    matmul_s: float
    """Seconds of the matmuls alone."""
    collective_s: float
    """Seconds of the all-reduce alone. It was chosen to take about as long."""
    together_s: float
    """Seconds of both together."""

    @property
    def slowdown(self) -> float:
        """Factor by which overlap lengthens the longer of the two: 1 if overlap is free, about 2 if
        there is none.
        """
        return max(1.0, self.together_s / max(self.matmul_s, self.collective_s))


def fit_collectives(times: Iterable[CollectiveTime]) -> tuple[CollectiveFit, ...]:
    """Fit each kind, axis size and stride that was measured with at least two message sizes."""

    def group(time: CollectiveTime) -> tuple[str, int, int]:
        return time.kind, time.axis_size, time.stride

    groups = itertools.groupby(
        sorted(times, key=lambda time: (*group(time), time.num_bytes)), key=group
    )
    return tuple(
        _fit(*key, members)
        for key, members in ((key, list(members)) for key, members in groups)
        if len(members) > 1
    )


def _fit(kind: str, axis_size: int, stride: int, times: list[CollectiveTime]) -> CollectiveFit:
    wire, seconds = (
        np.array([time.wire_bytes for time in times]),
        np.array([time.time_s for time in times]),
    )
    # Least squares on the relative error, so that small messages count as much as large ones.
    (latency_s, s_per_byte), *_ = np.linalg.lstsq(
        np.stack([1 / seconds, wire / seconds], axis=1), np.ones_like(seconds), rcond=None
    )
    if latency_s < 0:
        latency_s, s_per_byte = 0.0, np.sum(wire / seconds) / np.sum((wire / seconds) ** 2)
    if s_per_byte <= 0:
        latency_s, s_per_byte = np.sum(1 / seconds) / np.sum(1 / seconds**2), 0.0
    return CollectiveFit(
        kind=kind,
        axis_size=axis_size,
        stride=stride,
        latency_s=float(latency_s),
        bytes_per_s=float(1 / s_per_byte) if s_per_byte > 0 else None,
    )
