"""Where the time of some measured steps went, part by part, beside what was predicted.

A device's time is divided into moments. One in which it computes belongs to the part of what it
computes; one in which it only exchanges, to the part of the exchange, which is then *exposed*; one
in which it does neither is idle. So the parts add up to the time of a step, as the planner's terms
do.
"""

import dataclasses
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from optimus_jax.config import RematPolicy
from optimus_jax.errors import counted
from optimus_jax.planning.ahead_of_time.hlo import HloProgram
from optimus_jax.planning.cost.cost import BUBBLE, TERMS
from optimus_jax.planning.search.explain import seconds
from optimus_jax.planning.traces.peak_memory import PeakMemory
from optimus_jax.planning.traces.step_parts import OTHER, MeasuredPart, step_parts
from optimus_jax.planning.traces.trace_events import OperationRun
from optimus_jax.system.json_input import parse_json

IDLE = "idle"
"""The part in which a device runs nothing of the step: it waits for the host, or between
operations."""
PREDICTED_IDLE = (BUBBLE, "launching", "overhead")
"""Terms of the planner for such time. A stage that waits for another one is mostly seen in what it
waits for, an exchange."""
HEAD = ("part of the step", "measured", "of the step", "beside compute", "predicted")
"""Headings of a table of parts."""
MAX_OPERATIONS = 12
"""Operations that a profile lists: those that take longest."""


@dataclass(frozen=True, kw_only=True)
class PartTime:
    """The time of a part of a step; the mean of the devices."""

    name: str
    """A term of the planner (planning/cost/cost.py), OTHER or IDLE."""
    time_s: float
    """Seconds of a step in which a device did this; of exchanges, those in which it computed
    nothing."""
    beside_s: float = 0.0
    """Seconds of exchanges beside compute; they are in the time of other parts."""


@dataclass(frozen=True, kw_only=True)
class OperationTime:
    """The time of an instruction of the compiled program; the mean of the devices."""

    name: str
    part: str
    time_s: float
    """Seconds of a step."""
    runs: float
    """How often it ran in a step."""
    source: str
    """JAX's name of it (op_name)."""


