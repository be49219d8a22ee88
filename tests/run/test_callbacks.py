"""What callbacks and trackers are told, and that they cannot harm a run."""

import contextlib
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
from shared_programs import shared_programs  # noqa: F401

import optimus_jax
from optimus_jax.config import Config, LogConfig
from optimus_jax.config.request import read_config
from optimus_jax.errors import ConfigError
from optimus_jax.faults.stopping import ImmediateStop
from optimus_jax.run import trackers
from optimus_jax.run.trackers import check_trackers
from optimus_jax.run_directory.directory import TRACKER_IDS, RunDirectory
from optimus_jax.training.callbacks import Callback, CallbackListener, Callbacks

OPTIONS = {
    "model.num_layers": 2,
    "model.embed_dim": 32,
    "model.mlp_dim": 64,
    "seq_len": 32,
    "global_batch": 8,
    "mesh": "data=2,fsdp=2,tensor=2",
    "checkpoint_every": 2,
    "eval_every": 2,
    "evaluation.examples": 8,
    "progress": "none",
    "control": "off",
}


class Told(Callback):
    def __init__(self):
        self.told = []

    def on_start(self, run):
        self.run = run
        self.told.append(("start", run.first_step))

    def on_step(self, record):
        self.told.append(("step", record.step))

    def on_evaluate(self, record):
        self.told.append(("evaluate", record.step))
        self.loss = record.loss

    def on_checkpoint(self, step, path):
        self.told.append(("checkpoint", step, path.is_dir()))

    def on_event(self, event):
        self.events = [*getattr(self, "events", []), event["event"]]

    def on_end(self, step, reason):
        self.told.append(("end", step, reason))

    def steps(self, name):
        return [step for told, step, *_ in self.told if told == name]


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("to be or not to be, that is the question. " * 100)
    return str(path)


def train(text, run_dir, **more):
    return optimus_jax.train("gpt2-nano", data=text, run_dir=run_dir, **OPTIONS | more)


def test_a_callback_is_told_what_the_run_records(text, tmp_path, capfd):
    class Broken(Callback):
        def on_step(self, record):
            raise RuntimeError("no more disk")

    class NeverStarts(Callback):
        def on_start(self, run):
            raise OSError("no server")

        def on_step(self, record):
            raise AssertionError

    told = Told()
    run = train(text, tmp_path / "run", steps=4, callbacks=[Broken(), NeverStarts(), told])
    assert run.reason == "done"
    assert told.told[0] == ("start", 1)
    assert told.told[-1] == ("end", 4, "done")
    assert told.steps("step") == [1, 2, 3, 4]
    assert told.steps("evaluate") == [2, 4]
    assert [each for each in told.told if each[0] == "checkpoint"] == [
        ("checkpoint", step, True) for step in (2, 4)
    ]
    losses = [
        each["loss"] for each in RunDirectory(run.run_dir).events() if each["event"] == "eval"
    ]
    assert told.loss == losses[-1]
    assert told.events == [each["event"] for each in RunDirectory(run.run_dir).events()]
    assert told.events[:3] == ["start", "plan", "compile"]
    assert told.run.plan == run.plan
    assert told.run.config.model.embed_dim == 32
    shown = capfd.readouterr().err
    assert shown.count("Broken has failed (on_step: RuntimeError: no more disk)") == 1
    assert "on_step is not called again; the run continues\nTraceback" in shown
    assert shown.count("NeverStarts has failed") == 1
    assert "NeverStarts has failed (on_start: OSError: no server)" in shown


def test_a_callback_whose_method_nothing_would_call_is_refused(tmp_path):
    class Misspelt(Callback):
        def on_step_end(self, record): ...

    with pytest.raises(ConfigError, match=r"(?s)on_step_end.*did you mean 'on_step'"):
        train("stdlib", tmp_path / "run", callbacks=[Misspelt()])


def test_a_callback_can_stop_a_run_which_is_saved_and_goes_on(text, tmp_path):
    class StopsAt3(Told):
        def on_step(self, record):
            super().on_step(record)
            if record.step == 3:
                self.run.stop()

    stopped = StopsAt3()
    run = train(text, tmp_path / "run", steps=9, callbacks=[stopped])
    assert run.reason == "interrupt"
    last = run.history[-1].step
    assert 3 <= last <= 5
    assert stopped.told[-1] == ("end", last, "interrupt")

    class Leaves(Told):
        def on_step(self, record):
            super().on_step(record)
            sys.exit(3)

    again = Leaves()
    with pytest.raises(SystemExit) as left:
        optimus_jax.train(run_dir=run.run_dir, resume=True, steps=9, callbacks=[again])
    assert left.value.code == 3
    assert again.told[0] == ("start", last + 1)
    assert again.told[-1] == ("end", again.steps("step")[-1], "interrupt")
    assert again.told[-2] == ("checkpoint", again.steps("step")[-1], True)
    RunDirectory.resume(run.run_dir).close()  # nobody else writes it


