"""Saving although saves fail: a failure is noticed at the next step, said at once, and tried again,
for a limited number of times.

Checkpoints are written in threads, and a disk that is full for a minute is no reason to end a run.
Meanwhile nothing older is deleted (checkpoint/checkpoints.py). Of several processes one alone may
fail while the others wait for it inside the save, so there the first failure ends the run, as soon
as that process notices it.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from optimus_jax.checkpoint.checkpoints import Checkpoints, NotFiniteError
from optimus_jax.errors import CheckpointError, OptimusError
from optimus_jax.faults.progress import Progress

PAUSES_S = (0.0, 10.0, 30.0, 60.0)
"""After a save that has failed, until it is tried again: after the first, the second and so on. One
more failure is an error."""

_POLL_S = 0.2
"""Between two looks whether there is still time to wait."""


class Retries:
    """When a save is tried again.

    Args:
      warn: told of each failure that is not the last.
      is_alone: whether no other process takes part in saves.
      clock: seconds that only grow.
      sleep: lets so many seconds go by.
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
        """A save has failed. Raises the error if it was the last try."""
        if self._failed >= len(self._pauses_s):
            raise error
        pause_s = self._pauses_s[self._failed]
        self._failed += 1
        self._due_s = self._clock() + pause_s
        when = "after the next step" if not pause_s else f"in {pause_s:.0f} s"
        self._warn(
            f"{error}\n  the run goes on, and saves again {when}: failure {self._failed}, and"
            f" number {len(self._pauses_s) + 1} in a row ends it"
        )

    @property
    def pauses_s(self) -> tuple[float, ...]:
        """Between tries of a save that the run's end waits for."""
        return self._pauses_s

    def pause(self, pause_s: float, is_stopping: Callable[[], bool]) -> None:
        """Let the pause go by, or as much of it as there is time for."""
        until_s = self._clock() + pause_s
        while self._clock() < until_s and not is_stopping():
            self._sleep(min(_POLL_S, pause_s))

    def succeeded(self) -> None:
        """A save is complete."""
        self._failed, self._due_s = 0, None

    def begun(self) -> None:
        """A save was begun: the next is due if it fails."""
        self._due_s = None

    @property
    def is_due(self) -> bool:
        """Whether a save that has failed is to be tried again now."""
        return self._due_s is not None and self._clock() >= self._due_s


@dataclass(frozen=True, kw_only=True)
class Saving:
    """What a run does about its checkpoints beside beginning them.

    `save` is what begins one, and may raise CheckpointError.
    """

    checkpoints: Checkpoints
    retries: Retries
    progress: Progress
    is_alone: bool
    """Whether no other process takes part in saves."""
    say: Callable[[str], object]

    def begin(self, save: Callable[[], object]) -> None:
        """`save`; if that fails it is tried again later.

        Raises NotFiniteError, and CheckpointError after the last try.
        """
        try:
            save()
            self.retries.begun()
        except NotFiniteError:
            raise
        except CheckpointError as error:
            self.retries.failed(error)

    def poll(self) -> None:
        """Hear of the end of the save under way as soon as it has ended, well or not; waits for
        nothing. Raises CheckpointError after the last try.
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
        """Have the state after `step` saved, whole.

        A process on its own tries as often as during the run, and twice where somebody waits for
        its end.

        Args:
          is_stopping: whether a stop was asked for.
        Raises:
          CheckpointError: none of the tries was of use.
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
        """Wait until nothing is being written; whether that went well."""
        try:
            with self.progress.during("write"):
                self.checkpoints.wait()
        except CheckpointError:
            return False
        return True

    def save_after_error(
        self, save: Callable[[], object], state: Any, step: int, error: Exception
    ) -> None:
        """Save the state after `step` because of an error, if it is not saved, and note on the
        error what came of that.

        Not among several processes: to save takes all of them, and the others have no such error.
        """
        if not self.is_alone or isinstance(error, CheckpointError) or self.checkpoints.holds(step):
            return
        try:
            if any(
                leaf.is_deleted() for leaf in jax.tree.leaves(state) if isinstance(leaf, jax.Array)
            ):
                raise OptimusError("the step that failed has used it up")
            save()
            self.checkpoints.wait()
            error.add_note(f"the state after step {step} is saved: go on with --resume")
        except Exception as trouble:
            error.add_note(
                f"the state after step {step} could not be saved: {str(trouble).splitlines()[0]}"
            )
