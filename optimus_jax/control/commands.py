"""Commands of process 0, which all processes receive at the same step boundaries.

Only process 0 decides: clocks differ, and every process has to switch at the same boundary. A run
of one process acts at once. Several processes exchange commands about every second, since an
exchange costs a small collective.
"""

import json
import math
import statistics
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import jax

from optimus_jax.cluster.distributed import broadcast_from_0
from optimus_jax.plan import Plan

PAUSE_S, MOST_STEPS = 1.0, 8
"""Time between two broadcasts, in seconds, and the largest number of steps between them."""
CommandKind = Literal["prepare", "recheck", "switch", "withdraw", "keep", "roll_back", "probe"]
SETS_PREPARATION: tuple[CommandKind, ...] = ("prepare", "withdraw")


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command to all processes."""

    kind: CommandKind
    plan: Plan | None = None
    """The plan to prepare, to reconsider once it is ready, or to enter."""
    without: frozenset[int] = frozenset()
    """Ids of devices that the plan must not use."""
    at_step: int | None = None
    """The boundary at which the run enters the plan; None: the first one after it is ready."""
    anew: bool = False
    """For `probe`: discard the results of earlier probes, since conditions have changed."""
    worth_s: float = 0.0
    """For `probe`: seconds that it may take beyond the budget."""
    why: str = ""

    @property
    def target(self) -> tuple[Plan | None, frozenset[int], int | None]:
        """For `prepare`: the target of the decision (control/policy.py)."""
        return self.plan, self.without, self.at_step

    def as_json(self) -> dict[str, Any]:
        """The command as JSON, for the other processes."""
        return {
            "kind": self.kind,
            "plan": self.plan and self.plan.to_json(),
            "without": sorted(self.without),
            "at_step": self.at_step,
            "anew": self.anew,
            "worth_s": self.worth_s,
            "why": self.why,
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "Command":
        """The inverse of `as_json`."""
        return cls(
            kind=value["kind"],
            plan=value["plan"] and Plan.from_json(value["plan"]),
            without=frozenset(value["without"]),
            at_step=value["at_step"],
            anew=value["anew"],
            worth_s=value["worth_s"],
            why=value["why"],
        )


class CommandBroadcast:
    """Commands of process 0, and their broadcast to all processes."""

    def __init__(self) -> None:
        self._commands: list[Command] = []
        self._next_step = 0
        self.step_time_s: float | None = None
        """Median step time in process 0 at the last broadcast, in seconds; None: unknown. The same
        in every process."""

    def send(self, command: Command) -> None:
        """Queue a command for the next broadcast. One that is queued already is sent once, but what
        is to be prepared may change and change back.

        Commands of processes other than 0 are ignored.
        """
        queued = self._commands
        if command.kind in SETS_PREPARATION:
            queued = [each for each in queued if each.kind in SETS_PREPARATION][-1:]
        if command not in queued:
            self._commands.append(command)

    def cancel(self, kind: CommandKind) -> None:
        """Drop the queued commands of this kind."""
        self._commands = [command for command in self._commands if command.kind != kind]

    def forget(self) -> None:
        """Drop all queued commands."""
        self._commands.clear()

    def is_broadcast_due(self, step: int) -> bool:
        """Whether a broadcast is due after this step; the same in every process."""
        return jax.process_count() == 1 or step >= self._next_step

    def receive(self, step: int, step_times_s: Collection[float]) -> Iterable[Command]:
        """The commands queued since the last broadcast, oldest first; the same in every process.

        Every process has to call it when `is_broadcast_due`. In a run of one process, commands that
        are queued during the iteration are received too.

        Args:
          step: the last step done.
          step_times_s: times of the newest steps, if known; only those of process 0 count.
        """
        self.step_time_s = max(statistics.median(step_times_s), 1e-9) if step_times_s else None
        if jax.process_count() == 1:
            return self._own()
        commands, self._commands = self._commands, []
        sent = {
            "commands": [command.as_json() for command in commands],
            "step_time_s": self.step_time_s,
        }
        received = json.loads(broadcast_from_0(json.dumps(sent)))
        self.step_time_s = received["step_time_s"]
        time_s = PAUSE_S / MOST_STEPS if self.step_time_s is None else self.step_time_s
        self._next_step = step + min(MOST_STEPS, max(1, math.ceil(PAUSE_S / time_s)))
        return tuple(map(Command.from_json, received["commands"]))

    def _own(self) -> Iterator[Command]:
        while self._commands:
            yield self._commands.pop(0)