def test_events_have_methods_of_their_own(tmp_path):
    class Events(Callback):
        def __init__(self):
            self.all, self.decisions, self.switches = [], [], []

        def on_event(self, event):
            self.all.append(event["event"])

        def on_decision(self, event):
            self.decisions.append(event["why"])

        def on_switch(self, event):
            self.switches.append(event["event"])

    callback, run = Events(), RunDirectory.create(tmp_path / "run", "gpt2-nano")
    run.listeners.append(CallbackListener(callback, run.checkpoints))
    run.log_event("decision", 1, why="because", action="stay")
    run.log_event("remesh", 2, plan="a")
    run.log_event("rollback", 3, plan="b")
    run.log_event("eval", 3, loss=None)
    assert callback.all == ["decision", "remesh", "rollback", "eval"]
    assert callback.decisions == ["because"]
    assert callback.switches == ["remesh", "rollback"]
    run.close()


def test_other_processes_call_only_those_that_ask_for_it(tmp_path):
    class Everywhere(Told):
        in_every_process = True

    here, everywhere = Told(), Everywhere()
    info = SimpleNamespace(first_step=5)
    with contextlib.suppress(RuntimeError), Callbacks([here, everywhere], is_writer=False) as told:
        assert len(told.start(info, tmp_path)) == 2, "it listens itself"
        raise RuntimeError("the run fails")
    assert here.told == []
    assert everywhere.told == [("start", 5), ("end", 4, "error")]


def test_what_ends_a_run_is_said_once(tmp_path):
    told = Told()
    with contextlib.suppress(RuntimeError), Callbacks([told], is_writer=True) as callbacks:
        [listener, *_] = callbacks.start(SimpleNamespace(first_step=1), tmp_path)
        listener.event({"event": "end", "step": 7, "reason": "not learning"})
        raise RuntimeError("it does not learn")
    assert told.told == [("start", 1), ("end", 7, "not learning")]
    told = Told()
    with contextlib.suppress(SystemExit), Callbacks([told], is_writer=True) as callbacks:
        callbacks.start(SimpleNamespace(first_step=1), tmp_path)
        raise SystemExit
    assert told.told == [("start", 1), ("end", 0, "error")]
    told = Told()
    with contextlib.suppress(KeyboardInterrupt), Callbacks([told], is_writer=True) as callbacks:
        callbacks.start(SimpleNamespace(first_step=1), tmp_path)
        raise KeyboardInterrupt
    assert told.told == [("start", 1)], "a second Ctrl-C ends at once"


@pytest.mark.parametrize("error", [SystemExit(4), KeyboardInterrupt(), ImmediateStop()])
def test_a_callback_that_leaves_the_program_stops_the_run_first(error, tmp_path):
    class Leaves(Told):
        def on_step(self, record):
            raise error

    told, stops = Leaves(), []
    info = SimpleNamespace(first_step=1, stop=lambda: stops.append(True))
    callbacks = Callbacks([told], is_writer=True)
    _, listener = callbacks.start(info, tmp_path)
    at_once = isinstance(error, ImmediateStop)
    with pytest.raises(ImmediateStop) if at_once else contextlib.nullcontext():
        listener.step(SimpleNamespace(step=1))
    assert stops == [] if at_once else [True]
    callbacks.finish()
    with pytest.raises(SystemExit) if error.args else contextlib.nullcontext():
        callbacks.leave()


@pytest.mark.parametrize(
    "callbacks", [Told(), [Told], "told"], ids=["no list", "a class", "a text"]
)
def test_what_is_no_callback_is_refused(callbacks: Any):
    with pytest.raises(ConfigError, match=r"optimus_jax\.Callback"):
        optimus_jax.train("gpt2-nano", callbacks=callbacks)


def test_tensorboard_has_the_values_that_are_known(text, tmp_path):
    pytest.importorskip("tensorboardX")
    train(text, tmp_path / "run", steps=2, log="tensorboard")
    [file] = (tmp_path / "run" / "tensorboard").iterdir()
    tags = set(re.findall(rb"(?:train|speed|eval)/[a-z_]+", file.read_bytes()))
    # The wait for data is there where devices were idle when the batch came: as the machine is.
    assert tags - {b"speed/data_wait_s"} == {
        b"train/loss",
        b"train/grad_norm",
        b"train/lr",
        b"speed/tokens_per_s",
        b"speed/step_time_s",
        b"eval/loss",
        b"eval/perplexity",
        b"eval/bits_per_byte",
    }


def decide(run_dir):
    """What a controller would have logged at the end of a start."""
    run = RunDirectory.resume(run_dir)
    run.log_event("decision", 2, action="stay", why="it is fast enough")
    run.close()


