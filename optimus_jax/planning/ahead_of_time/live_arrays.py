"""Which arrays are in a device's memory when a compiled program needs most.

XLA says how many bytes a program needs, and not of what. The text of a scheduled program is in the
order in which a device runs it, so the arrays that are alive at each instruction follow from it:

* An array lives from the instruction that makes it to the last one that reads it.
* Tuples, parts of tuples and bitcasts are other names of arrays.
* An update of a slice is made in place, by itself or at the end of a fusion.
* What a loop carries stays where it was when the loop began: the compiler has added copies where
  that would be wrong. In the same way results of branches and calls are the caller's, and results
  of the program are in the arguments that were donated.

XLA packs arrays that live at different times into the same memory, which may take a little more
than those that live at once, and lets some instructions write over what they read, which takes
less.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from optimus_jax.planning.ahead_of_time.hlo import HloProgram, Instruction, shape_bytes

_INDEX = re.compile(r"index=(\d+)")
_NUMBERING = re.compile(r"/\*.*?\*/")
_ON_HOST = "S(5)"
"""What a layout has of an array in the host's memory."""
_UPDATE = "dynamic-update-slice"
_MOVING = ("bitcast", "reshape", "copy", "convert", "transpose", "broadcast")
"""Instructions that only move or convert an array."""
_RUNNING = ("while", "conditional", "call", "async-start")
"""Instructions whose computations have arrays of their own."""


@dataclass(eq=False)
class LiveArray:
    """An array in a device's memory."""

    shape: str
    """Such as `f32[4,8,256,1024]`."""
    num_bytes: int
    """0 of an array in the host's memory."""
    source: str
    """JAX's name (op_name) of what made it; of an argument, its name; of what a loop fills, that of
    what it is filled with."""
    is_argument: bool
    """Whether it is an argument of the program, which may be donated."""
    first: int
    """Where it is made, counted in instructions of its computation."""
    last: int
    """Where it is read last."""


@dataclass(kw_only=True)
class _Peak:
    """The most that a computation needs besides its arguments and results."""

    num_bytes: int = 0
    arrays: list[LiveArray] = field(default_factory=list)
    filled: dict[int, str] = field(default_factory=dict)
    """Names of what it fills arguments with in place, by the argument's place among all arrays of
    arguments."""
    results: list[str] = field(default_factory=list)
    """Names of the arrays of its result."""


def arrays_at_peak(program: HloProgram) -> list[LiveArray]:
    """The arrays on a device when the program needs most, its arguments first. Constants are left
    out.

    Args:
      program: of a scheduled module, as a compiled program's `as_text` gives it.
    """
    arguments = [
        array
        for i in program.computations[program.entry].values()
        if i.opcode == "parameter"
        for array in _all(_made(i, 0, is_argument=True))
    ]
    return [*arguments, *_Peaks(program).of(program.entry).arrays]