@dataclass(frozen=True, kw_only=True)
class StepProfile:
    """Where the time of some steps went."""

    first_step: int
    last_step: int
    plan: str
    """Digest of their plan."""
    layout: str
    """The plan as one line of text."""
    num_devices: int
    """Devices that were traced: those of process 0."""
    step_time_s: float
    """Seconds of a step, from the first operation of the first one to the last one's end."""
    parts: tuple[PartTime, ...]
    """Their times add up to step_time_s."""
    operations: tuple[OperationTime, ...]
    """Those that take longest."""
    predicted_s: Mapping[str, float] = field(default_factory=dict)
    """Predicted seconds of the same parts; empty if the speed of the devices is unknown."""
    memory: PeakMemory | None = None
    """What a device holds when the step needs most; None: the profile is of an earlier version."""

    @classmethod
    def of(
        cls,
        traced: Mapping[int, Sequence[OperationRun]],
        program: HloProgram,
        sizes: Mapping[str, int],
        *,
        remat: RematPolicy,
        first_step: int,
        last_step: int,
        plan: str,
        layout: str,
        terms: Mapping[str, float] | None = None,
        memory: PeakMemory | None = None,
    ) -> Self:
        """That of traced operations.

        Args:
          traced: what ran on each device, in all of the steps.
          program: the compiled step.
          sizes: of all mesh axes, slowest first.
          remat: of the plan.
          terms: seconds of the planner's terms; None: they are unknown.
        """
        assert traced, "nothing ran"
        num_steps = last_step - first_step + 1
        known = step_parts(program, sizes, remat=remat)
        sources = {each.name: each.source for _, each, _ in program.instructions()}
        begin = min(run.start_ns for runs in traced.values() for run in runs)
        end = max(run.end_ns for runs in traced.values() for run in runs)
        moments, operations = _Moments(), defaultdict[tuple[str, str], list[float]](list)
        for runs in traced.values():
            parts = [(run, known.get(run.name, _UNKNOWN)) for run in runs]
            own = [(run, part) for run, part in parts if part is not None]
            moments.add(own, begin, end)
            for run, part in own:
                operations[run.name, part.name].append(run.end_ns - run.start_ns)
        share = 1e-9 / num_steps / len(traced)
        longest = sorted(operations.items(), key=lambda each: -sum(each[1]))[:MAX_OPERATIONS]
        order = [*TERMS, OTHER, IDLE]
        return cls(
            first_step=first_step,
            last_step=last_step,
            plan=plan,
            layout=layout,
            num_devices=len(traced),
            step_time_s=(end - begin) * 1e-9 / num_steps,
            parts=tuple(
                PartTime(
                    name=name,
                    time_s=moments.alone_ns[name] * share,
                    beside_s=moments.beside_ns[name] * share,
                )
                for name in sorted({*moments.alone_ns, *moments.beside_ns}, key=order.index)
            ),
            operations=tuple(
                OperationTime(
                    name=name,
                    part=part,
                    time_s=sum(times_ns) * share,
                    runs=len(times_ns) / num_steps / len(traced),
                    source=sources.get(name, ""),
                )
                for (name, part), times_ns in longest
            ),
            predicted_s={} if terms is None else _predicted(terms),
            memory=memory,
        )

    def to_json(self) -> str:
        """JSON with an indent, to be read by people too."""
        return json.dumps(dataclasses.asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The inverse of `to_json`. Raises JSONInputError if the text is not JSON."""
        value: dict[str, Any] = parse_json(text)
        memory = value.get("memory")
        return cls(
            **value
            | {
                "parts": tuple(PartTime(**part) for part in value["parts"]),
                "operations": tuple(OperationTime(**each) for each in value["operations"]),
                "memory": None if memory is None else PeakMemory.from_dict(memory),
            }
        )

    @property
    def title(self) -> str:
        """What was measured."""
        return (
            f"steps {self.first_step} to {self.last_step}, {self.layout}: measured, mean of"
            f" {counted(self.num_devices, 'device')}"
        )

    def table(self) -> list[list[str]]:
        """Rows of the parts, below one of headings."""
        return [
            [*HEAD],
            *part_rows(
                self.step_time_s,
                {part.name: part.time_s for part in self.parts},
                {part.name: part.beside_s for part in self.parts if part.beside_s},
                self.predicted_s,
                seconds,
            ),
        ]


def part_rows(
    step_s: float | None,
    parts_s: Mapping[str, float],
    beside_s: Mapping[str, float],
    predicted_s: Mapping[str, float],
    show: Callable[[float], str],
) -> list[list[str]]:
    """Rows of a table below HEAD: the parts, those that are only predicted, and the whole step.

    Args:
      step_s: seconds of a step; None: unknown.
      parts_s, beside_s, predicted_s: seconds by part, as in a profile.
      show: a time as text.
    """

    def shown(time_s: float | None) -> str:
        return "-" if time_s is None else show(time_s)

    rows = [
        [
            name,
            shown(parts_s.get(name)),
            f"{parts_s[name] / step_s:.1%}" if step_s and name in parts_s else "-",
            shown(beside_s.get(name)),
            shown(predicted_s.get(name)),
        ]
        for name in dict.fromkeys((*parts_s, *predicted_s))
    ]
    total = sum(predicted_s.values()) or None
    return [*rows, ["step", shown(step_s), "100.0%", "-", shown(total)]]


_UNKNOWN = MeasuredPart(OTHER, is_exchange=False)
"""That of an operation which is not in the program's text."""


class _Moments:
    """The time of devices, divided between parts."""

    def __init__(self) -> None:
        self.alone_ns: dict[str, float] = defaultdict(float)
        """Of a part; of exchanges without those moments in which something is computed."""
        self.beside_ns: dict[str, float] = defaultdict(float)
        """Of exchanges, beside compute."""

    def add(
        self, runs: Iterable[tuple[OperationRun, MeasuredPart]], begin: float, end: float
    ) -> None:
        """Add what one device did between two times."""
        edges = sorted(
            (time_ns, is_start, number, part)
            for number, (run, part) in enumerate(runs)
            if run.end_ns > run.start_ns
            for time_ns, is_start in ((run.start_ns, True), (run.end_ns, False))
        )
        computing: dict[int, str] = {}
        exchanging: dict[int, str] = {}
        before = begin
        for time_ns, is_start, number, part in edges:
            self._add(time_ns - before, computing, exchanging)
            before = time_ns
            running = exchanging if part.is_exchange else computing
            if is_start:
                running[number] = part.name
            else:
                del running[number]
        self._add(end - before, computing, exchanging)

    def _add(
        self, length: float, computing: Mapping[int, str], exchanging: Mapping[int, str]
    ) -> None:
        """Add a moment to what began first, of what runs."""
        computed, exchanged = (
            next(iter(running.values()), None) for running in (computing, exchanging)
        )
        self.alone_ns[computed or exchanged or IDLE] += length
        if computed is not None and exchanged is not None:
            self.beside_ns[exchanged] += length


def _predicted(terms: Mapping[str, float]) -> dict[str, float]:
    """Seconds by part, of the planner's terms."""
    found = {name: time_s for name, time_s in terms.items() if name not in PREDICTED_IDLE}
    idle_s = sum(terms.get(name, 0.0) for name in PREDICTED_IDLE)
    return {name: time_s for name, time_s in (found | {IDLE: idle_s}).items() if time_s}
