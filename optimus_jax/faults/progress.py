"""What a process is at, for others to read: its main thread says it here, threads and other
processes look.

An *activity* is what the main thread does and what may take how long. `step` is the usual one; the
others begin and end inside it or before it. One immutable value says all, so that a thread which
reads it never sees half of a change.
"""

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from optimus_jax.run_directory.step_record import StepRecord

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
    "switch",
    "end",
]
REMEMBERED = 50
"""Durations of an activity that a limit is made from: the newest."""


@dataclass(frozen=True, kw_only=True)
class ProcessStatus:
    """Where a process is."""

    doing: Activity
    since_s: float
    """When that began, or the last step ended, on this process's clock."""
    entered: int = 0
    """Newest step that it has asked its devices for."""
    done: int = 0
    """Newest step whose numbers it has read."""


class Progress:
    """Of this process, since it connects.

    Args:
      clock: seconds that only grow.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._durations_s: dict[Activity, deque[float]] = {}
        self.at = ProcessStatus(doing="connect", since_s=clock())

    def begin(self, activity: Activity) -> None:
        """From now on it does this."""
        self.at = replace(self.at, doing=activity, since_s=self._clock())

    @contextlib.contextmanager
    def during(self, activity: Activity) -> Iterator[None]:
        """Around what is no part of what it does outside, which goes on afterwards with the time
        anew.
        """
        outside, began_s = self.at.doing, self._clock()
        self.begin(activity)
        try:
            yield
        finally:
            self._remember(activity, self._clock() - began_s)
            self.begin(outside)

    def enter(self, step: int) -> None:
        """The devices are about to get `step`."""
        self.at = replace(self.at, entered=step)

    def step(self, record: StepRecord) -> None:
        """A step has ended, and its numbers are known."""
        self._remember("step", record.step_time_s)
        self.at = replace(self.at, done=record.step, since_s=self._clock())

    def evaluation(
        self, step: int, loss: float, perplexity: float, bits_per_byte: float | None
    ) -> None:
        """Its time is measured by `during`."""

    def forget_steps(self) -> None:
        """Steps from now on are others: of another plan or other batches."""
        self._durations_s.pop("step", None)

    def durations_s(self, activity: Activity) -> tuple[float, ...]:
        """How long it has taken, the newest last."""
        return tuple(self._durations_s.get(activity, ()))

    def _remember(self, activity: Activity, duration_s: float) -> None:
        self._durations_s.setdefault(activity, deque(maxlen=REMEMBERED)).append(duration_s)
