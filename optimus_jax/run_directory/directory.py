"""The directory of a run: its config, its plan, and logs of every step and event.

    config.json     the Config            plan.json       the Plan now in use
    metrics.jsonl   a line per step       events.jsonl    a line per event
    checkpoints/    states                lock            held by the writing process (lock.py)
    progress/       heartbeats of several processes (faults/heartbeat.py)
    faults/         faults that each process has seen (faults/fault_log.py)
    tokenizer.json, tokenizer_config.json, chat_template.jinja
                    the run's tokenizer; a run of bytes has at most a template
    metrics.abandoned.jsonl
                    steps that were repeated after going back to an older checkpoint

Both logs can be read during the run, and after a kill at any moment. events.jsonl only grows.
metrics.jsonl grows too, except at a resume from an older checkpoint, which moves the lines of later
steps to metrics.abandoned.jsonl. A line without its newline is torn: readers skip it and
`RunDirectory.resume` removes it.
"""

import contextlib
import shutil
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from optimus_jax.errors import ConfigError, OptimusError, RunDirectoryError, explain
from optimus_jax.run_directory.contents import (
    ABANDONED_FILE,
    CONFIG_FILE,
    EVENTS,
    EVENTS_FILE,
    METRICS_FILE,
    PLAN_FILE,
    PROFILES,
    EventName,
)
from optimus_jax.run_directory.files import (
    append,
    complete_lines,
    cut_torn_line,
    event_line,
    event_of,
    explained,
    file_error,
    replace,
    unfinished,
)
from optimus_jax.run_directory.listeners import RunListener
from optimus_jax.run_directory.lock import RunLock, is_held
from optimus_jax.run_directory.step_record import StepRecord, record_of, values_of
from optimus_jax.system.json_input import JSONInputError, parse_json
from optimus_jax.system.paths import local_path

T = TypeVar("T")

DEFAULT_PARENT = Path("runs")
LOCK = "lock"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
"""Files of the tokenizer that a run keeps, named as by the tokenizers library and transformers."""
PROGRESS_DIR = "progress"
FAULTS_DIR = "faults"
"""Directories that several processes write to as soon as the run directory exists."""
TRACKER_IDS = "trackers.json"
"""Names by which trackers know a run (run/trackers.py)."""
TRACKER_DIRS = ("tensorboard", "wandb")
"""Directories of trackers."""
MARK = "mark"
"""File in PROGRESS_DIR by which processes check that they share the directory (shared.py)."""


class RunExistsError(ConfigError):
    """The directory of a new run already holds a run."""


