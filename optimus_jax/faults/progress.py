"""The current activity and step of this process: the main thread sets them, and the watchdog and
heartbeat threads read them.

An *activity* is something that the main thread does and that has a time limit of its own. `step` is
the usual one; the others begin and end inside it or before it; `caller` is what a loop of the
user's own does between steps. The status is one immutable value, so that a thread never reads half
of a change.
"""

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from optimus_jax.run_directory.step_record import EvalRecord, StepRecord

Activity = Literal[
    "connect",
    "start",
    "compile",
    "step",
    "evaluation",
    "save",
    "write",
    "snapshot",
    "probe",
    "profile",
    "caller",
    "switch",
    "end",
]
REMEMBERED = 50
"""How many of the newest durations of an activity are kept; its limit is made from them."""


@dataclass(frozen=True, kw_only=True)
class ProcessStatus:
    """Activity and steps of a process."""

    doing: Activity
    since_s: float
    """When the activity began or the last step ended, on this process's clock."""
    entered: int = 0
    """Newest step that was dispatched to the devices."""
    done: int = 0
    """Newest step whose metrics were read."""


class Progress:
    """Progress of this process, from the moment it connects.

    Args:
      clock: seconds that only grow.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._durations_s: dict[Activity, deque[float]] = {}
        self.at = ProcessStatus(doing="connect", since_s=clock())

    def begin(self, activity: Activity) -> None:
        """Start an activity."""
        self.at = replace(self.at, doing=activity, since_s=self._clock())

    @contextlib.contextmanager
    def during(self, activity: Activity) -> Iterator[None]:
        """Context for a nested activity; the outer one resumes afterwards, timed from then."""
        outside, began_s = self.at.doing, self._clock()
        self.begin(activity)
        try:
            yield
        finally:
            self._remember(activity, self._clock() - began_s)
            self.begin(outside)

    def enter(self, step: int) -> None:
        """`step` is about to be dispatched to the devices."""
        self.at = replace(self.at, entered=step)

    def step(self, record: StepRecord) -> None:
        """A step has ended and its metrics were read."""
        self._remember("step", record.step_time_s)
        self.at = replace(self.at, done=record.step, since_s=self._clock())

    def evaluation(self, record: EvalRecord) -> None:
        """Nothing to do: `during` measures the time of evaluations."""

    def forget_steps(self) -> None:
        """Drop the durations of steps: the plan or the batches change."""
        self._durations_s.pop("step", None)

    def durations_s(self, activity: Activity) -> tuple[float, ...]:
        """Durations of an activity, the newest last."""
        return tuple(self._durations_s.get(activity, ()))

    def _remember(self, activity: Activity, duration_s: float) -> None:
        self._durations_s.setdefault(activity, deque(maxlen=REMEMBERED)).append(duration_s)
