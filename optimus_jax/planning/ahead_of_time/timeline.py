"""Which share of each collective of a compiled program runs beside compute.

The text of a scheduled program is in the order in which a device starts its instructions. Two
clocks walk through it: the device's, which every computing instruction moves on, and the network's,
on which collectives follow one another from their start instructions. Where a collective's done
instruction is reached before it has ended, the device waits, and the collective is exposed for that
long. A collective without a start and a done instruction is exposed as a whole.

Durations are those of the planner's time model. That compute and a collective slow each other down
while they overlap is left out here.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from optimus_jax.mesh.branches import share_taken
from optimus_jax.planning.ahead_of_time.hlo import Collective, HloProgram, Instruction, shape_bytes
from optimus_jax.planning.cost.work import Work, matmul

_VIEWS = (
    "bitcast",
    "get-tuple-element",
    "tuple",
    "parameter",
    "constant",
    "after-all",
    "partition-id",
)
_ATTENTION = "__cudnn$fmha"
_DIMS = re.compile(r"\[([\d,]*)\]")


@dataclass(frozen=True, kw_only=True)
class TimedCollective:
    """A collective of a program with its times, in seconds per execution."""

    collective: Collective
    time_s: float
    exposed_s: float
    """The part for which the device waits."""


def timed_collectives(
    program: HloProgram,
    exchange_s: Callable[[Collective], float],
    compute_s: Callable[[Work], float],
) -> tuple[TimedCollective, ...]:
    """All collectives of a program, in the order of its text.

    Args:
      exchange_s: seconds of a collective, without overlap.
      compute_s: seconds of what a device computes.
    """
    clocks = _Clocks(program, exchange_s, compute_s)
    clocks.run(program.entry)
    return tuple(
        TimedCollective(
            collective=each, time_s=exchange_s(each), exposed_s=clocks.exposed.get(place, 0.0)
        )
        for place, each in program.placed_collectives.items()
    )


class _Clocks:
    """One walk through a program. Every computation is walked through once, from the state in which
    the network is idle; loops multiply it.
    """

    def __init__(
        self,
        program: HloProgram,
        exchange_s: Callable[[Collective], float],
        compute_s: Callable[[Work], float],
    ):
        self.program, self.exchange_s, self.compute_s = program, exchange_s, compute_s
        self.exposed: dict[tuple[str, str], float] = {}
        """Seconds for which the device waits for a collective (computation, instruction)."""
        self._walked: dict[str, float] = {}

    def run(self, computation: str) -> float:
        """Seconds of a computation."""
        if computation not in self._walked:
            self._walked[computation] = self._walk(computation)
        return self._walked[computation]

    def _walk(self, computation: str) -> float:
        device = network = 0.0
        ends: dict[str, tuple[float, tuple[str, str]]] = {}
        for i in self.program.computations[computation].values():
            if i.opcode.endswith("-done"):
                [end, place] = ends.get(i.operands[0], (device, ("", "")))
                self.exposed[place] = max(0.0, end - device)
                device = max(device, end)
            elif (place := self.program.collective_at(computation, i)) is not None:
                time_s = self.exchange_s(self.program.placed_collectives[place])
                begin = max(device, network)
                network = begin + time_s
                if i.opcode.endswith("-start"):
                    ends[i.name] = network, place
                else:
                    self.exposed[place] = network - device
                    device = network
            else:
                device += self._seconds(computation, i)
        return device

    def _seconds(self, computation: str, i: Instruction) -> float:
        if i.opcode in _VIEWS or i.opcode.endswith("-start"):
            return 0.0
        if i.opcode == "while":
            return float(i.calls) * sum(map(self.run, i.callees))
        if i.opcode == "conditional":
            return float(share_taken(i.source) or 1) * max(map(self.run, i.callees), default=0.0)
        if i.opcode == "call":
            return sum(map(self.run, i.callees))
        return self.compute_s(self._work(computation, i))

    def _work(self, computation: str, i: Instruction) -> Work:
        """The work of an instruction that is one kernel."""
        instructions = self.program.computations[computation]
        if i.opcode == "custom-call" and _ATTENTION in i.attributes:
            return Work(fused_flops=_attention_flops(i, instructions), kernels=1)
        if dots := self._dots(computation, i):
            return sum(dots, Work(kernels=1))
        if i.opcode == "fusion":
            return Work(num_bytes=self._passed(i), kernels=1)
        operands = sum(shape_bytes(instructions[name].shape) for name in i.operands)
        return Work(num_bytes=operands + shape_bytes(i.shape), kernels=1)

    def _dots(self, computation: str, i: Instruction) -> list[Work]:
        if i.opcode == "dot":
            return [_dot(i, self.program.computations[computation])]
        return [
            dot
            for callee in i.callees
            for inner in self.program.computations[callee].values()
            for dot in self._dots(callee, inner)
        ]

    def _passed(self, fusion: Instruction) -> float:
        """Bytes that a fusion without matmuls reads and writes. Of what it slices, or updates in
        place, only the part counts.
        """
        [computation] = fusion.callees
        inner = self.program.computations[computation]
        updated = {
            _behind_views(each.operands[0], inner): shape_bytes(inner[each.operands[1]].shape)
            for each in inner.values()
            if each.opcode == "dynamic-update-slice"
        }
        total = 0.0
        for each in inner.values():
            if each.opcode != "parameter":
                continue
            users = _users(each.name, inner)
            if each.name in updated:
                total += 2 * updated[each.name]
            elif users and all(
                user.opcode in ("dynamic-slice", "slice")
                and _behind_views(user.operands[0], inner) == each.name
                for user in users
            ):
                total += sum(shape_bytes(user.shape) for user in users)
            else:
                total += shape_bytes(each.shape)
        written = shape_bytes(fusion.shape)
        for name in updated:
            written -= shape_bytes(inner[name].shape)
        return total + max(0, written)


def _users(name: str, inner: Mapping[str, Instruction]) -> list[Instruction]:
    """The instructions that read a value, behind those that change its shape alone."""
    found: list[Instruction] = []
    for each in inner.values():
        if name in each.operands:
            found += _users(each.name, inner) if each.opcode == "bitcast" else [each]
    return found


def _behind_views(name: str, inner: Mapping[str, Instruction]) -> str:
    while inner[name].opcode == "bitcast":
        name = inner[name].operands[0]
    return name


def _dims(shape: str) -> list[int]:
    found = _DIMS.search(shape)
    return [int(dim) for dim in found[1].split(",") if dim] if found else []


def _dot(dot: Instruction, around: Mapping[str, Instruction]) -> Work:
    """The work of a matmul."""
    left = _dims(around[dot.operands[0]].shape)

    def named(kind: str) -> int:
        found = re.search(rf"{kind}=\{{([\d,]*)\}}", dot.attributes)
        return math.prod(left[int(dim)] for dim in found[1].split(",") if dim) if found else 1

    inner, count = named("lhs_contracting_dims"), named("lhs_batch_dims")
    rows = math.prod(left) // max(1, inner * count)
    columns = math.prod(_dims(dot.shape)) // max(1, rows * count)
    return matmul(rows, inner, columns, count)


def _attention_flops(call: Instruction, around: Mapping[str, Instruction]) -> float:
    """FLOPs of cuDNN's kernel, of keys that are not after the query: two products in forward, five
    in backward.
    """
    query, key = (_dims(around[name].shape) for name in call.operands[:2])
    products = 5 if "Backward" in call.attributes else 2
    return products * math.prod(query) * key[1]