def test_trackers_have_decisions_and_the_report_also_of_a_run_that_is_killed(tmp_path, monkeypatch):
    told = mock.MagicMock()
    monkeypatch.setattr(trackers, "run_report", lambda run_dir: "<html>")
    run = RunDirectory.create(tmp_path / "run", "gpt2-nano")
    run.log_event("decision", 1, action="switch", layout="data=2", why="earlier")
    event = {"event": "decision", "step": 4, "action": "stay", "why": "because"}

    wandb = trackers.WeightsAndBiases()
    wandb._wandb, wandb._run, wandb._run_dir = told, told.run, run.path
    wandb.on_decision(event)
    said = {"decision/action": "stay", "decision/why": "because"}
    told.run.log.assert_called_with({"step": 4, **said})
    wandb.on_end(4, "done")
    told.Table.assert_called_with(columns=mock.ANY, data=[[1, "switch", "data=2", "earlier"]])
    assert told.Artifact().add_file.call_args.args[0].endswith("report.html")
    told.run.log_artifact.assert_called_with(told.Artifact())

    mlflow = trackers.MLflow()
    mlflow._client, mlflow._id, mlflow._run_dir, mlflow._sent = told.client, "1", run.path, None
    mlflow.on_decision(event)
    told.client.set_tag.assert_called_with("1", "decision.4", "stay: because")
    mlflow.on_end(4, "done")
    assert json.loads(told.client.log_text.call_args.args[1])["why"] == "earlier"
    assert told.client.log_artifact.call_args.args[1].endswith("report.html")
    run.close()


def test_a_resumed_run_goes_on_in_the_same_run_of_mlflow(text, tmp_path, monkeypatch, capfd):
    mlflow = pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    monkeypatch.chdir(tmp_path)
    options = {"log": "mlflow", "log.project": "tests"}
    train(text, tmp_path / "run", steps=2, **options)
    decide(tmp_path / "run")
    optimus_jax.train(run_dir=tmp_path / "run", resume=True, steps=4)
    client = mlflow.MlflowClient()
    [found] = client.search_runs([client.get_experiment_by_name("tests").experiment_id])
    assert found.info.status == "FINISHED"
    assert found.data.params["optimizer.beta2"] == "0.95"
    losses = client.get_metric_history(found.info.run_id, "train/loss")
    assert sorted(each.step for each in losses) == [1, 2, 3, 4]
    np.testing.assert_allclose(
        [each.value for each in sorted(losses, key=lambda each: each.step)],
        [record.loss for record in RunDirectory(tmp_path / "run").metrics()],
    )
    assert (found.data.params["steps"], found.data.tags["resumed.steps"]) == ("2", "4")
    assert "resumed.optimizer.beta2" not in found.data.tags
    files = {each.path for each in client.list_artifacts(found.info.run_id)}
    assert files == {"decisions.jsonl", "report.html"}
    path = client.download_artifacts(found.info.run_id, "decisions.jsonl", str(tmp_path))
    assert "it is fast enough" in Path(path).read_text()
    assert "has failed" not in capfd.readouterr().err


def test_a_resumed_run_goes_on_in_the_same_run_of_wandb(text, tmp_path, monkeypatch, capfd):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    train(text, tmp_path / "run", steps=2, log="wandb")
    known = json.loads((tmp_path / "run" / TRACKER_IDS).read_text())["wandb"]
    decide(tmp_path / "run")
    optimus_jax.train(run_dir=tmp_path / "run", resume=True, steps=3)
    assert json.loads((tmp_path / "run" / TRACKER_IDS).read_text())["wandb"] == known
    folders = sorted((tmp_path / "run" / "wandb").glob(f"offline-run-*-{known}"))
    assert len(folders) == 2, "each start of a process writes a folder of the same run"
    assert all(list(folder.glob("*.wandb")) for folder in folders)
    [table] = (tmp_path / "run" / "wandb").glob("offline-*/files/media/table/decisions*.table.json")
    assert "it is fast enough" in table.read_text()
    shown = capfd.readouterr().err
    assert "has failed" not in shown
    assert "trackers get no report" not in shown


def test_a_tracker_without_its_package_names_what_to_install(monkeypatch):
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda name: None)
    for name in trackers.TRACKERS:
        with pytest.raises(ConfigError, match=rf"optimus-jax\[{name}\].*: --log none$"):
            check_trackers(LogConfig(trackers=(name,)))
    assert Config().with_values({"log.trackers": "none"}).log.trackers == ()


def test_a_config_of_an_earlier_version_names_its_tracker(tmp_path):
    value = json.loads(Config().to_json())
    value["log"] = {"progress": "plain", "every": 5, "tensorboard": True}
    assert Config.from_value(value).log == LogConfig(
        progress="plain", every=5, trackers=("tensorboard",)
    )
    path = tmp_path / "config.json"
    path.write_text(json.dumps(value))
    assert read_config(path).log.trackers == ("tensorboard",)
    value["log"]["tensorboard"] = False
    assert Config.from_value(value).log.trackers == ()
