"""What a run tells of itself while it trains: to callbacks of the user, and to trackers.

Everything that a run records passes through its directory (run_directory/directory.py), which
writes it down and then tells its listeners: the display, and callbacks.
"""

import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Self

from optimus_jax.cluster.distributed import called_alone
from optimus_jax.config import Config
from optimus_jax.errors import ConfigError, explain, nearest
from optimus_jax.faults.error_isolation import isolate_errors, report_failed
from optimus_jax.plan import Plan
from optimus_jax.run_directory.listeners import RunListener
from optimus_jax.run_directory.step_record import EvalRecord, StepRecord

ERROR = "error"
"""Why a run ended that an exception has ended."""
ENDED_WELL = ("done", "interrupt", "terminate")
FINISH_S = 10.0
"""Seconds that callbacks have after an exception. Reasoned: enough to close files; a tracker whose
server is away would take for ever, and other processes wait to be told."""


@dataclass(frozen=True, kw_only=True)
class RunInfo:
    """A run that is about to train."""

    config: Config
    """Its settings."""
    plan: Plan
    """The plan of its first step."""
    run_dir: Path
    """Its local directory."""
    first_step: int
    """The step that is trained first: 1, or later in a resumed run."""
    stop: Callable[[], None]
    """Ends the run after the step under way, and saves it, as Ctrl-C does. May be called at any
    time, in any process."""


class Callback:
    """Is told what a run does: make a subclass with some of these methods, and give its objects to
    `train(callbacks=[...])`.

    The methods are called by the training thread, between steps, so what takes long delays the
    next one. A method that raises an exception is reported once and not called again; the run
    goes on. After an `on_start` that does, none is. `sys.exit` in one ends the run as
    `RunInfo.stop` does, and after that the program of that process, with its exit code.

    They are called in process 0 alone, unless `in_every_process` is set. What takes all processes,
    such as loading a checkpoint of a run of several, cannot be done in one.
    """

    in_every_process: ClassVar[bool] = False

    def on_start(self, run: RunInfo) -> None:
        """The first step of this process is about to begin."""

    def on_step(self, record: StepRecord) -> None:
        """A step is done; the next one may be under way."""

    def on_evaluate(self, record: EvalRecord) -> None:
        """Held-out data was measured."""

    def on_checkpoint(self, step: int, path: Path) -> None:
        """The checkpoint after a step is complete. Older ones may be deleted soon."""

    def on_decision(self, event: Mapping[str, Any]) -> None:
        """The controller has decided: the event `decision` of events.jsonl."""

    def on_switch(self, event: Mapping[str, Any]) -> None:
        """The run has moved to another plan, or back: the event `remesh` or `rollback`."""

    def on_event(self, event: Mapping[str, Any]) -> None:
        """Any event, as it stands in events.jsonl; also those of the methods above. Those from
        before the first step, such as `start` and `plan`, come after `on_start`. The reference page
        about the run directory lists them with their fields.
        """

    def on_end(self, step: int, reason: str) -> None:
        """The run has ended after a step: `done`, `interrupt` or `terminate`, when it is saved;
        `fault`, `not learning`, or `error` after another exception. Not called if it is killed.
        """


def check_callbacks(callbacks: object) -> None:
    """Raise ConfigError unless they are a list or tuple of callbacks, whose methods named on_...
    will be called.
    """
    if not isinstance(callbacks, list | tuple) or not all(
        isinstance(each, Callback) for each in callbacks
    ):
        raise ConfigError(
            explain(
                "callbacks are objects of subclasses of optimus_jax.Callback, in a list",
                given=repr(callbacks),
                do="give callbacks=[MyCallback()]",
            )
        )
    known = [name for name in vars(Callback) if name.startswith("on_")]
    for each in callbacks:
        kind = type(each)
        own = [
            name
            for name in dir(kind)
            if name.startswith("on_") and name not in known and callable(getattr(kind, name, None))
        ]
        if own:
            raise ConfigError(
                explain(
                    f"{kind.__name__} has a method that no run calls",
                    given=own[0],
                    do=f"give it a name that does not begin with on_; {nearest(own[0], known)}",
                )
            )


