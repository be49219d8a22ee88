"""Read a compiled program's HLO text: how often each part runs, its matmuls and its collectives.

Compiling for absent devices gives no cost analysis, and an analysis that ignores trip counts of
loops would be useless for a scanned stack of layers. The text contains every loop's trip count,
every matmul's dimensions, and the devices of every collective.

A *computation* is an HLO function, such as a loop's body or a fusion. A *group* is a set of devices
that take part in a collective together. Devices are given as partition numbers, which are positions
in the mesh (mesh order, tensor fastest).
"""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

import numpy as np

from optimus_jax.mesh.branches import share_taken
from optimus_jax.planning.ahead_of_time.hlo_groups import Groups, groups_of

COLLECTIVES = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "collective-permute",
    "all-to-all",
    "ragged-all-to-all",
)
_COMPUTING = ("fusion", "dot", "while", "conditional", "call", "custom-call", "copy")
_CALLEES = re.compile(
    r"(?:calls|body|condition|to_apply|true_computation|false_computation)=%?([\w.\-]+)"
)
_BRANCHES = re.compile(r"(?:branch_computations|called_computations)=\{([^}]*)\}")
_HEADER = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = ")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_ARRAY = re.compile(r"\b(pred|token|[a-z]+(\d+)[a-z0-9]*)\[([\d,]*)\]")
_NAME = re.compile(r"%([\w.\-]+)")
_SOURCE = re.compile(r'op_name="([^"]*)"')


@dataclass(frozen=True, kw_only=True)
class Instruction:
    """One instruction (a line) of a computation."""

    name: str
    opcode: str
    shape: str
    """Shape of the result, as printed; a tuple's is in parentheses."""
    operands: tuple[str, ...]
    """Names of the operands."""
    attributes: str
    """The text after the operands."""
    number: int = 0
    """Of a parameter: its place among the computation's arguments."""
    is_root: bool = False
    """Whether its result is the computation's."""

    @property
    def callees(self) -> tuple[str, ...]:
        """Computations that the instruction calls."""
        named = _CALLEES.findall(self.attributes)
        branches = (
            name for group in _BRANCHES.findall(self.attributes) for name in group.split(",")
        )
        return (*named, *(name.strip().lstrip("%") for name in branches if name.strip()))

    @property
    def trip_count(self) -> int | None:
        """Trip count of a loop; None if the compiler does not know it."""
        found = _TRIPS.search(self.attributes)
        return int(found[1]) if found else None

    @property
    def calls(self) -> Fraction:
        """How often it runs its computations each time that it runs: a loop's trip count, or 1 if
        that is unknown; the share of ticks in which a pipeline's branch is taken
        (mesh/branches.py). Every branch of another conditional counts as taken.
        """
        if self.opcode == "conditional":
            return share_taken(self.source) or Fraction(1)
        return Fraction(self.trip_count or 1)

    @property
    def source(self) -> str:
        """JAX's name of the operation in the source program (op_name); empty if it was lost."""
        found = _SOURCE.search(self.attributes)
        return found[1] if found else ""


@dataclass(frozen=True, kw_only=True)
class Collective:
    """One collective of a program."""

    kind: str
    """One of COLLECTIVES."""
    payload_bytes: int
    """Bytes of the whole array in one execution on one device: before a scatter or after a
    gather."""
    groups: Groups
    """Devices that communicate with one another; (source, target) for a collective-permute."""
    times: int
    """Executions per execution of the program; in a branch as `Instruction.calls` counts."""
    work_under: int
    """Compute instructions (fusions, loops, calls) scheduled between its start and its end. 0: the
    device waits for it."""
    source: str
    """JAX's name of the operation in the source program (op_name)."""

    @property
    def wire_bytes(self) -> float:
        """Bytes that one device sends in one execution, around a ring.

        No algorithm sends fewer without help from switches.
        """
        size = max(map(len, self.groups), default=1)
        share = {"all-reduce": 2 * (size - 1) / size, "collective-permute": 1.0}.get(
            self.kind, (size - 1) / size
        )
        return share * self.payload_bytes

    def axes(self, sizes: dict[str, int]) -> tuple[str, ...]:
        """Mesh axes along which its groups differ, given the sizes of all axes, slowest first."""
        members = [
            np.array(np.unravel_index(group, tuple(sizes.values()))) for group in self.groups
        ]
        return tuple(
            name
            for i, name in enumerate(sizes)
            if any((where[i] != where[i][0]).any() for where in members)
        )


