"""A pipeline schedule as a value: which task each stage runs in each tick.

All stages run one program in lockstep. In a *tick* each stage runs at most one forward and at most
one backward *task*: one microbatch through the layers of one virtual stage. A microbatch visits a
device once per *repeat*; *virtual stage* k = repeat * num_stages + stage, and the layers are cut
into num_stages * num_repeats consecutive virtual stages. In the tables a task is the number
microbatch * num_repeats + repeat, and IDLE means no task.

All stages compute the *head* (final norm, loss and its gradient) together, because the vocabulary
is split over them. It runs in the tick of the last virtual stage's forward; in a later tick the
hidden state would have to be kept.

The order inside a tick with latency 1 is: store what the neighbours sent in the previous tick,
forward, head, backward. With latency 2, storing comes last, so that sending can overlap with a tick
of work. In both cases a result of tick t can be used from tick t + latency on.
"""

import itertools
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from optimus_jax.errors import PlanError, explain
from optimus_jax.pipeline.schedule_json import read_schedule, write_schedule

Table = NDArray[np.int32]

IDLE = -1
"""Table entry for no task."""
LATENCIES = (1, 2)
"""Ticks from a result to its use on the neighbouring stage."""
FORWARD = "forward"
BACKWARD = "backward"


@dataclass(frozen=True)
class Phase:
    """Consecutive ticks with the same kinds of work, which one scan can run."""

    start: int
    """First tick."""
    stop: int
    """First tick after it."""
    forward: bool
    """Whether some stage runs a forward task in every tick; if not, no stage runs one in any
    tick."""
    backward: bool
    """The same for backward tasks. With latency 2, ticks that only send have neither."""
    head: bool
    """Whether some tick has a head."""
    embed: bool
    """Whether stage 0 runs forward of repeat 0, whose input is the embedding, in some tick."""
    embed_backward: bool
    """Whether stage 0 runs backward of repeat 0, whose result is the gradient of the embedding's
    output, in some tick."""

    @property
    def num_ticks(self) -> int:
        """Number of ticks."""
        return self.stop - self.start


