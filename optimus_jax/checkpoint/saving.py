"""Retry failed saves.

A failure is noticed at the next step and reported at once, and the save is repeated a limited
number of times.

Checkpoints are written in threads, and a disk that is full for a minute should not end a run. Older
checkpoints are not deleted in the meantime (checkpoint/checkpoints.py). With several processes the
first failure ends the run, because one process may fail while the others wait for it inside the
save.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from optimus_jax.checkpoint.checkpoints import Checkpoints, NotFiniteError
from optimus_jax.errors import CheckpointError, DataError, OptimusError, first_line
from optimus_jax.faults.progress import Progress

PAUSES_S = (0.0, 10.0, 30.0, 60.0)
"""Seconds to pause before each retry of a failed save: after the first failure, the second and so
on. One more failure is an error."""

_POLL_S = 0.2
"""Seconds between two checks whether a pause should be cut short."""


class Retries:
    """Decides when a failed save is retried.

    Args:
      warn: called with each failure that is retried.
      is_alone: whether no other process takes part in saves.
      clock: monotonic time in seconds.
      sleep: called with a number of seconds to wait.
    """

    def __init__(
        self,
        warn: Callable[[str], object],
        *,
        is_alone: bool,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self._warn, self._clock, self._sleep = warn, clock, sleep
        self._pauses_s = PAUSES_S if is_alone else ()
        self._failed = 0
        self._due_s: float | None = None

    def failed(self, error: CheckpointError) -> None:
        """Record that a save has failed. Raises its error if no retry is left."""
        if self._failed >= len(self._pauses_s):
            raise error
        pause_s = self._pauses_s[self._failed]
        self._failed += 1
        self._due_s = self._clock() + pause_s
        when = "after the next step" if not pause_s else f"in {pause_s:.0f} s"
        self._warn(
            f"{error}\n  the run continues, and saves again {when}: failure {self._failed}, and"
            f" number {len(self._pauses_s) + 1} in a row ends it"
        )

    @property
    def pauses_s(self) -> tuple[float, ...]:
        """Seconds to pause between attempts at the final save."""
        return self._pauses_s

    def pause(self, pause_s: float, is_stopping: Callable[[], bool]) -> None:
        """Wait for the pause, or until a stop is requested."""
        until_s = self._clock() + pause_s
        while self._clock() < until_s and not is_stopping():
            self._sleep(min(_POLL_S, pause_s))

    def succeeded(self) -> None:
        """Record that a save is complete."""
        self._failed, self._due_s = 0, None

    def begun(self) -> None:
        """Record that a save was started."""
        self._due_s = None

    @property
    def is_due(self) -> bool:
        """Whether a failed save should be retried now."""
        return self._due_s is not None and self._clock() >= self._due_s


@dataclass(frozen=True, kw_only=True)
class Saving:
    """Starts, watches and finishes saves, with retries.

    The argument `save` of its methods starts a save, and may raise CheckpointError.
    """

    checkpoints: Checkpoints
    retries: Retries
    progress: Progress
    is_alone: bool
    """Whether no other process takes part in saves."""
    say: Callable[[str], object]

    def begin(self, save: Callable[[], object]) -> None:
        """Call `save`. If it fails, it is retried later.

        Raises NotFiniteError, or CheckpointError after the last attempt.
        """
        try:
            save()
            self.retries.begun()
        except NotFiniteError:
            raise
        except CheckpointError as error:
            self.retries.failed(error)

    def poll(self) -> None:
        """Handle the result of the current save if it has ended; does not wait.

        Raises CheckpointError after the last attempt.
        """
        if not self.checkpoints.has_ended:
            return
        try:
            self.checkpoints.wait()
            self.retries.succeeded()
        except CheckpointError as error:
            self.retries.failed(error)

    def finish(
        self, save: Callable[[], object], step: int, *, is_stopping: Callable[[], bool]
    ) -> None:
        """Save the state after `step` and wait until it is complete.

        A single process retries as often as during the run, and once if a stop was requested.

        Args:
          is_stopping: whether a stop was requested.
        Raises:
          CheckpointError: all attempts failed.
        """
        for pause_s in (*self.retries.pauses_s, None):
            try:
                if not self.checkpoints.holds(step):
                    save()
                with self.progress.during("write"):
                    self.checkpoints.wait()
                return
            except NotFiniteError:
                raise
            except CheckpointError as error:
                if pause_s is None or (pause_s and is_stopping()):
                    raise
                self.say(
                    f"{error}\n  it is tried again"
                    f" {f'in {pause_s:.0f} s; Ctrl-C gives up' if pause_s else 'now'}"
                )
                self.retries.pause(pause_s, is_stopping)

    def wait_succeeded(self) -> bool:
        """Wait for the current save, and return whether it succeeded."""
        try:
            with self.progress.during("write"):
                self.checkpoints.wait()
        except CheckpointError:
            return False
        return True

    def save_after_error(
        self, save: Callable[[], object], state: Any, step: int, error: Exception
    ) -> None:
        """After an error, save the state after `step` unless it is saved already.

        Adds a note about the result to the error.

        Does this only in a run of one process, or if the data of all processes has ended: a save
        needs all of them.
        """
        has_ended = isinstance(error, DataError) and error.raised_by_all_processes
        if isinstance(error, CheckpointError) or not (self.is_alone or has_ended):
            return
        if self.checkpoints.holds(step):
            return
        try:
            if any(
                leaf.is_deleted() for leaf in jax.tree.leaves(state) if isinstance(leaf, jax.Array)
            ):
                raise OptimusError("the step that failed has used it up")
            save()
            self.checkpoints.wait()
            error.add_note(f"the state after step {step} is saved: resume with --resume")
        except Exception as trouble:
            error.add_note(f"the state after step {step} could not be saved: {first_line(trouble)}")
