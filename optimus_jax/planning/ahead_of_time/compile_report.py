"""Properties of a compiled training step: memory needed and available, collectives by mesh axis,
rematerialised arrays.

planning/ahead_of_time/compile_check.py makes a report for devices that need not exist;
`check_executable` reads the executable that a run is about to use.
"""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from optimus_jax.config import AttentionKernel

LIMIT_HEADROOM_SHARE = 0.02
"""Share of the memory that JAX's allocator may use, left free for gaps between arrays and for the
next batch. Contexts and NCCL use other memory."""


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """One collective of the compiled step."""

    kind: str
    """all-reduce, all-gather, reduce-scatter, collective-permute or all-to-all."""
    axes: tuple[str, ...]
    """Mesh axes that its groups span."""
    payload_bytes: int
    """Bytes of the whole array in one execution on one device: before a scatter or after a
    gather."""
    wire_bytes: float
    """Bytes that one device sends in one execution, around a ring."""
    times: int
    """Executions per step. Every branch of a conditional in a layer counts as taken."""
    work_under: int
    """Compute instructions between its start and its end. 0: the device waits for it."""
    source: str
    """JAX's name of the operation in the source program (op_name)."""
    time_s: float
    """Seconds of one execution, without overlap, by the planner's time model."""
    exposed_s: float
    """Of these, those for which the device waits, in the compiler's order of instructions
    (planning/ahead_of_time/timeline.py)."""


@dataclass(frozen=True, kw_only=True)
class Rematerialised:
    """An array that XLA's partitioner replicated on every device, because it found no better way to
    convert between two shardings.
    """

    array: str
    """Its type and shape on one device, such as `f32[4,24,12]`."""
    source: str
    """JAX's name of the operation in the source program (op_name)."""
    change: tuple[str, ...]
    """Logical axes whose rules cause it: keep their dimension whole, or map it to another mesh
    axis. Empty if no dimension's size identifies one."""


@dataclass(frozen=True, kw_only=True)
class Allocated:
    """Memory that a compiled step needs on each device, and the device's capacity."""

    argument_bytes: int
    """Bytes of state and batch."""
    temp_bytes: int
    """Bytes of everything else that the step needs."""
    output_bytes: int
    """Bytes of new state and metrics."""
    alias_bytes: int
    """Bytes of outputs that are written over arguments."""
    capacity_bytes: int | None
    """Memory available to the step on the device; None: unknown."""
    headroom_share: float
    """Share of the capacity that must stay free."""

    @property
    def total_bytes(self) -> int:
        """Bytes that the step needs in total."""
        return self.argument_bytes + self.temp_bytes + self.output_bytes - self.alias_bytes

    @property
    def fits(self) -> bool | None:
        """Whether the step fits with the headroom left free; None if the capacity is unknown."""
        return (
            None
            if self.capacity_bytes is None
            else self.total_bytes <= (1 - self.headroom_share) * self.capacity_bytes
        )


class MemoryAnalysis(Protocol):
    """XLA's figures of an executable, as `jax.stages.Compiled.memory_analysis` returns them."""

    argument_size_in_bytes: int
    temp_size_in_bytes: int
    output_size_in_bytes: int
    alias_size_in_bytes: int


def check_executable(
    analysis: MemoryAnalysis,
    bytes_per_device: int | None,
    headroom_share: float = LIMIT_HEADROOM_SHARE,
) -> Allocated:
    """Compare the memory that a run's executable needs with the device's, before the first step.

    Args:
      analysis: figures of the executable that will run.
      bytes_per_device: memory that JAX's allocator may use (`bytes_limit`); None: unknown.
      headroom_share: share of that memory that must stay free.
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
    """The accelerator that the plan was compiled for."""
    attention: AttentionKernel
    """The attention kernel that was compiled."""
    num_devices: int
    compile_s: float
    """Seconds of lowering and compiling."""
    dot_flops: float
    """FLOPs of matmuls per step on one device."""
    traffic: tuple[Traffic, ...]
    rematerialised: tuple[Rematerialised, ...]
    unknown_loops: tuple[str, ...]
    """Loops whose trip count the compiler does not know. Their contents are counted once."""

    @property
    def exposed_collectives(self) -> tuple[Traffic, ...]:
        """Collectives other than all-reduces that do not overlap with compute.

        They are synchronous, or no computation is scheduled between start and end.
        """
        return tuple(
            each for each in self.traffic if each.work_under == 0 and each.kind != "all-reduce"
        )

    def wire_bytes(self) -> dict[tuple[str, tuple[str, ...]], float]:
        """Bytes that a device sends per step, by kind and mesh axes."""
        sums: dict[tuple[str, tuple[str, ...]], float] = {}
        for each in self.traffic:
            key = each.kind, each.axes
            sums[key] = sums.get(key, 0.0) + each.times * each.wire_bytes
        return sums

    def exchange_times(self) -> dict[tuple[str, tuple[str, ...]], float]:
        """Seconds of collectives per step, without overlap, by kind and mesh axes."""
        sums: dict[tuple[str, tuple[str, ...]], float] = {}
        for each in self.traffic:
            key = each.kind, each.axes
            sums[key] = sums.get(key, 0.0) + each.times * each.time_s
        return sums

    def hidden_shares(self) -> dict[tuple[str, tuple[str, ...]], float]:
        """The share of the time of collectives that runs beside compute, by kind and mesh axes."""
        exposed: dict[tuple[str, tuple[str, ...]], float] = {}
        for each in self.traffic:
            key = each.kind, each.axes
            exposed[key] = exposed.get(key, 0.0) + each.times * each.exposed_s
        return {
            key: 1 - exposed[key] / time_s
            for key, time_s in self.exchange_times().items()
            if time_s
        }

    def compare_hidden(
        self, planned: Mapping[tuple[str, tuple[str, ...]], float]
    ) -> dict[str, dict[str, float | None]]:
        """`hidden_shares` beside those that the planner predicts (planning/cost/cost.py), the
        longest exchanges first.
        """
        times, compiled = self.exchange_times(), self.hidden_shares()
        return {
            f"{kind} over {'+'.join(axes)}": {
                "time_s": round(times[kind, axes], 6),
                "compiled": round(compiled[kind, axes], 3),
                "planned": round(planned[kind, axes], 3) if (kind, axes) in planned else None,
            }
            for kind, axes in sorted(compiled, key=lambda key: -times[key])
        }

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