@dataclass(frozen=True, kw_only=True, eq=False)
class Schedule:
    """The tables of a schedule, read-only int32. Schedules are equal if all their content is
    equal."""

    name: str
    """Name of the schedule."""
    num_stages: int
    """Devices along mesh axis pipe."""
    num_microbatches: int
    """Microbatches of a step."""
    num_repeats: int = 1
    """Visits of a microbatch to each device; above 1: interleaving."""
    latency: int = 1
    """Ticks from a result to its use on the neighbouring stage: one of LATENCIES."""
    forward: Table = field(repr=False)
    """[ticks, stages]: task that runs forward."""
    backward: Table = field(repr=False)
    """[ticks, stages]: task that runs backward."""
    head: Table = field(repr=False)
    """[ticks]: microbatch whose loss is computed."""
    is_forward_only: bool = False
    """Whether the schedule is for evaluation: every entry of `backward` is IDLE."""

    def __post_init__(self) -> None:
        for name in (FORWARD, BACKWARD, "head"):
            table = np.array(getattr(self, name), np.int32)
            table.setflags(write=False)
            object.__setattr__(self, name, table)

    @cached_property
    def _content(self) -> tuple[Any, ...]:
        return (
            self.name,
            self.num_stages,
            self.num_microbatches,
            self.num_repeats,
            self.latency,
            self.is_forward_only,
            *(
                part
                for table in (self.forward, self.backward, self.head)
                for part in (table.shape, table.tobytes())
            ),
        )

    def __eq__(self, other: object) -> bool:
        return self._content == other._content if isinstance(other, Schedule) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._content)

    @property
    def num_ticks(self) -> int:
        """Ticks of a step."""
        return len(self.forward)

    @property
    def num_virtual_stages(self) -> int:
        """Number of virtual stages, into which the layers are divided."""
        return self.num_stages * self.num_repeats

    @property
    def num_tasks(self) -> int:
        """Forward tasks of each stage; there are as many backward tasks."""
        return self.num_microbatches * self.num_repeats

    @cached_property
    def forward_ticks(self) -> NDArray[np.int64]:
        """[microbatches, virtual stages]: tick of each forward."""
        return self._ticks(self.forward)

    @cached_property
    def backward_ticks(self) -> NDArray[np.int64]:
        """[microbatches, virtual stages]: tick of each backward; IDLE in a forward-only
        schedule."""
        return self._ticks(self.backward)

    def _ticks(self, table: Table) -> NDArray[np.int64]:
        ticks = np.full((self.num_tasks, self.num_stages), IDLE, np.int64)
        tick, stage = np.nonzero(table != IDLE)
        ticks[table[tick, stage], stage] = tick
        ticks = ticks.reshape(self.num_microbatches, self.num_virtual_stages)
        ticks.setflags(write=False)
        return ticks

    def validate(self) -> None:
        """Raise PlanError, naming tick, stage and microbatch, if the tables cannot be run.

        A stage runs at most one task per tick and direction, so no message overwrites another.
        """
        check_counts(
            num_stages=self.num_stages,
            num_microbatches=self.num_microbatches,
            num_repeats=self.num_repeats,
            latency=self.latency,
        )
        self._check_tables()
        self._check_every_task_once(FORWARD, times=1)
        self._check_every_task_once(BACKWARD, times=0 if self.is_forward_only else 1)
        self._check_head()
        self._check_order()
        self._check_idle_ticks()

    def _check_tables(self) -> None:
        ticks = len(self.forward) if self.forward.ndim else 0
        for name, shape, limit in (
            (FORWARD, (ticks, self.num_stages), self.num_tasks),
            (BACKWARD, (ticks, self.num_stages), self.num_tasks),
            ("head", (ticks,), self.num_microbatches),
        ):
            table: Table = getattr(self, name)
            if table.shape != shape or not ticks:
                raise self._error(
                    f"table {name!r} has the wrong shape",
                    given=f"{list(table.shape)}",
                    do=(
                        f"give {name!r} the shape {list(shape)}"
                        if ticks
                        else "give it at least one tick"
                    ),
                )
            for place in np.argwhere((table < IDLE) | (table >= limit)):
                raise self._error(
                    f"{name}{place.tolist()} is no {'task' if name != 'head' else 'microbatch'}",
                    given=int(table[tuple(place)]),
                    do=(
                        f"use 0 to {limit - 1}"
                        f"{' (microbatch * repeats + repeat)' if name != 'head' else ''},"
                        f" or {IDLE} for nothing"
                    ),
                )
        if self.num_tasks > ticks:
            raise self._error(
                f"{ticks} ticks are too few",
                do=f"use {self.num_tasks} ticks or more: a stage runs one forward task in each",
                given=f"microbatches={self.num_microbatches}, repeats={self.num_repeats}",
            )

    def _check_every_task_once(self, name: str, *, times: int) -> None:
        table: Table = getattr(self, name)
        for stage in range(self.num_stages):
            column = table[:, stage]
            counts = np.bincount(column[column != IDLE], minlength=self.num_tasks)
            for task in np.flatnonzero(counts != times):
                ticks = np.flatnonzero(column == task).tolist()
                raise self._error(
                    f"{name} of {self._task(*divmod(int(task), self.num_repeats), stage)} runs"
                    f" {len(ticks)} times",
                    given=(
                        f"ticks {', '.join(map(str, ticks))}"
                        if ticks
                        else f"no tick of {self.num_ticks}"
                    ),
                    do=(
                        f"run it in exactly one tick of {name!r}"
                        if times
                        else "leave 'backward' idle in a forward-only schedule"
                    ),
                )

    def _check_head(self) -> None:
        due = head_of(self.forward, self.num_repeats)
        for tick in np.flatnonzero(self.head != due):
            microbatch, other = int(due[tick]), int(self.head[tick])
            raise self._error(
                f"the head in tick {tick} is not that of the last forward",
                given=f"head[{tick}]={other}, and "
                + (
                    f"microbatch {microbatch} leaves"
                    if microbatch != IDLE
                    else "no microbatch leaves"
                )
                + " the last virtual stage in that tick",
                do=f"set head[{tick}]={microbatch}, or leave 'head' out of the JSON",
            )

    def _check_order(self) -> None:
        """Check that every task runs at least `latency` ticks after the task that computes its
        input, and that backward of the last virtual stage does not run before the head.
        """
        forward, backward = self.forward_ticks, self.backward_ticks
        earliest = np.zeros_like(forward)
        earliest[:, 1:] = forward[:, :-1] + self.latency
        self._check_not_before(FORWARD, forward, earliest)
        if not self.is_forward_only:
            earliest[:, :-1] = backward[:, 1:] + self.latency
            earliest[:, -1] = forward[:, -1]
            self._check_not_before(BACKWARD, backward, earliest)

    def _check_not_before(
        self, name: str, ticks: NDArray[np.int64], earliest: NDArray[np.int64]
    ) -> None:
        early = ticks < earliest
        if early.any():
            tick = ticks[early].min()
            microbatch, virtual = (int(index) for index in np.argwhere(early & (ticks == tick))[0])
            repeat, stage = divmod(virtual, self.num_stages)
            raise self._error(
                f"{name} of {self._task(microbatch, repeat, stage)} runs in tick {tick}, before its"
                " input is there",
                given=(
                    f"latency={self.latency}, and an input that comes in time for tick"
                    f" {earliest[microbatch, virtual]}"
                ),
                do=f"run it in tick {earliest[microbatch, virtual]} or later",
            )

    def _check_idle_ticks(self) -> None:
        work = self._has(FORWARD) | self._has(BACKWARD)
        # With latency 2, a tick may only send what the previous tick computed.
        sends = (
            np.concatenate([[False], work[:-1]])
            & (self.latency > 1)
            & (np.arange(self.num_ticks) < self.num_ticks - 1)
        )
        for tick in np.flatnonzero(~work & ~sends):
            raise self._error(
                f"no stage does anything in tick {tick}",
                given=f"tick {tick} of {self.num_ticks}",
                do="leave that tick out",
            )

    def _error(self, what: str, *, given: object, do: str) -> PlanError:
        return PlanError(explain(f"schedule {self.name!r}: {what}", given=given, do=do))

    def _task(self, microbatch: int, repeat: int, stage: int) -> str:
        return (
            f"microbatch {microbatch}"
            + (f", repeat {repeat}" if self.num_repeats > 1 else "")
            + f" on stage {stage}"
        )

    def _has(self, name: str) -> NDArray[np.bool_]:
        """[ticks]: whether some stage runs such a task."""
        return (getattr(self, name) != IDLE).any(axis=1)

    def _has_embed(self, table: Table) -> NDArray[np.bool_]:
        return (table[:, 0] != IDLE) & (table[:, 0] % self.num_repeats == 0)

    def phases(self) -> tuple[Phase, ...]:
        """Maximal runs of ticks in which the same kinds of task occur."""
        has_forward, has_backward = self._has(FORWARD), self._has(BACKWARD)
        head, embed, embed_backward = (
            self.head != IDLE,
            self._has_embed(self.forward),
            self._has_embed(self.backward),
        )
        changes = (
            np.flatnonzero(
                (has_forward[1:] != has_forward[:-1]) | (has_backward[1:] != has_backward[:-1])
            )
            + 1
        )
        bounds = [0, *changes.tolist(), self.num_ticks]
        return tuple(
            Phase(
                start,
                stop,
                bool(has_forward[start]),
                bool(has_backward[start]),
                *(bool(ticks[start:stop].any()) for ticks in (head, embed, embed_backward)),
            )
            for start, stop in itertools.pairwise(bounds)
        )

    def critical_path(self, forward_s: float, backward_s: float, head_s: float = 0.0) -> float:
        """Time of a step in lockstep, in seconds, without sending.

        A stage that has no task of some kind waits while other stages run theirs, so a tick costs
        the time of each kind of work that occurs in it, once.

        Args:
          forward_s: time of one forward task on the slowest stage: 1/num_repeats of a device's
            layers.
          backward_s: time of one backward task, including what it recomputes.
          head_s: time of the head for one microbatch, with all stages working on it.
        """
        return float(
            self._has(FORWARD).sum() * forward_s
            + self._has(BACKWARD).sum() * backward_s
            + (self.head != IDLE).sum() * head_s
        )

    def ideal_time(self, forward_s: float, backward_s: float, head_s: float = 0.0) -> float:
        """Time of a step in which no stage ever waits, in seconds; arguments as in
        `critical_path`."""
        task_s = forward_s + (0.0 if self.is_forward_only else backward_s)
        return self.num_tasks * task_s + self.num_microbatches * head_s

    def bubble(self, forward_s: float = 1.0, backward_s: float = 2.0, head_s: float = 0.0) -> float:
        """Time lost to waiting as a share of the ideal time (arXiv:2104.04473, section 2.2);
        arguments as in `critical_path`.
        """
        return (
            self.critical_path(forward_s, backward_s, head_s)
            / self.ideal_time(forward_s, backward_s, head_s)
            - 1.0
        )

    @property
    def idle_fraction(self) -> float:
        """Share of idle entries, forward and backward together, in ticks that have work of that
        kind.
        """
        slots = self.num_stages * int(self._has(FORWARD).sum() + self._has(BACKWARD).sum())
        return 1.0 - int((self.forward != IDLE).sum() + (self.backward != IDLE).sum()) / slots

    def in_flight(self) -> NDArray[np.int64]:
        """[stages]: the largest number of tasks in flight: those whose forward has run and whose
        backward has not ended. 0 if there is no backward.
        """
        if self.is_forward_only:
            return np.zeros(self.num_stages, np.int64)
        change = np.zeros((self.num_ticks + 1, self.num_stages), np.int64)
        change[:-1] += self.forward != IDLE
        change[1:] -= self.backward != IDLE
        return change.cumsum(axis=0).max(axis=0)

    def to_json(self) -> str:
        """The schedule as a JSON object (pipeline/schedule_json.py)."""
        return write_schedule(
            {
                "name": self.name,
                "stages": self.num_stages,
                "microbatches": self.num_microbatches,
                "repeats": self.num_repeats,
                "latency": self.latency,
                "forward": self.forward.tolist(),
                "backward": None if self.is_forward_only else self.backward.tolist(),
                "head": self.head.tolist(),
            }
        )

    @classmethod
    def from_json(cls, text: str | bytes) -> "Schedule":
        """The inverse of `to_json`, validated.

        Raises PlanError if the text is not a schedule, or its tables cannot be run.
        """
        value = read_schedule(text)
        forward, backward = np.array(value["forward"], np.int32), value["backward"]
        head = value["head"] if "head" in value else head_of(forward, value["repeats"])
        schedule = cls(
            name=value["name"],
            num_stages=value["stages"],
            num_microbatches=value["microbatches"],
            num_repeats=value["repeats"],
            latency=value["latency"],
            forward=forward,
            head=np.array(head, np.int32),
            is_forward_only=backward is None,
            backward=(
                np.full_like(forward, IDLE) if backward is None else np.array(backward, np.int32)
            ),
        )
        schedule.validate()
        return schedule


