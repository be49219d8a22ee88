"""What a device's memory holds when a compiled step needs most, beside what was predicted.

Parts are those of the planner's estimate (planning/cost/memory.py). An array's name (`op_name`)
says which one it is of; gradients have the shapes of parameters. What is counted differs from what
XLA allocates by how it packs arrays (planning/ahead_of_time/live_arrays.py).
"""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from typing import Any, Self

from optimus_jax.mesh import scopes
from optimus_jax.planning.ahead_of_time.hlo import HloProgram
from optimus_jax.planning.ahead_of_time.live_arrays import LiveArray, arrays_at_peak
from optimus_jax.planning.cost.memory import MemoryEstimate
from optimus_jax.planning.search.explain import mib

PARAMS, MOMENTS, GRADIENTS = "params", "moments", "gradients"
ACTIVATIONS, LOGITS, BATCH = "activations", "logits", "batch"
PARTS = (PARAMS, MOMENTS, GRADIENTS, ACTIVATIONS, LOGITS, BATCH)
"""Fields of `MemoryEstimate` in a device's memory."""
HEAD = ("in a device's memory", "counted", "of all", "predicted")
"""Headings of a table of parts."""
MAX_ARRAYS = 12
"""Arrays that are listed: the largest."""
_ARGUMENTS = {"state.params": PARAMS, "state.opt_state": MOMENTS}
"""Parts of the step's arguments by how their names begin; others come with the batch."""
_HEAD = re.compile(rf"(?<!\w){scopes.HEAD}(?!\w)")
_SIZES = re.compile(r"\[([\d,]*)\]")


@dataclass(frozen=True, kw_only=True)
class HeldArrays:
    """Arrays of the same shape and origin."""

    part: str
    """One of PARTS."""
    shape: str
    """Such as `f32[4,8,256,1024]`, as one device has it."""
    number: int
    num_bytes: int
    """Of all of them."""
    source: str
    """JAX's name of what made them (op_name); of an argument, its name."""


@dataclass(frozen=True, kw_only=True)
class PeakMemory:
    """A device's memory when a compiled step needs most."""

    allocated_bytes: int
    """What XLA allocates for the step, arguments included."""
    parts: Mapping[str, int]
    """Bytes of the arrays that are alive then, by their part."""
    arrays: tuple[HeldArrays, ...]
    """The largest."""
    predicted: Mapping[str, int] = field(default_factory=dict)
    """Estimated bytes of the same parts."""

    @classmethod
    def of(
        cls, program: HloProgram, *, allocated_bytes: int, ways: int, estimate: MemoryEstimate
    ) -> Self:
        """That of a compiled step.

        Args:
          ways: devices along fsdp; parameters are stored whole, or in as many shards.
          estimate: of the planner.
        """
        found = arrays_at_peak(program)
        stored = {_sizes(array) for array in found if _argument(array) == PARAMS}
        gradients = stored | {
            (*sizes[:at], ways * sizes[at], *sizes[at + 1 :])
            for sizes in stored
            for at in range(len(sizes))
        }
        parts: dict[str, int] = defaultdict(int)
        alike: Counter[tuple[str, str, str]] = Counter()
        num_bytes: Counter[tuple[str, str, str]] = Counter()
        for array in found:
            part = _argument(array) or _made(array, gradients)
            key = part, array.shape, array.source
            parts[part] += array.num_bytes
            alike[key] += 1
            num_bytes[key] += array.num_bytes
        return cls(
            allocated_bytes=allocated_bytes,
            parts={part: parts[part] for part in PARTS if part in parts},
            arrays=tuple(
                HeldArrays(
                    part=key[0], shape=key[1], source=key[2], number=alike[key], num_bytes=largest
                )
                for key, largest in num_bytes.most_common(MAX_ARRAYS)
            ),
            predicted={part: size for part in PARTS if (size := getattr(estimate, part))},
        )

    @classmethod
    def from_dict(cls, value: dict[str, Any]) -> Self:
        """The inverse of `dataclasses.asdict`."""
        arrays = tuple(HeldArrays(**each) for each in value["arrays"])
        values: dict[str, Any] = value | {"arrays": arrays}
        return cls(**values)

    @property
    def title(self) -> str:
        """What was counted."""
        return (
            f"memory when a step needs most: {mib(self.num_bytes)} counted in the compiled step, of"
            f" {mib(self.allocated_bytes)} that XLA allocates"
        )

    def table(self) -> list[list[str]]:
        """Rows of the parts, below one of headings."""
        return [[*HEAD], *held_rows(self.parts, self.predicted, mib)]

    @property
    def num_bytes(self) -> int:
        """Of the arrays that are alive at the peak."""
        return sum(self.parts.values())


def held_rows(
    parts: Mapping[str, float], predicted: Mapping[str, float], show: Callable[[float], str]
) -> list[list[str]]:
    """Rows of a table below HEAD: the parts, and all of them.

    Args:
      parts, predicted: bytes by part, as in a `PeakMemory`.
      show: bytes as text.
    """
    total = sum(parts.values())
    rows = [
        [
            part,
            show(parts[part]) if part in parts else "-",
            f"{parts[part] / total:.1%}" if part in parts else "-",
            show(predicted[part]) if part in predicted else "-",
        ]
        for part in dict.fromkeys((*parts, *predicted))
    ]
    return [*rows, ["all", show(total), "100.0%", show(sum(predicted.values()))]]


def _argument(array: LiveArray) -> str | None:
    """The part of an argument; None of what the step makes."""
    if not array.is_argument:
        return None
    return next(
        (part for start, part in _ARGUMENTS.items() if array.source.startswith(start)), BATCH
    )


def _made(array: LiveArray, gradients: Set[tuple[int, ...]]) -> str:
    """The part of an array that the step makes.

    Args:
      gradients: shapes of gradients, whole and in shards.
    """
    if _HEAD.search(array.source):
        return LOGITS
    return GRADIENTS if _sizes(array) in gradients else ACTIVATIONS


def _sizes(array: LiveArray) -> tuple[int, ...]:
    """Sizes of its axes."""
    found = _SIZES.search(array.shape)
    return tuple([int(size) for size in found[1].split(",") if size]) if found else ()
