"""The directory of a run: what was asked, what was planned, and every step and event as it
happened.

    config.json     the Config            plan.json       the Plan now in use
    metrics.jsonl   a line per step       events.jsonl    a line per event
    checkpoints/    states                lock            held by the process that writes
    (run_lock.py) metrics.abandoned.jsonl               lines of steps that a resume went back
    behind, if there were any tokenizer.json  what made its tokens, with tokenizer_config.json; a
    run of bytes has none progress/       heartbeats of several processes (faults/heartbeat.py)
    faults/         what each process has seen of faults (fault_log.py)

The two logs only grow, so that they can be read while a run goes on and after it was killed at any
moment. A line without its newline is torn: readers pass over it and `RunDirectory.resume` cuts it
off.
"""

import contextlib
import json
import shutil
import time
import typing
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

from optimus_jax.errors import ConfigError, OptimusError, RunDirectoryError, explain
from optimus_jax.run_directory.files import (
    append,
    complete_lines,
    cut_torn_line,
    event_of,
    explained,
    file_error,
    finite,
    replace,
    unfinished,
)
from optimus_jax.run_directory.lock import RunLock
from optimus_jax.run_directory.step_record import StepRecord, record_of, values_of
from optimus_jax.system.json_input import JSONInputError, parse_json
from optimus_jax.system.paths import local_path

T = TypeVar("T")

EventName = Literal[
    "start",
    "plan",
    "compile",
    "checkpoint",
    "decision",
    "remesh",
    "rollback",
    "fault",
    "resume",
    "end",
    "eval",
    "phase",
]

DEFAULT_PARENT = Path("runs")
LOCK = "lock"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
"""What a run keeps of its tokenizer, by the names that the tokenizers library and transformers have
for it."""
PROGRESS_DIR = "progress"
FAULTS_DIR = "faults"
"""Directories that several processes write to as soon as there is a run directory."""
MARK = "mark"
"""In PROGRESS_DIR, by which they know the directory for the same (shared_directory.py)."""


class RunExistsError(ConfigError):
    """Where a new run was to be there is one."""