class CallbackListener:
    """Tells a callback what a run records.

    Args:
      checkpoints: directory of the run's checkpoints.
    """

    def __init__(self, callback: Callback, checkpoints: Path) -> None:
        self._callback, self._checkpoints = callback, checkpoints

    def step(self, record: StepRecord) -> None:
        """As `RunListener`."""
        self._callback.on_step(record)

    def event(self, event: Mapping[str, Any]) -> None:
        """As `RunListener`."""
        match event["event"]:
            case "eval" if event["loss"] is not None:
                self._callback.on_evaluate(eval_record_of(event))
            case "checkpoint":
                step = int(event["step"])
                self._callback.on_checkpoint(step, self._checkpoints / str(step))
            case "decision":
                self._callback.on_decision(event)
            case "remesh" | "rollback":
                self._callback.on_switch(event)
        self._callback.on_event(event)


def eval_record_of(event: Mapping[str, Any]) -> EvalRecord:
    """What an event `eval` has measured."""
    return EvalRecord(
        step=int(event["step"]),
        loss=event["loss"],
        perplexity=event["perplexity"],
        bits_per_byte=event["bits_per_byte"],
        metrics=event["metrics"],
    )


class Callbacks:
    """The callbacks of this process, as a context around training; a listener too, which notes how
    the run ends.

    Args:
      callbacks: of the user, and trackers.
      is_writer: whether this process is process 0.
    """

    def __init__(self, callbacks: Iterable[Callback], *, is_writer: bool) -> None:
        self._given = [each for each in callbacks if is_writer or each.in_every_process]
        self._started: list[Callback] = []
        self._last_step, self._reason, self._has_ended = 0, ERROR, False
        self._run: RunInfo | None = None
        self._exit: SystemExit | None = None
        """With what a callback wants to leave the program."""

    def start(self, run: RunInfo, checkpoints: Path) -> list[RunListener]:
        """Tell them that the first step is about to begin; returns what is to listen to the run.
        One that fails here is told nothing more.

        Args:
          checkpoints: directory of the run's checkpoints.
        """
        self._run, self._last_step = run, run.first_step - 1
        for each in self._given:
            name = type(each).__name__
            around = nullcontext if each.in_every_process else partial(called_alone, name)
            told = isolate_errors(each, name, leaves=self._leave, around=around)
            try:
                with around():
                    each.on_start(run)
            except Exception as error:
                report_failed(name, "on_start", error, "it is told nothing more")
                continue
            except SystemExit as error:
                self._leave(error)
            self._started.append(told)
        return [self, *(CallbackListener(each, checkpoints) for each in self._started)]

    def step(self, record: StepRecord) -> None:
        """As `RunListener`."""
        self._last_step = record.step

    def event(self, event: Mapping[str, Any]) -> None:
        """As `RunListener`."""
        if event["event"] == "end":
            self._last_step, self._reason = event["step"], event["reason"]
            self._has_ended = True

    @property
    def has_ended(self) -> bool:
        """Whether the end of the run was logged."""
        return self._has_ended

    @property
    def last_step(self) -> int:
        """The newest step that was recorded, or that the run began after."""
        return self._last_step

    def _leave(self, error: SystemExit | KeyboardInterrupt) -> None:
        if isinstance(error, SystemExit) and self._exit is None:
            self._exit = error
        if self._run is not None:
            self._run.stop()

    def leave(self) -> None:
        """End the program, after the run, as a callback has asked for: raises its SystemExit."""
        if self._exit is not None:
            raise self._exit

    def finish(self) -> None:
        """Tell them, once, that the run has ended. May take as long as they do."""
        started, self._started, self._run = self._started, [], None
        for each in started:
            each.on_end(self._last_step, self._reason)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None or not issubclass(kind, Exception | SystemExit):
            return  # a second Ctrl-C ends at once
        if self._reason in ENDED_WELL:
            self._reason = ERROR
        # Others wait to be told of the error, and what a callback does may take for ever.
        thread = threading.Thread(target=self.finish, name="callbacks", daemon=True)
        thread.start()
        thread.join(FINISH_S)
