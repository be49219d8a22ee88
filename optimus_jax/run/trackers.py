"""Trackers: where a run's steps, evaluations and decisions are written besides its directory.

A tracker is a callback (training/callbacks.py). A resumed run goes on in the same run of the
tracker, whose name the run keeps in trackers.json.
"""

import importlib.util
import json
import math
import os
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from optimus_jax.config import LogConfig
from optimus_jax.config.settings import compared_settings, value_of
from optimus_jax.errors import ConfigError, OptimusError, explain, first_line
from optimus_jax.report.run_report import run_report
from optimus_jax.run_directory.contents import REPORT_FILE
from optimus_jax.run_directory.directory import TRACKER_IDS, RunDirectory
from optimus_jax.run_directory.files import replace
from optimus_jax.run_directory.step_record import EvalRecord, StepRecord
from optimus_jax.system.json_input import JSONInputError, parse_json
from optimus_jax.system.resilient_io import print_to_stderr
from optimus_jax.training.callbacks import Callback, RunInfo

PARAMS_AT_ONCE = 100
"""Most settings that MLflow takes at once."""
MAX_PARAM_CHARS, MAX_TAG_CHARS = 500, 5000
"""Most characters of a parameter and of a tag of MLflow."""
DECISIONS_FILE = "decisions.jsonl"
DECISION_FIELDS = ("step", "action", "layout", "why")
"""Of the event `decision`, in a table."""


class Tensorboard(Callback):
    """Writes scalars into the run directory, for TensorBoard."""

    def on_start(self, run: RunInfo) -> None:
        """Open a file; TensorBoard hides what an earlier process wrote for these steps."""
        from tensorboardX import SummaryWriter

        folder = run.run_dir / "tensorboard"
        self._writer = SummaryWriter(str(folder), purge_step=run.first_step)

    def on_step(self, record: StepRecord) -> None:
        """Write the scalars of a step."""
        for name, value in step_scalars(record):
            self._writer.add_scalar(name, value, record.step)

    def on_evaluate(self, record: EvalRecord) -> None:
        """Write the scalars of an evaluation."""
        for name, value in evaluation_scalars(record):
            self._writer.add_scalar(name, value, record.step)

    def on_end(self, step: int, reason: str) -> None:
        """Close the file."""
        self._writer.close()


class WeightsAndBiases(Callback):
    """Writes to Weights & Biases; offline if WANDB_MODE says so."""

    def on_start(self, run: RunInfo) -> None:
        """Begin a run there, or go on with the same one."""
        import wandb

        self._wandb, self._run_dir = wandb, run.run_dir
        self._run = wandb.init(
            project=run.config.log.project,
            name=run.run_dir.name,
            id=_known_id(run.run_dir, "wandb"),
            resume="allow",
            dir=str(run.run_dir),
            config=_settings(run),
            settings=wandb.Settings(silent=True),
        )
        _keep_id(run.run_dir, "wandb", self._run.id)
        # Steps that are done again after an older checkpoint would be refused as W&B's own steps.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def on_step(self, record: StepRecord) -> None:
        """Write the scalars of a step."""
        self._run.log({"step": record.step, **dict(step_scalars(record))})

    def on_evaluate(self, record: EvalRecord) -> None:
        """Write the scalars of an evaluation."""
        self._run.log({"step": record.step, **dict(evaluation_scalars(record))})

    def on_decision(self, event: Mapping[str, Any]) -> None:
        """Write a decision, so that a run that is killed has it too."""
        said = {f"decision/{name}": event[name] for name in DECISION_FIELDS[1:] if name in event}
        self._run.log({"step": event["step"], **said})

    def on_end(self, step: int, reason: str) -> None:
        """Write a table of all decisions, and the report, and end the run there."""
        try:
            if decisions := _decisions(self._run_dir):
                rows = [[event.get(name) for name in DECISION_FIELDS] for event in decisions]
                table = self._wandb.Table(columns=list(DECISION_FIELDS), data=rows)
                self._run.log({"decisions": table})
            with _report(self._run_dir) as report:
                if report is not None:
                    artifact = self._wandb.Artifact(f"{self._run.id}-report", type="report")
                    artifact.add_file(str(report))
                    self._run.log_artifact(artifact)
        finally:
            self._run.finish(exit_code=0 if reason in ("done", "interrupt") else 1)