class RunDirectory:
    """One run on disk.

    Process 0 is its writer; in the others everything that would write does nothing.

    Making one touches nothing: `create` and `resume` do, and lock the directory until `close`. The
    name that `create` chooses holds the time, so process 0 calls it and tells the other processes
    `path`, for `RunDirectory(path, writer=False)`.

    Args:
      path: the directory.
      writer: whether this process writes.
      warn: told what was passed over when the run goes on regardless.
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
        """What --run-dir takes to go on with it."""
        self.writer = writer
        self.failure: RunDirectoryError | None = None
        """Why the run has to end, once its state is saved."""
        self._warn = warn
        self._warned: set[str] = set()
        self._last_step = 0
        self._unwritten: list[tuple[Path, bytes]] = []
        self._log_error: RunDirectoryError | None = None
        """Why lines are waiting; None: none are."""
        self._written: dict[Path, bytes] = {}
        """Files without which the run could not be resumed, as they are to be."""
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
          path: where; None is `runs/<model>-<time>`, with a number behind it if that is taken.
          model_name: preset, or a Hugging Face name or directory, whose last part is used.
          patience_s: for so long another writer is waited for.
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
                    do="name a place that can be written with --run-dir",
                )
            ) from error
        run._lock = RunLock(run.path / LOCK, warn, patience_s)
        try:
            run.check_free()  # once more: until now another process could have come first
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
        """Open the directory of a run that is to go on, and mend logs that it was killed while
        writing.

        Args:
          patience_s: for so long another writer is waited for.
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
        """Let other processes write here."""
        if self._lock is not None:
            self._lock.release()

    def discard(self) -> None:
        """Remove what `create` has begun if no step came of it, so that its name is free again; the
        files of others stay.
        """
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
                *(self.path / name for name in TOKENIZER_FILES),
            ):
                path.unlink(missing_ok=True)
            for name in (PROGRESS_DIR, FAULTS_DIR):
                shutil.rmtree(self.path / name, ignore_errors=True)
            if self.checkpoints.exists():
                self.checkpoints.rmdir()
            if self._is_made_here:
                self.path.rmdir()

    def check_free(self) -> None:
        """Raise ConfigError if the directory holds a run or other files; touches nothing."""
        if self._config.exists():
            raise RunExistsError(
                explain(
                    "the run directory already holds a run, and runs are never overwritten",
                    given=self.path,
                    do=(
                        f"go on with it by --run-dir {self.path} --resume, or choose another"
                        " --run-dir"
                    ),
                )
            )
        # what a start that was killed leaves
        ours = {LOCK, PROGRESS_DIR, FAULTS_DIR, unfinished(self._config).name}
        if (self.path / LOCK).exists():
            ours.add(self._events.name)  # of the plans that it had tried
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
    def checkpoints(self) -> Path:
        """Where checkpoints go; absolute, as Orbax wants it."""
        return self.path / "checkpoints"

    def write_config(self, text: str) -> None:
        """Put the config in place; from here on the directory is a run."""
        if self.writer:
            self._replace(self._config, text.encode())
            with explained(self.checkpoints):
                self.checkpoints.mkdir(exist_ok=True)

    def write_tokenizer(self, files: Mapping[str, bytes]) -> None:
        """Put the run's tokenizer beside its config, by which it stays even where the original
        moves; one that is there is the run's and stays.
        """
        if self.writer and self.tokenizer is None:
            assert set(files) <= set(TOKENIZER_FILES), files.keys()
            # tokenizer.json, which says that there is one, comes last
            for name, content in sorted(files.items(), reverse=True):
                self._replace(self.path / name, content)

    @property
    def tokenizer(self) -> Path | None:
        """The run's own tokenizer.json; None: it has none, as its tokens are bytes or it was begun
        before runs kept it.
        """
        path = self.path / TOKENIZER_FILES[0]
        return path if path.exists() else None

    def write_mark(self, text: str) -> None:
        """Put down what the other processes should find there."""
        if self.writer:
            path = self.path / PROGRESS_DIR / MARK
            with explained(path):
                path.parent.mkdir(exist_ok=True)
                replace(path, text.encode())

    def mark(self) -> str | None:
        """What the writer has put down; None: this process does not see it."""
        try:
            return (self.path / PROGRESS_DIR / MARK).read_text(encoding="utf-8")
        except OSError:
            return None

    def write_plan(self, text: str) -> None:
        """Put the plan now in use in place of the one before."""
        if self.writer:
            self._replace(self._plan, text.encode())

    def restore_files(self) -> None:
        """Write again what somebody has removed of the files that a resume needs: a checkpoint
        without them is worth little. Says so.

        Raises:
          RunDirectoryError: they cannot be written, or another process has taken the place.
        """
        gone = [path for path in self._written if not path.exists()]
        if not gone:
            return
        with explained(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
        # it was the lock of a file that is gone
        if self._lock is not None and not (self.path / LOCK).exists():
            self._lock.release()
            self._lock = RunLock(self.path / LOCK, self._warn)
        for path in gone:
            self._replace(path, self._written[path])
        self._warn(
            f"{', '.join(path.name for path in gone)} of the run had been removed while it goes on,"
            f" and are written again; what else was in {self.path} is lost"
        )

    def _replace(self, path: Path, content: bytes) -> None:
        with explained(path):
            replace(path, content)
        self._written[path] = content

    def config_text(self) -> str:
        """The config as it was written.

        Raises RunDirectoryError if it is there and cannot be read, ConfigError if it is not JSON.
        """
        try:
            text = self._config.read_text(encoding="utf-8")
            parse_json(text, finite=False)  # who reads it does not know where it lies
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
        """The plan in use, or None if the run ended before it had one."""
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

        One that is recorded is left out: who runs steps again calls `go_back_to` first.
        """
        if self.writer and record.step > self._last_step:
            self._append(self._metrics, values_of(record))
            self._last_step = record.step

    def log_event(self, event: EventName, step: int, **fields: object) -> None:
        """Append an event with the time now.

        Args:
          event: what happened.
          step: last finished step, 0 before the first.
          fields: more about it, in values that JSON knows.
        """
        assert event in typing.get_args(EventName), event
        assert "time_s" not in fields, (
            "time_s is when the event happened; call a duration by what it measures"
        )
        if self.writer:
            self._append(
                self._events, {"event": event, "step": step, "time_s": time.time(), **fields}
            )

    def check(self) -> None:
        """Raise `failure`, if there was one, or what keeps lines from being written, if they still
        cannot be.
        """
        if self.failure is not None:
            raise self.failure
        self._write_lines()
        if self._log_error is not None:
            raise self._log_error

    def go_back_to(self, step: int) -> int:
        """Move the lines of later steps to metrics.abandoned.jsonl: the run goes on from here,
        perhaps on another course.

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
            # what cannot be read stays with the line before
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

        A line that is no step's record, as a failing disk may leave, is passed over with a warning.
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
                and (text := f"{path}, line {number}, is damaged and passed over")
                not in self._warned
            ):
                self._warned.add(text)
                self._warn(text)
        return [item for item in found if item is not None]

    def _append(self, path: Path, values: Mapping[str, Any]) -> None:
        """Append a line, after those that could not be written before.

        A log that cannot be written costs neither the run nor its state: lines wait in memory,
        which is said, and are written as soon as that is possible; `check` raises at the end if it
        is not.
        """
        self._unwritten.append((path, json.dumps(finite(values), allow_nan=False).encode() + b"\n"))
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
                    f"{self._log_error}\n  the run goes on: lines wait in memory, and are written"
                    " when that is possible again"
                )
        else:
            if self._log_error is not None:
                self._log_error = None
                self._warn("the logs of the run are written again, and no line is missing")

    @property
    def _config(self) -> Path:
        return self.path / "config.json"

    @property
    def _plan(self) -> Path:
        return self.path / "plan.json"

    @property
    def _metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def _abandoned(self) -> Path:
        return self.path / "metrics.abandoned.jsonl"

    @property
    def _events(self) -> Path:
        return self.path / "events.jsonl"


def _make_default(model_name: str) -> Path:
    """A new directory under `runs/`.

    Making it is what claims the name, as a sweep starts several in one second.
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
