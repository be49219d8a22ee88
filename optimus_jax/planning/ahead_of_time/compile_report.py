"""Properties of a compiled training step: memory needed and available, collectives by mesh axis,
rematerialised arrays.

planning/ahead_of_time/compile_check.py makes a report for devices that need not exist;
`check_executable` reads the executable that a run is about to use.
"""

import dataclasses
import json
from dataclasses import dataclass
from typing import Protocol

from optimus_jax.config import AttentionKernel

LIMIT_HEADROOM_SHARE = 0.02
"""Of what JAX's allocator may use, of which contexts and NCCL have no part: left for gaps between
arrays, and for the next batch."""


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """One collective of the compiled step."""

    kind: str
    """all-reduce, all-gather, reduce-scatter, collective-permute or all-to-all."""
    axes: tuple[str, ...]
    """Mesh axes that its groups span."""
    payload_bytes: int
    """Of one run on one device: the whole array, before it is scattered or after it is gathered."""
    wire_bytes: float
    """That one device sends in one run, around a ring."""
    times: int
    """Runs in a step, at most: a branch that only some ticks take counts in all."""
    work_under: int
    """Computing instructions between its start and its end; with 0 the device waits for it."""
    source: str
    """Where it was written, as JAX names the place."""


@dataclass(frozen=True, kw_only=True)
class Rematerialised:
    """An array that the partitioner made whole on every device, because it knew no better way from
    one sharding to another.
    """

    array: str
    """Its type and shape on one device, such as `f32[4,24,12]`."""
    source: str
    """Where it was written, as JAX names the place."""
    change: tuple[str, ...]
    """Logical axes whose rule, kept whole or given to another mesh axis, would avoid it; empty: no
    dimension's size names one."""


@dataclass(frozen=True, kw_only=True)
class Allocated:
    """Memory that a compiled step needs on each device, and the device's capacity."""

    argument_bytes: int
    """State and batch."""
    temp_bytes: int
    """Everything else that the step needs."""
    output_bytes: int
    """New state and metrics."""
    alias_bytes: int
    """Of outputs that are written over arguments."""
    capacity_bytes: int | None
    """Memory that the device has for it; None: unknown."""
    headroom_share: float
    """Of the capacity, which has to stay free."""

    @property
    def total_bytes(self) -> int:
        """All that the step needs."""
        return self.argument_bytes + self.temp_bytes + self.output_bytes - self.alias_bytes

    @property
    def fits(self) -> bool | None:
        """Whether that leaves the headroom; None if the capacity is unknown."""
        return (
            None
            if self.capacity_bytes is None
            else self.total_bytes <= (1 - self.headroom_share) * self.capacity_bytes
        )


class MemoryAnalysis(Protocol):
    """XLA's figures of an executable, as `jax.stages.Compiled.memory_analysis` gives them."""

    argument_size_in_bytes: int
    temp_size_in_bytes: int
    output_size_in_bytes: int
    alias_size_in_bytes: int


def check_executable(
    analysis: MemoryAnalysis,
    bytes_per_device: int | None,
    headroom_share: float = LIMIT_HEADROOM_SHARE,
) -> Allocated:
    """The memory that a run's executable needs, checked before the first step.

    Args:
      analysis: of the executable that will run.
      bytes_per_device: what JAX's allocator may use on it (`bytes_limit`); None: unknown.
      headroom_share: of that, which has to stay free.
    """
    return Allocated(
        argument_bytes=analysis.argument_size_in_bytes,
        temp_bytes=analysis.temp_size_in_bytes,
        output_bytes=analysis.output_size_in_bytes,
        alias_bytes=analysis.alias_size_in_bytes,
        capacity_bytes=bytes_per_device,
        headroom_share=headroom_share,
    )


@dataclass(frozen=True, kw_only=True)
class CompileReport(Allocated):
    """Properties of a compiled training step."""

    plan: str
    """Digest of the plan that was compiled."""
    target: str
    """The accelerator compiled for."""
    attention: AttentionKernel
    """The kernel that was compiled."""
    num_devices: int
    compile_s: float
    """Seconds of lowering and compiling."""
    dot_flops: float
    """FLOPs of matmuls on one device in a step."""
    traffic: tuple[Traffic, ...]
    rematerialised: tuple[Rematerialised, ...]
    unknown_loops: tuple[str, ...]
    """Loops whose trip count the compiler does not know: what is in them counts once."""

    @property
    def exposed_collectives(self) -> tuple[Traffic, ...]:
        """Sends, gathers and scatters that nothing hides: not asynchronous, or nothing between
        start and end.
        """
        return tuple(
            each for each in self.traffic if each.work_under == 0 and each.kind != "all-reduce"
        )

    def wire_bytes(self) -> dict[tuple[str, tuple[str, ...]], float]:
        """Bytes that a device sends in a step, by kind and mesh axes."""
        sums: dict[tuple[str, tuple[str, ...]], float] = {}
        for each in self.traffic:
            key = each.kind, each.axes
            sums[key] = sums.get(key, 0.0) + each.times * each.wire_bytes
        return sums

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "CompileReport":
        """The inverse of `to_json`."""
        value = json.loads(text)
        return cls(
            **{
                **value,
                "unknown_loops": tuple(value["unknown_loops"]),
                "traffic": tuple(
                    Traffic(**{**each, "axes": tuple(each["axes"])}) for each in value["traffic"]
                ),
                "rematerialised": tuple(
                    Rematerialised(**{**each, "change": tuple(each["change"])})
                    for each in value["rematerialised"]
                ),
            }
        )