class MLflow(Callback):
    """Writes to MLflow, at the address in MLFLOW_TRACKING_URI, or where MLflow does by default."""

    def on_start(self, run: RunInfo) -> None:
        """Begin a run there, or go on with the same one."""
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self._metric, self._run_dir, self._sent = Metric, run.run_dir, None
        self._client = client = MlflowClient()
        known, project = _known_id(run.run_dir, "mlflow"), run.config.log.project
        if known is not None:
            client.update_run(known, status="RUNNING")
            self._id = known
            self._tag_changes(_settings(run))
            return
        found = client.get_experiment_by_name(project)
        experiment = client.create_experiment(project) if found is None else found.experiment_id
        self._id = client.create_run(experiment, run_name=run.run_dir.name).info.run_id
        _keep_id(run.run_dir, "mlflow", self._id)
        params = [Param(name, _param(value)) for name, value in _settings(run).items()]
        for first in range(0, len(params), PARAMS_AT_ONCE):
            client.log_batch(self._id, params=params[first : first + PARAMS_AT_ONCE])

    def on_step(self, record: StepRecord) -> None:
        """Write the scalars of a step."""
        self._log(step_scalars(record), record.step)

    def on_evaluate(self, record: EvalRecord) -> None:
        """Write the scalars of an evaluation."""
        self._log(evaluation_scalars(record), record.step)

    def on_decision(self, event: Mapping[str, Any]) -> None:
        """Write a decision as a tag of its step."""
        said = f"{event.get('action')}: {event.get('why')}"[:MAX_TAG_CHARS]
        self._client.set_tag(self._id, f"decision.{event['step']}", said)

    def on_end(self, step: int, reason: str) -> None:
        """Write all decisions and the report as files, and end the run there."""
        try:
            if self._sent is not None:
                self._sent.wait()
            if decisions := _decisions(self._run_dir):
                lines = "".join(json.dumps(event) + "\n" for event in decisions)
                self._client.log_text(self._id, lines, DECISIONS_FILE)
            with _report(self._run_dir) as report:
                if report is not None:
                    self._client.log_artifact(self._id, str(report))
        finally:
            statuses = {"done": "FINISHED", "interrupt": "KILLED", "terminate": "KILLED"}
            self._client.set_terminated(self._id, statuses.get(reason, "FAILED"))

    def _tag_changes(self, settings: Mapping[str, Any]) -> None:
        """Write settings that a resume has changed as tags: parameters cannot be written anew."""
        before = self._client.get_run(self._id).data
        for name, value in settings.items():
            tag, now = f"resumed.{name}", _param(value)
            if now != before.tags.get(tag, before.params.get(name)):
                self._client.set_tag(self._id, tag, now)

    def _log(self, scalars: Iterable[tuple[str, float]], step: int) -> None:
        now = round(1000 * time.time())
        metrics = [self._metric(name, value, now, step) for name, value in scalars]
        self._sent = self._client.log_batch(self._id, metrics=metrics, synchronous=False)


class TrackerKind(NamedTuple):
    """A kind of tracker."""

    tracker: type[Callback]
    package: str
    """The package that it needs."""
    extra: str
    """The extra of this project that installs it."""


TRACKERS: Mapping[str, TrackerKind] = {
    "tensorboard": TrackerKind(Tensorboard, "tensorboardX", "tensorboard"),
    "wandb": TrackerKind(WeightsAndBiases, "wandb", "wandb"),
    "mlflow": TrackerKind(MLflow, "mlflow", "mlflow"),
}
"""By the names in the setting `log.trackers`."""


