"""The directory of a run: what was asked, what was planned, and every step and event as it happened.

    config.json     the Config            plan.json       the Plan now in use
    metrics.jsonl   a line per step       events.jsonl    a line per event
    checkpoints/    states

The two logs only grow, so that they can be read while a run goes on and after it was killed at any moment. A line
without its newline is torn: readers pass over it and `RunDirectory.resume` cuts it off.
"""

import dataclasses
import json
import math
import os
import time
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from optimus_jax.errors import ConfigError, explain

EventName = Literal[
    "start", "plan", "compile", "checkpoint", "decision", "remesh", "rollback", "fault", "resume", "end", "eval"]

DEFAULT_PARENT = Path("runs")


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """What is known of one optimizer step."""

    step: int
    """Counted from 1."""
    loss: float
    """Mean over the tokens of the global batch: a float32 widened to Python's float, which JSON keeps exactly."""
    grad_norm: float
    """Global norm before clipping."""
    lr: float
    """Learning rate of the update."""
    tokens: int
    """Tokens of this step that count in the loss, over all processes."""
    step_time_s: float
    """Wall time."""
    tokens_per_s: float
    """Over all devices."""
    mfu: float | None
    """Share of the devices' peak FLOP/s that the model's own arithmetic used; None: the peak is unknown."""
    plan: str
    """Digest of the Plan that ran it."""
    peak_bytes: int | None
    """Most memory in use on one device so far; None: the backend does not say."""
    skipped: bool = False
    """Loss or gradients were not finite, so there was no update."""
    loss_scale: float | None = None
    """f16 only: factor on the loss."""


class RunDirectory:
    """One run on disk. Process 0 is its writer; in the others everything that would write does nothing.

    Making one touches nothing: `create` and `resume` do. The name that `create` chooses holds the time, so process 0
    calls it and tells the other processes `path`, for `RunDirectory(path, writer=False)`.
    """

    def __init__(self, path: str | Path, *, writer: bool = True) -> None:
        self.path = Path(path).absolute()
        self.writer = writer
        self._last_step = 0

    @classmethod
    def create(cls, path: str | Path | None, model_name: str) -> "RunDirectory":
        """Make the directory of a new run; it can be resumed from its first `write_config` on.

        Args:
          path: where; None is `runs/<model>-<time>`, with a number behind it if that is taken.
          model_name: preset, or a Hugging Face name or directory, whose last part is used.
        Raises:
          ConfigError: `path` holds a run or other files, or cannot be made.
        """
        if path is None:
            return cls(_make_default(Path(model_name).name))
        run = cls(path)
        run.check_free()
        try:
            run.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(explain(
                "the run directory cannot be made", given=f"{path}: {error.strerror}",
                do="choose another --run-dir")) from error
        return run

    @classmethod
    def resume(cls, path: str | Path, *, writer: bool = True) -> "RunDirectory":
        """Open the directory of a run that is to go on, and mend logs that it was killed while writing.

        Raises:
          ConfigError: `path` does not hold a run.
        """
        run = cls(path, writer=writer)
        if not run._config.exists():
            found = "has no config.json" if run.path.is_dir() else "is not a directory"
            raise ConfigError(explain(
                "there is no run to resume", given=f"{path}, which {found}",
                do="give --run-dir the directory of a run, or start a new run without --resume"))
        if writer:
            _cut_torn_line(run._metrics)
            _cut_torn_line(run._events)
            run._last_step = max((record.step for record in run.metrics()), default=0)
        return run

    def check_free(self) -> None:
        """Raise ConfigError if the directory holds a run or other files; touches nothing."""
        if self._config.exists():
            raise ConfigError(explain(
                "the run directory already holds a run, and runs are never overwritten", given=self.path,
                do=f"go on with it by --run-dir {self.path} --resume, or choose another --run-dir"))
        if self.path.is_dir() and (in_the_way := next(self.path.iterdir(), None)):
            raise ConfigError(explain(
                "the run directory holds files that are not a run's", given=in_the_way,
                do="choose a --run-dir that is new or empty"))

    @property
    def checkpoints(self) -> Path:
        """Where checkpoints go; absolute, as Orbax wants it."""
        return self.path / "checkpoints"

    def write_config(self, text: str) -> None:
        """Put the config in place; from here on the directory is a run."""
        if self.writer:
            _replace(self._config, text)
            self.checkpoints.mkdir(exist_ok=True)

    def write_plan(self, text: str) -> None:
        """Put the plan now in use in place of the one before."""
        if self.writer:
            _replace(self._plan, text)

    def config_text(self) -> str:
        """The config as it was written."""
        return self._config.read_text(encoding="utf-8")

    def plan_text(self) -> str | None:
        """The plan in use, or None if the run ended before it had one."""
        return self._plan.read_text(encoding="utf-8") if self._plan.exists() else None

    def log_step(self, record: StepRecord) -> None:
        """Append a step, unless it is recorded: steps run again after a crash or a rollback give the same numbers."""
        if self.writer and record.step > self._last_step:
            _append(self._metrics, _metrics_values(record))
            self._last_step = record.step

    def log_event(self, event: EventName, step: int, **fields: object) -> None:
        """Append an event with the time now.

        Args:
          event: what happened.
          step: last finished step, 0 before the first.
          fields: more about it, in values that JSON knows.
        """
        assert event in typing.get_args(EventName), event
        assert "time_s" not in fields, "time_s is when the event happened; call a duration by what it measures"
        if self.writer:
            _append(self._events, {"event": event, "step": step, "time_s": time.time(), **fields})

    def metrics(self) -> list[StepRecord]:
        """Every recorded step, in order; a number that was not finite comes back as NaN."""
        return [_record(values) for values in _complete_lines(self._metrics)]

    def events(self) -> list[dict[str, Any]]:
        """Every recorded event, in order."""
        return _complete_lines(self._events)

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
    def _events(self) -> Path:
        return self.path / "events.jsonl"


