"""Collectives and matmuls of a compiled program, parsed from its text (as XLA's CPU compiler writes
it).
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from jax.sharding import Mesh

from optimus_jax.mesh.branches import share_taken
from optimus_jax.planning.ahead_of_time.hlo_groups import groups_of

ITEM_BYTES = {
    "pred": 1,
    "s8": 1,
    "u8": 1,
    "bf16": 2,
    "f16": 2,
    "s32": 4,
    "u32": 4,
    "f32": 4,
    "s64": 8,
    "u64": 8,
    "f64": 8,
}

Loops = tuple[int | Fraction, ...]

_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.-]+) \(.*\{$")
_COLLECTIVE = re.compile(
    r" = (?P<type>.*?)"
    r" (?P<kind>all-reduce|all-gather|reduce-scatter|all-to-all|collective-(?:permute|broadcast))\("
)
_ARRAY = re.compile(r"\b(" + "|".join(ITEM_BYTES) + r")\[([\d,]*)\]")
_CALLED = re.compile(
    r"(?:body|condition|calls|to_apply|(?:branch|true|false)_computations?)="
    r"(\{[^}]*\}|%?[\w.-]+)"
)
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')


@dataclass(frozen=True)
class Moved:
    """One array that a collective produces on a device; a collective of several arrays gives
    several.
    """

    kind: str
    """all-reduce, all-gather, reduce-scatter, ..."""
    axes: tuple[str, ...]
    """Mesh axes along which devices take part, in the mesh's order."""
    dtype: str
    shape: tuple[int, ...]
    """Shape of the result on one device."""
    loops: Loops
    """Trip counts of the loops around it, and the shares of iterations in which branches are taken
    (mesh/branches.py), outermost first; a trip count that XLA does not know is 0."""
    source: str
    """JAX's name for where it comes from."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the result on one device, of one execution."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]

    @property
    def times(self) -> int:
        """Number of executions in a run of the program."""
        return int(math.prod(self.loops))


def collectives(text: str, mesh: Mesh) -> list[Moved]:
    """All arrays of all collectives in a compiled program, in the order of the text of each
    computation.
    """
    computations, entry = _computations(text)
    return list(_walk(computations, entry, (), mesh))


def num_instructions(text: str) -> int:
    """Number of instructions in all computations."""
    return sum(map(len, _computations(text)[0].values()))


def _computations(text: str) -> tuple[dict[str, list[str]], str]:
    """Lines of every computation by its name, and the name of the entry computation."""
    computations: dict[str, list[str]] = {}
    entry, lines = "", []
    for line in text.splitlines():
        if header := _COMPUTATION.match(line):
            lines = computations.setdefault(header[1], [])
            entry = header[1] if line.startswith("ENTRY") else entry
        elif " = " in line:
            lines.append(line)
    assert entry, "this is not the text of a compiled program"
    return computations, entry


def _walk(
    computations: dict[str, list[str]], name: str, loops: Loops, mesh: Mesh
) -> Iterator[Moved]:
    for line in computations[name]:
        if found := _COLLECTIVE.search(line):
            source = re.search(r'op_name="([^"]*)"', line)
            for dtype, sizes in _ARRAY.findall(found["type"]):
                shape = tuple(int(size) for size in sizes.split(",") if size)
                yield Moved(
                    found["kind"],
                    _axes(line, mesh),
                    dtype,
                    shape,
                    loops,
                    source[1] if source else "",
                )
            continue
        inner = (*loops, *_repeated(line))
        for names in _CALLED.findall(line):
            for called in names.strip("{}").split(","):
                yield from _walk(computations, called.strip().lstrip("%"), inner, mesh)


def _repeated(line: str) -> Loops:
    """Trip count of a loop, or the share of a branch; nothing for other instructions."""
    if " while(" in line:
        trips = _TRIPS.search(line)
        return (int(trips[1]) if trips else 0,)
    source = re.search(r'op_name="([^"]*)"', line)
    taken = share_taken(source[1]) if source and " conditional(" in line else None
    return () if taken is None else (taken,)


def _axes(line: str, mesh: Mesh) -> tuple[str, ...]:
    """The mesh axes along which the members of a group differ."""
    place = dict(enumerate(np.ndindex(mesh.devices.shape)))
    groups = groups_of(line, mesh.size)
    differing = {
        dim
        for group in groups
        for dim in range(mesh.devices.ndim)
        if len({place[n][dim] for n in group}) > 1
    }
    return tuple(mesh.axis_names[dim] for dim in sorted(differing))


@dataclass(frozen=True)
class Matmul:
    """One matrix product, perhaps batched."""

    flops: int
    """FLOPs of one execution; a multiplication and an addition count as two."""
    operands: tuple[tuple[int, ...], tuple[int, ...]]
    """Shapes of both operands."""
    loops: Loops
    """As of `Moved`."""
    source: str
    """JAX's name for where it comes from."""

    @property
    def total_flops(self) -> int:
        """FLOPs in a run of the program."""
        return int(self.flops * math.prod(self.loops))


def matmuls(text: str) -> list[Matmul]:
    """Every matrix product of a compiled program, those inside fusions too; both branches of a
    conditional count, but for those of mesh/branches.py.
    """
    computations, entry = _computations(text)
    return list(_walk_matmuls(computations, entry, ()))


_RESULT = re.compile(r"^\s*(?:ROOT )?%?([\w.-]+) = \(?(\w+)\[([\d,]*)\]")
_DOT = re.compile(r" dot\(%?([\w.-]+), %?([\w.-]+)\).*?lhs_contracting_dims=\{([\d,]*)\}")


def _walk_matmuls(computations: dict[str, list[str]], name: str, loops: Loops) -> Iterator[Matmul]:
    shapes = {
        found[1]: _sizes(found[3]) for line in computations[name] if (found := _RESULT.match(line))
    }
    for line in computations[name]:
        if dot := _DOT.search(line):
            left, right = shapes[dot[1]], shapes[dot[2]]
            result = _RESULT.match(line)
            assert result
            contracted = math.prod(left[dim] for dim in _sizes(dot[3]))
            source = re.search(r'op_name="([^"]*)"', line)
            yield Matmul(
                2 * math.prod(_sizes(result[3])) * contracted,
                (left, right),
                loops,
                source[1] if source else "",
            )
            continue
        inner = (*loops, *_repeated(line))
        for names in _CALLED.findall(line):
            for called in names.strip("{}").split(","):
                yield from _walk_matmuls(computations, called.strip().lstrip("%"), inner)


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(int(size) for size in text.split(",") if size)