class RunDirectory:
    """One run on disk.

    Process 0 is the writer; in the other processes, methods that write do nothing.

    The constructor touches no file; `create` and `resume` do, and lock the directory until `close`.
    `create` may choose a name from the time, so only process 0 calls it; the others use
    `RunDirectory(path, writer=False)`.

    Args:
      path: the directory.
      writer: whether this process writes.
      warn: called with a text about what was skipped although the run continues.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        writer: bool = True,
        warn: Callable[[str], object] = warnings.warn,
    ) -> None:
        self.path = local_path(path, what="--run-dir").absolute()
        self.address = str(self.path)
        """The value of --run-dir that resumes the run."""
        self.writer = writer
        self.failure: RunDirectoryError | None = None
        """The error that ends the run once its state is saved."""
        self._warn = warn
        self._warned: set[str] = set()
        self._last_step = 0
        self._unwritten: list[tuple[Path, bytes]] = []
        self._log_error: RunDirectoryError | None = None
        """Why lines could not be written yet; None: all are written."""
        self._written: dict[Path, bytes] = {}
        """Content of the files without which the run could not be resumed."""
        self.listeners: list[RunListener] = []
        """Are told of every step and event."""
        self._early: list[Mapping[str, Any]] | None = []
        """Events from before the first `listen`."""
        self._lock: RunLock | None = None
        self._is_new = self._is_made_here = False

    @classmethod
    def create(
        cls,
        path: str | Path | None,
        model_name: str,
        *,
        warn: Callable[[str], object] = warnings.warn,
        patience_s: float = 0.0,
    ) -> "RunDirectory":
        """Make the directory of a new run; it can be resumed from its first `write_config` on.

        Args:
          path: directory; None: `runs/<model>-<time>`, with a number appended if that exists.
          model_name: name of the model's preset.
          patience_s: how long to wait for another writer to release the lock.
        Raises:
          ConfigError: `path` holds a run or other files, or cannot be made.
          RunDirectoryError: another process is about to write there.
        """
        try:
            run = cls(path if path is not None else _make_default(Path(model_name).name), warn=warn)
            if path is not None:
                run.check_free()
            run._is_new, run._is_made_here = True, path is None or not run.path.is_dir()
            run.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                explain(
                    "the run directory cannot be made",
                    given=(
                        f"{path if path is not None else DEFAULT_PARENT.absolute()}:"
                        f" {error.strerror}"
                    ),
                    do="give --run-dir a directory that can be written",
                )
            ) from error
        run._lock = RunLock(run.path / LOCK, warn, patience_s)
        try:
            run.check_free()  # again, now that the lock is held
            with explained(run._events):
                cut_torn_line(run._events)
        except OptimusError:
            run.close()
            raise
        return run

    @classmethod
    def resume(
        cls,
        path: str | Path,
        *,
        writer: bool = True,
        warn: Callable[[str], object] = warnings.warn,
        patience_s: float = 0.0,
    ) -> "RunDirectory":
        """Open the directory of a run to resume it, and remove torn lines from its logs.

        Args:
          patience_s: how long to wait for another writer to release the lock.
        Raises:
          ConfigError: `path` does not hold a run.
          RunDirectoryError: another process writes this run, or its logs cannot be read or written.
        """
        run = cls(path, writer=writer, warn=warn)
        if not run._config.exists():
            found = "has no config.json" if run.path.is_dir() else "is not a directory"
            raise ConfigError(
                explain(
                    "there is no run to resume",
                    given=f"{path}, which {found}",
                    do="give --run-dir the directory of a run, or start a new run without --resume",
                )
            )
        if writer:
            run._lock = RunLock(run.path / LOCK, warn, patience_s)
            try:
                for log in (run._metrics, run._events):
                    with explained(log):
                        cut_torn_line(log)
                run._last_step = max((record.step for record in run.metrics()), default=0)
            except BaseException:
                run.close()
                raise
        return run

    def close(self) -> None:
        """Release the lock, so that other processes may write."""
        if self._lock is not None:
            self._lock.release()

    def discard(self) -> None:
        """Remove a new run that has no step yet, so that its name is free; other files stay."""
        if (
            not self._is_new
            or self._metrics.exists()
            or (self.checkpoints.exists() and any(self.checkpoints.iterdir()))
        ):
            return
        with contextlib.suppress(OSError):
            for path in (
                self._config,
                self._plan,
                self._events,
                self.path / LOCK,
                *(self.path / name for name in (*TOKENIZER_FILES, TRACKER_IDS)),
            ):
                path.unlink(missing_ok=True)
            for name in (PROGRESS_DIR, FAULTS_DIR, PROFILES, *TRACKER_DIRS):
                shutil.rmtree(self.path / name, ignore_errors=True)
            if self.checkpoints.exists():
                self.checkpoints.rmdir()
            if self._is_made_here:
                self.path.rmdir()

    def check_free(self) -> None:
        """Raise ConfigError if the directory holds a run or other files; changes nothing."""
        if self._config.exists():
            raise RunExistsError(
                explain(
                    "the run directory already holds a run, and runs are never overwritten",
                    given=self.path,
                    do=(
                        f"resume it with --run-dir {self.path} --resume, or choose another"
                        " --run-dir"
                    ),
                )
            )
        # files left by a killed start
        ours = {LOCK, PROGRESS_DIR, FAULTS_DIR, TRACKER_IDS, *TRACKER_DIRS}
        ours.add(unfinished(self._config).name)
        if (self.path / LOCK).exists():
            ours.add(self._events.name)  # trials are logged before the run begins
        files = (
            (path for path in self.path.iterdir() if path.name not in ours)
            if self.path.is_dir()
            else iter(())
        )
        if in_the_way := next(files, None):
            raise ConfigError(
                explain(
                    "the run directory holds files that are not a run's",
                    given=in_the_way,
                    do="choose a --run-dir that is new or empty",
                )
            )

    @property
    def is_begun(self) -> bool:
        """Whether there is a config, so that the run can be resumed."""
        return self._config.exists()

    @property
    def has_writer(self) -> bool | None:
        """Whether a process writes the run now; None: it cannot be known from here."""
        return is_held(self.path / LOCK)

    @property
    def checkpoints(self) -> Path:
        """Where checkpoints go; absolute, as Orbax wants it."""
        return self.path / "checkpoints"

    def write_config(self, text: str) -> None:
        """Write the config; from then on the directory is a run."""
        if self.writer:
            self._replace(self._config, text.encode())
            with explained(self.checkpoints):
                self.checkpoints.mkdir(exist_ok=True)

    def write_tokenizer(self, files: Mapping[str, bytes]) -> None:
        """Copy the tokenizer into the run, so that it survives if the original moves; an existing
        copy is kept.
        """
        if self.writer and self.tokenizer is None:
            assert set(files) <= set(TOKENIZER_FILES), files.keys()
            # tokenizer.json, which says that there is one, comes last
            for name in sorted(files, key=lambda name: (name == TOKENIZER_FILES[0], name)):
                self._replace(self.path / name, files[name])

    @property
    def tokenizer(self) -> Path | None:
        """Path of the run's tokenizer.json; None: its tokens are bytes, or an older version began
        it.
        """
        path = self.path / TOKENIZER_FILES[0]
        return path if path.exists() else None

    def write_mark(self, text: str) -> None:
        """Write a text that the other processes should find there."""
        if self.writer:
            path = self.path / PROGRESS_DIR / MARK
            with explained(path):
                path.parent.mkdir(exist_ok=True)
                replace(path, text.encode())

    def mark(self) -> str | None:
        """The text of `write_mark`; None: this process does not see the file."""
        try:
            return (self.path / PROGRESS_DIR / MARK).read_text(encoding="utf-8")
        except OSError:
            return None

    def write_plan(self, text: str) -> None:
        """Replace plan.json by the plan now in use."""
        if self.writer:
            self._replace(self._plan, text.encode())

    def restore_files(self) -> None:
        """Rewrite the files needed for a resume that somebody has removed, with a warning:
        checkpoints without them are worth little.

        Raises:
          RunDirectoryError: they cannot be written, or another process holds the directory.
        """
        gone = [path for path in self._written if not path.exists()]
        if not gone:
            return
        with explained(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
        # the lock was on a file that is gone
        if self._lock is not None and not (self.path / LOCK).exists():
            self._lock.release()
            self._lock = RunLock(self.path / LOCK, self._warn)
        for path in gone:
            self._replace(path, self._written[path])
        self._warn(
            f"deleted during the run and written again:"
            f" {', '.join(path.name for path in gone)}; what else was in {self.path} is lost"
        )

    def _replace(self, path: Path, content: bytes) -> None:
        with explained(path):
            replace(path, content)
        self._written[path] = content

    def config_text(self) -> str:
        """Text of config.json.

        Raises RunDirectoryError if it exists but cannot be read, ConfigError if it is not JSON.
        """
        try:
            text = self._config.read_text(encoding="utf-8")
            parse_json(text, finite=False)  # checked here, as the caller does not know the path
            return text
        except JSONInputError as error:
            raise ConfigError(
                explain(
                    "a run's config is not JSON",
                    given=f"{self._config}: {error if text.strip() else 'the file is empty'}",
                    do="restore the file, or start a new run",
                )
            ) from error
        except IsADirectoryError as error:
            raise file_error(self._config, error) from error
        except (FileNotFoundError, NotADirectoryError):
            raise
        except (OSError, UnicodeDecodeError) as error:
            raise RunDirectoryError(
                explain(
                    "a run's config cannot be read",
                    given=f"{self._config}: {error}",
                    do="restore the file, or start a new run",
                )
            ) from error

    def plan_text(self) -> str | None:
        """Text of plan.json, or None if the run ended before it had a plan."""
        with explained(self._plan):
            try:
                return self._plan.read_text(encoding="utf-8") if self._plan.exists() else None
            except UnicodeDecodeError as error:
                raise RunDirectoryError(
                    explain(
                        "a run's plan cannot be read",
                        given=f"{self._plan}: {error}",
                        do="restore the file, or remove it: the layout is then chosen anew",
                    )
                ) from error

    def log_step(self, record: StepRecord) -> None:
        """Append a step.

        A step that is already recorded is skipped: call `go_back_to` before repeating steps.
        """
        if self.writer and record.step > self._last_step:
            self._append(self._metrics, values_of(record))
            self._last_step = record.step
        for listener in self.listeners:
            listener.step(record)

    def log_event(self, event: EventName, step: int, **fields: object) -> None:
        """Append an event with the time now.

        Args:
          event: what happened.
          step: last finished step, 0 before the first.
          fields: further fields, as JSON values.
        """
        assert event in EVENTS, event
        assert "time_s" not in fields, (
            "time_s is when the event happened; call a duration by what it measures"
        )
        values = {"event": event, "step": step, "time_s": time.time(), **fields}
        if self.writer:
            self._append(self._events, values)
        if self._early is not None:
            self._early.append(values)
        for listener in self.listeners:
            listener.event(values)

    def listen(self, listeners: Sequence[RunListener]) -> None:
        """Tell some listeners the events that this process has logged, and what it records from now
        on.
        """
        early, self._early = self._early, None
        for event in early or ():
            for listener in listeners:
                listener.event(event)
        self.listeners += listeners

    def check(self) -> None:
        """Raise `failure` if there is one, or an error if lines still cannot be written."""
        if self.failure is not None:
            raise self.failure
        self._write_lines()
        if self._log_error is not None:
            raise self._log_error

    def go_back_to(self, step: int) -> int:
        """Move the lines of later steps to metrics.abandoned.jsonl: the run continues from `step`.

        A kill between the two writes leaves lines in both files, and the next call moves them
        again.

        Returns:
          How many lines were moved.
        """
        if not self.writer:
            return 0
        kept, left = [], []
        side = kept
        for line in complete_lines(self._metrics):
            # an unreadable line stays with the line before it
            if (record := record_of(line)) is not None:
                side = left if record.step > step else kept
            side.append(line)
        with explained(self._metrics):
            if left:
                append(self._abandoned, b"".join(line + b"\n" for line in left))
                replace(self._metrics, b"".join(line + b"\n" for line in kept))
        self._last_step = min(self._last_step, step)
        return len(left)

    def metrics(self) -> list[StepRecord]:
        """Every recorded step, in order; a number that was not finite comes back as NaN.

        A line that is not a step's record (a failing disk) is skipped with a warning.
        """
        return self._read(self._metrics, record_of)

    def events(self) -> list[dict[str, Any]]:
        """Every recorded event, in order; as `metrics`."""
        return self._read(self._events, event_of)

    def _read(self, path: Path, parse: Callable[[bytes], T | None]) -> list[T]:
        with explained(path):
            found = [parse(line) for line in complete_lines(path)]
        for number, item in enumerate(found, 1):
            if (
                item is None
                and (text := f"{path}, line {number}, is damaged and skipped") not in self._warned
            ):
                self._warned.add(text)
                self._warn(text)
        return [item for item in found if item is not None]

    def _append(self, path: Path, values: Mapping[str, Any]) -> None:
        """Append a line, after those that could not be written before.

        A log that cannot be written does not end the run: lines wait in memory, with a warning, and
        are written when that becomes possible; `check` raises at the end if it never does.
        """
        self._unwritten.append((path, event_line(values)))
        self._write_lines()

    def _write_lines(self) -> None:
        try:
            while self._unwritten:
                append(*self._unwritten[0])
                del self._unwritten[0]
        except OSError as error:
            is_new = self._log_error is None
            self._log_error = file_error(self._unwritten[0][0], error)
            if is_new:
                self._warn(
                    f"{self._log_error}\n  the run continues: lines wait in memory, and are written"
                    " when that is possible again"
                )
        else:
            if self._log_error is not None:
                self._log_error = None
                self._warn("the logs of the run are written again, and no line is missing")

    @property
    def _config(self) -> Path:
        return self.path / CONFIG_FILE

    @property
    def _plan(self) -> Path:
        return self.path / PLAN_FILE

    @property
    def _metrics(self) -> Path:
        return self.path / METRICS_FILE

    @property
    def _abandoned(self) -> Path:
        return self.path / ABANDONED_FILE

    @property
    def _events(self) -> Path:
        return self.path / EVENTS_FILE


def _make_default(model_name: str) -> Path:
    """A new directory under `runs/`.

    The name is claimed by creating it, as a sweep may start several runs in one second.
    """
    first = DEFAULT_PARENT / f"{model_name}-{time.strftime('%Y%m%d-%H%M%S')}"
    path, number = first, 1
    while True:
        try:
            path.mkdir(parents=True)
            return path
        except FileExistsError:
            if not path.exists():  # a part of the path is a file
                raise
            number += 1
            path = first.with_name(f"{first.name}-{number}")