def _make_default(model_name: str) -> Path:
    """A new directory under `runs/`. Making it is what claims the name, as a sweep starts several in one second."""
    first = DEFAULT_PARENT / f"{model_name}-{time.strftime('%Y%m%d-%H%M%S')}"
    path, number = first, 1
    while True:
        try:
            path.mkdir(parents=True)
            return path
        except FileExistsError:
            number += 1
            path = first.with_name(f"{first.name}-{number}")


def _metrics_values(record: StepRecord) -> dict[str, Any]:
    """The fields of a line; `skipped` and `loss_scale` appear only where they say something."""
    values = dataclasses.asdict(record)
    if math.isfinite(record.loss) and math.isfinite(record.grad_norm):
        if not record.skipped:
            del values["skipped"]
    else:
        values["skipped"] = True
    if record.loss_scale is None:
        del values["loss_scale"]
    return values


def _record(values: dict[str, Any]) -> StepRecord:
    """The inverse of `_metrics_values`, as far as null allows."""
    for name in ("loss", "grad_norm"):
        if values[name] is None:
            values[name] = math.nan
    return StepRecord(**values)


def _finite(value: Any) -> Any:
    """`value` with null for every NaN and infinity, which JSON does not have."""
    match value:
        case float():
            return value if math.isfinite(value) else None
        case Mapping():
            return {key: _finite(item) for key, item in value.items()}
        case list() | tuple():
            return [_finite(item) for item in value]
    return value


def _append(path: Path, values: Mapping[str, Any]) -> None:
    """Add a line by one unbuffered write: it outlives this process. Opening each time leaves nothing to close."""
    line = json.dumps(_finite(values), allow_nan=False).encode() + b"\n"
    with open(path, "ab", buffering=0) as file:
        if file.write(line) != len(line):
            raise OSError(f"{path}: the disk took only a part of a line")


def _complete_lines(path: Path) -> list[dict[str, Any]]:
    data = path.read_bytes() if path.exists() else b""
    return [json.loads(line) for line in data[:data.rfind(b"\n") + 1].splitlines()]


def _cut_torn_line(path: Path) -> None:
    if path.exists():
        os.truncate(path, path.read_bytes().rfind(b"\n") + 1)


def _replace(path: Path, text: str) -> None:
    """Write a file whole or not at all: a reader sees the old text or the new."""
    temporary = path.with_suffix(".tmp")
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