class HloProgram:
    """The computations of an HLO module."""

    def __init__(self, text: str):
        self.computations: dict[str, dict[str, Instruction]] = {}
        self.entry = ""
        found = re.match(r"HloModule ([\w.\-]+)", text)
        self.name = found[1] if found else ""
        """Of the module; empty if the text does not begin with it."""
        self.num_partitions = (
            int(found[1]) if (found := re.search(r"num_partitions=(\d+)", text)) else 1
        )
        current: dict[str, Instruction] = {}
        for line in text.splitlines():
            if header := _HEADER.match(line):
                current = self.computations[header[2]] = {}
                self.entry = header[2] if header[1] else self.entry
            elif start := _INSTRUCTION.match(line):
                current[start[2]] = _instruction(
                    start[2], line[start.end() :], is_root=start[1] is not None
                )

    def root(self, computation: str) -> Instruction:
        """The instruction whose result is the computation's; it need not be the last one."""
        return next(i for i in self.computations[computation].values() if i.is_root)

    @cached_property
    def runs(self) -> dict[str, int]:
        """How often each computation runs per execution of the program.

        A loop whose trip count is unknown counts once (`unknown_loops`).
        """
        order: list[str] = []
        self._visit(self.entry, set(), order)
        counts = dict.fromkeys(order, Fraction(0))
        counts[self.entry] = Fraction(1)
        for name in reversed(order):  # callers before callees
            for instruction in self.computations[name].values():
                for callee in instruction.callees:
                    counts[callee] += counts[name] * instruction.calls
        return {name: int(count) for name, count in counts.items()}

    def _visit(self, name: str, seen: set[str], order: list[str]) -> None:
        seen.add(name)
        for instruction in self.computations[name].values():
            for callee in instruction.callees:
                if callee not in seen:
                    self._visit(callee, seen, order)
        order.append(name)

    def instructions(self) -> Iterator[tuple[str, Instruction, int]]:
        """Yield (computation, instruction, runs) of every instruction that runs."""
        for name, times in self.runs.items():
            for instruction in self.computations[name].values():
                yield name, instruction, times

    @property
    def unknown_loops(self) -> tuple[str, ...]:
        """Loops whose trip count the compiler does not know."""
        return tuple(
            i.name
            for _, i, _ in self.instructions()
            if i.opcode == "while" and i.trip_count is None
        )

    def dot_flops(self) -> float:
        """FLOPs of all matmuls per execution on one device: 2 for each multiply-add."""
        return float(
            sum(
                times * self._dot_flops(name, i)
                for name, i, times in self.instructions()
                if i.opcode == "dot"
            )
        )

    def _dot_flops(self, computation: str, dot: Instruction) -> int:
        left = _dims(self.computations[computation][dot.operands[0]].shape)
        contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", dot.attributes)
        depth = (
            math.prod(left[int(dim)] for dim in contracted[1].split(",") if dim)
            if contracted
            else 1
        )
        return 2 * math.prod(_dims(dot.shape)) * depth

    def collectives(self) -> tuple[Collective, ...]:
        """Every collective that runs, in the order of the text."""
        return tuple(self.placed_collectives.values())

    @cached_property
    def placed_collectives(self) -> dict[tuple[str, str], Collective]:
        """The same by the computation and the name of their instructions."""
        return {
            (name, i.name): self._collective(name, i, times)
            for name, i, times in self.instructions()
            if i.opcode.removesuffix("-start") in COLLECTIVES
        }

    def collective_at(self, computation: str, i: Instruction) -> tuple[str, str] | None:
        """The key in `placed_collectives` of what an instruction begins, itself or in a computation
        that it starts."""
        if (computation, i.name) in self.placed_collectives:
            return computation, i.name
        if i.opcode == "async-start":
            for callee in i.callees:
                for inner in self.computations[callee].values():
                    if (callee, inner.name) in self.placed_collectives:
                        return callee, inner.name
        return None

    def _collective(self, computation: str, i: Instruction, times: int) -> Collective:
        kind = i.opcode.removesuffix("-start")
        groups = groups_of(i.attributes, self.num_partitions)
        given = sum(
            shape_bytes(self.computations[computation][operand].shape) for operand in i.operands
        )
        gathered = max(map(len, groups), default=1) if kind == "all-gather" else 1
        return Collective(
            kind=kind,
            payload_bytes=given * gathered,
            groups=groups,
            times=times,
            source=i.source,
            work_under=self._work_under(*self._async_starts.get(computation, (computation, i))),
        )

    @cached_property
    def _async_starts(self) -> dict[str, tuple[str, Instruction]]:
        """Where a computation is started, of those that run beside others."""
        return {
            callee: (name, i)
            for name, i, _ in self.instructions()
            if i.opcode == "async-start"
            for callee in i.callees
        }

    def _work_under(self, computation: str, start: Instruction) -> int:
        """Number of computing instructions between `start` and its done instruction.

        The text of a scheduled program is in the order in which a device runs it.
        """
        count, begun = 0, False
        for i in self.computations[computation].values():
            if begun and start.name in i.operands and i.opcode.endswith("-done"):
                return count
            begun = begun or i is start
            count += begun and i.opcode in _COMPUTING
        return 0  # without a done instruction the collective is synchronous