def head_of(forward: Table, num_repeats: int) -> Table:
    """[ticks]: the microbatch that the last virtual stage finishes in each tick of `forward`, or
    IDLE.
    """
    last = forward[:, -1]
    return np.where(
        (last != IDLE) & (last % num_repeats == num_repeats - 1), last // num_repeats, IDLE
    ).astype(np.int32)


def schedule_from_starts(
    name: str,
    forward_start: ArrayLike,
    backward_start: ArrayLike | None,
    *,
    num_stages: int,
    latency: int,
) -> Schedule:
    """The validated schedule in which a task runs on each stage `latency` ticks after the stage
    before it.

    Args:
      forward_start: [microbatches, repeats], tick in which stage 0 runs forward of each; stage s
        runs it latency * s ticks later.
      backward_start: the same for backward, which begins on the last stage; None for a forward-only
        schedule.
    """
    stages = np.arange(num_stages)
    forward_start = np.asarray(forward_start)
    forward_ticks = forward_start[:, :, None] + latency * stages
    backward_ticks = (
        None
        if backward_start is None
        else np.asarray(backward_start)[:, :, None] + latency * stages[::-1]
    )
    last = forward_ticks if backward_ticks is None else backward_ticks
    tasks = np.arange(forward_start.size).reshape(*forward_start.shape, 1)
    forward = np.full((int(last.max()) + 1, num_stages), IDLE, np.int32)
    backward = forward.copy()
    forward[forward_ticks, stages] = tasks
    if backward_ticks is not None:
        backward[backward_ticks, stages] = tasks
    num_microbatches, num_repeats = forward_start.shape
    schedule = Schedule(
        name=name,
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        num_repeats=num_repeats,
        latency=latency,
        forward=forward,
        backward=backward,
        head=head_of(forward, num_repeats),
        is_forward_only=backward_start is None,
    )
    schedule.validate()
    return schedule


def check_counts(*, num_stages: int, num_microbatches: int, num_repeats: int, latency: int) -> None:
    """Raise PlanError if a count is below 1 or the latency is not one of LATENCIES."""
    for name, count in (
        ("stages", num_stages),
        ("microbatches", num_microbatches),
        ("repeats", num_repeats),
    ):
        if count < 1:
            raise PlanError(
                explain(
                    f"a schedule needs {name}", given=f"{name}={count}", do=f"use 1 or more {name}"
                )
            )
    if latency not in LATENCIES:
        raise PlanError(
            explain(
                "a schedule has no such latency",
                given=f"latency={latency}",
                do="choose latency=" + " or ".join(map(str, LATENCIES)),
            )
        )