class _Peaks:
    """Peaks of the computations of a program."""

    def __init__(self, program: HloProgram) -> None:
        self._program = program
        self._found: dict[str, _Peak] = {}

    def of(self, computation: str) -> _Peak:
        """That of a computation."""
        if computation not in self._found:
            self._found[computation] = self._peak(computation)
        return self._found[computation]

    def _peak(self, computation: str) -> _Peak:
        values: dict[str, Any] = {}
        made: dict[int, LiveArray] = {}
        nested: dict[int, _Peak] = {}
        filled: dict[int, str] = {}
        instructions = self._program.computations[computation]
        for place, i in enumerate(instructions.values()):
            operands = tuple(values[name] for name in i.operands)
            carried = list(_all(operands))
            for array in carried:
                array.last = place
            value = values[i.name] = self._value(i, operands, place)
            known = {id(array) for array in carried}
            made |= {id(each): each for each in _all(value) if id(each) not in known}
            if i.opcode in _RUNNING:
                peaks = [self.of(callee) for callee in i.callees]
                largest = nested[place] = max(peaks, key=lambda peak: peak.num_bytes)
                if i.opcode == "while":
                    for peak in peaks:
                        filled |= {id(carried[at]): name for at, name in peak.filled.items()}
                elif i.opcode != "async-start":
                    for array, name in zip(_all(value), largest.results, strict=True):
                        array.source = name or array.source
            elif name := self._filled_with(instructions, values, i):
                filled |= {id(array): name for array in _all(value) if id(array) in known}
        parameters = sorted(_of(instructions, "parameter"), key=lambda i: i.number)
        given = list(_all(tuple(values[i.name] for i in parameters)))
        for array in made.values():
            array.source = filled.get(id(array), array.source)
        # Arguments and results are the caller's; constants are beside the program's memory.
        elsewhere = _of(instructions, "parameter", "constant"), [self._program.root(computation)]
        outside = {id(a) for group in elsewhere for i in group for a in _all(values[i.name])}
        peak = _most([array for key, array in made.items() if key not in outside], nested)
        peak.filled = {at: filled[id(each)] for at, each in enumerate(given) if id(each) in filled}
        result = values[self._program.root(computation).name]
        peak.results = [filled.get(id(array), array.source) for array in _all(result)]
        return peak

    def _value(self, i: Instruction, operands: tuple[Any, ...], place: int) -> Any:
        """What an instruction computes, of what its operands are."""
        made = _made(i, place)
        match i.opcode:
            case "tuple":
                return operands
            case "get-tuple-element":
                index = _INDEX.search(i.attributes)
                assert index is not None, i
                return operands[0][int(index[1])]
            case "bitcast" | "opt-barrier" | "while" | "domain" | "all-reduce-done":
                return operands[0]
            case "all-reduce-start":  # in place
                return operands[0] if len(operands) == 1 else operands
            case "copy-start":  # (result, operand, ...)
                return made[0], operands[0], *made[2:]
            case "copy-done":
                return operands[0][0]
            case "dynamic-update-slice":
                return operands[0]
            case "fusion":
                return self._of_fusion(i, operands, made)
        if i.opcode.endswith("-start") and isinstance(made, tuple):  # (operands, result, ...)
            is_nested = isinstance(made[0], tuple)
            return operands if is_nested or len(operands) != 1 else operands[0], *made[1:]
        if i.opcode.endswith("-done") and isinstance(operands[0], tuple):
            return operands[0][1]
        return made

    def _of_fusion(self, i: Instruction, operands: tuple[Any, ...], made: Any) -> Any:
        """The value of a fusion, which makes updates of slices in place."""
        body = self._program.computations[i.callees[0]]

        def in_place(root: Instruction, array: Any) -> Any:
            update = _through(body, root, ("bitcast",))
            if update.opcode != _UPDATE:
                return array
            updated = _through(body, body[update.operands[0]], ("bitcast",))
            return operands[updated.number] if updated.opcode == "parameter" else array

        root = self._program.root(i.callees[0])
        if root.opcode != "tuple":
            return in_place(root, made)
        return tuple(
            in_place(body[name], array) for name, array in zip(root.operands, made, strict=True)
        )

    def _filled_with(
        self, instructions: Mapping[str, Instruction], values: Mapping[str, Any], i: Instruction
    ) -> str:
        """The name of what an update of a slice writes; empty if it is none, or has no name."""
        if i.opcode == _UPDATE:
            return self._name(instructions, values, i.operands[1])
        if i.opcode != "fusion":
            return ""
        body = self._program.computations[i.callees[0]]
        for update in _of(body, _UPDATE):
            written = _through(body, body[update.operands[1]], _MOVING)
            if written.opcode == "parameter":
                return self._name(instructions, values, i.operands[written.number])
            return written.source
        return ""

    def _name(
        self, instructions: Mapping[str, Instruction], values: Mapping[str, Any], name: str
    ) -> str:
        """That of an instruction's first array, or of what it moves."""
        return next(_all(values[_through(instructions, instructions[name], _MOVING).name])).source


def _most(made: Sequence[LiveArray], nested: Mapping[int, _Peak]) -> _Peak:
    """The peak of a computation with these arrays, and peaks of computations that it runs."""
    found = _Peak()
    for place in sorted({array.first for array in made} | set(nested)):
        alive = [array for array in made if array.first <= place <= array.last]
        within = nested.get(place, _Peak())
        total = sum(array.num_bytes for array in alive) + within.num_bytes
        if total > found.num_bytes:
            found = _Peak(num_bytes=total, arrays=[*alive, *within.arrays])
    return found


def _made(i: Instruction, place: int, *, is_argument: bool = False) -> Any:
    """New arrays of the shape of an instruction's result."""

    def made(shape: str) -> Any:
        if shape.startswith("("):
            return tuple(map(made, _parts(shape)))
        return LiveArray(
            shape=shape.partition("{")[0],
            num_bytes=0 if _ON_HOST in shape else shape_bytes(shape),
            source=i.source.replace("\\'", "'"),
            is_argument=is_argument,
            first=place,
            last=place,
        )

    return made(i.shape)


def _parts(shape: str) -> Iterator[str]:
    """The shapes of a tuple's parts."""
    depth, start = 0, 1
    text = _NUMBERING.sub("", shape)
    for at, character in enumerate(text):
        if depth == 1 and character in ",)" and (part := text[start:at].strip()):
            yield part
        if depth == 1 and character == ",":
            start = at + 1
        depth += (character in "([{") - (character in ")]}")


def _all(value: Any) -> Iterator[LiveArray]:
    """All arrays of a value, or of a tuple of values."""
    if isinstance(value, tuple):
        for each in value:
            yield from _all(each)
    else:
        yield value


def _of(instructions: Mapping[str, Instruction], *opcodes: str) -> list[Instruction]:
    return [i for i in instructions.values() if i.opcode in opcodes]


def _through(
    instructions: Mapping[str, Instruction], i: Instruction, opcodes: Sequence[str]
) -> Instruction:
    """What an instruction moves or renames, from instruction to instruction."""
    while i.opcode in opcodes:
        i = instructions[i.operands[0]]
    return i