def dot_flops(text: str) -> float:
    """FLOPs of all matmuls of an HLO module's text; see `HloProgram.dot_flops`.

    Matmuls that XLA replaced with library calls (custom calls, on devices that exist) are not
    counted.
    """
    return HloProgram(text).dot_flops()


def shape_bytes(shape: str) -> int:
    """Bytes of an array, or of all arrays of a tuple."""
    return sum(
        math.prod(_split(dims)) * _bits(kind, width) // 8
        for kind, width, dims in _ARRAY.findall(shape)
    )


def _bits(kind: str, width: str) -> int:
    return {"pred": 8, "token": 0}.get(kind) or int(width or 0)


def _dims(shape: str) -> Sequence[int]:
    found = _ARRAY.search(shape)
    assert found, shape
    return _split(found[3])


def _split(dims: str) -> Sequence[int]:
    return [int(dim) for dim in dims.split(",") if dim]


def _instruction(name: str, rest: str, *, is_root: bool) -> Instruction:
    """Parse the text after `name = `: shape, opcode, operands in parentheses, attributes."""
    end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.index(" ")
    opening = rest.index("(", end)
    closing = _closing(rest, opening)
    opcode, given = rest[end:opening].strip(), rest[opening + 1 : closing]
    return Instruction(
        name=name,
        opcode=opcode,
        shape=rest[:end],
        operands=tuple(_NAME.findall(given)),
        attributes=rest[closing + 1 :],
        number=int(given) if opcode == "parameter" else 0,
        is_root=is_root,
    )


def _closing(text: str, opening: int) -> int:
    """Position of the parenthesis that closes the one at `opening`."""
    depth = 0
    for found in re.finditer(r"[()]", text[opening:]):
        depth += 1 if found[0] == "(" else -1
        if depth == 0:
            return opening + found.start()
    raise ValueError(f"no end: {text[:100]}")