def check_trackers(config: LogConfig) -> None:
    """Raise ConfigError if the package of a tracker is not installed."""
    for name in config.trackers:
        kind = TRACKERS[name]
        if importlib.util.find_spec(kind.package) is None:
            others = ",".join(each for each in config.trackers if each != name)
            raise ConfigError(
                explain(
                    f"the tracker {name} needs a package that is not installed",
                    given=f"log.trackers={','.join(config.trackers)}",
                    do=f"pip install 'optimus-jax[{kind.extra}]', or go on without: --log"
                    f" {others or 'none'}",
                )
            )


def trackers_of(config: LogConfig) -> list[Callback]:
    """The trackers that a config names."""
    return [TRACKERS[name].tracker() for name in config.trackers]


def step_scalars(record: StepRecord) -> Iterator[tuple[str, float]]:
    """Name and value of what a step has measured, without what is unknown or not finite."""
    return _finite(
        {
            "train/loss": record.loss,
            "train/grad_norm": record.grad_norm,
            "train/lr": record.lr,
            "train/loss_scale": record.loss_scale,
            "speed/tokens_per_s": record.tokens_per_s,
            "speed/step_time_s": record.step_time_s,
            "speed/mfu": record.mfu,
            "speed/data_wait_s": record.data_wait_s,
            "speed/peak_bytes": record.peak_bytes,
            **{f"train/{name}": value for name, value in record.metrics.items()},
        }
    )


def evaluation_scalars(record: EvalRecord) -> Iterator[tuple[str, float]]:
    """The same of an evaluation."""
    return _finite(
        {
            "eval/loss": record.loss,
            "eval/perplexity": record.perplexity,
            "eval/bits_per_byte": record.bits_per_byte,
            **{f"eval/{name}": value for name, value in record.metrics.items()},
        }
    )


def _finite(values: Mapping[str, float | None]) -> Iterator[tuple[str, float]]:
    for name, value in values.items():
        if value is not None and math.isfinite(value):
            yield name, value


def _settings(run: RunInfo) -> dict[str, Any]:
    """Every setting by its dotted name, and the plan."""
    config = run.config.stored
    values = {name: value_of(config, name) for name in compared_settings(type(config))}
    plain = {
        name: value if isinstance(value, int | float | str | None) else str(value)
        for name, value in values.items()
    }
    return plain | {"plan": run.plan.describe()}


def _param(value: object) -> str:
    """A setting as a parameter of MLflow."""
    return str(value)[:MAX_PARAM_CHARS]


def _decisions(run_dir: Path) -> list[dict[str, Any]]:
    """All decisions of a run, also those of earlier starts; none if they cannot be read."""
    try:
        events = RunDirectory(run_dir, writer=False, warn=print_to_stderr).events()
    except OptimusError as error:
        print_to_stderr(f"trackers get no table of decisions: {first_line(error)}")
        return []
    return [event for event in events if event["event"] == "decision"]


@contextmanager
def _report(run_dir: Path) -> Iterator[Path | None]:
    """A file with the report of a run; None if it cannot be made, as without the extra `plots`."""
    try:
        text = run_report(run_dir)
    except OptimusError as error:
        print_to_stderr(f"trackers get no report: {first_line(error)}")
        yield None
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / REPORT_FILE
        path.write_text(text, encoding="utf-8")
        yield path


def _known_id(run_dir: Path, tracker: str) -> str | None:
    """The name by which a tracker knows a run; None: it does not, or its file cannot be read."""
    try:
        found = parse_json((run_dir / TRACKER_IDS).read_bytes())
    except (OSError, JSONInputError):
        return None
    name = found.get(tracker) if isinstance(found, dict) else None
    return name if isinstance(name, str) else None


def _keep_id(run_dir: Path, tracker: str, name: str) -> None:
    known = {each: _known_id(run_dir, each) for each in TRACKERS}
    known = {each: found for each, found in known.items() if found is not None}
    replace(run_dir / TRACKER_IDS, (json.dumps(known | {tracker: name}) + os.linesep).encode())
