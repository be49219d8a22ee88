"""`--profile`: a run traces some steps, says where their time went, and is not harmed by it."""

import gzip
import json

import jax
import pytest
from in_process import run_in_process
from shared_programs import shared_programs  # noqa: F401

import optimus_jax
from optimus_jax.config import Config, LogConfig
from optimus_jax.errors import ConfigError
from optimus_jax.report.run_report import run_report
from optimus_jax.run.step_profiler import MEMORY, PROGRAM, SUMMARY, TRACE
from optimus_jax.training.callbacks import Callback

OPTIONS = {
    "model.num_layers": 2,
    "model.embed_dim": 32,
    "model.mlp_dim": 64,
    "seq_len": 32,
    "global_batch": 8,
    "mesh": "data=2,fsdp=2,tensor=2",
    "checkpoint_every": 0,
    "eval_every": 0,
    "control": "off",
}


STATE = ("params", "moments")


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("to be or not to be, that is the question. " * 100)
    return str(path)


def train(text, run_dir, **more):
    return optimus_jax.train("gpt2-nano", data=text, run_dir=run_dir, **OPTIONS | more)


def profiles(run_dir):
    lines = map(json.loads, (run_dir / "events.jsonl").read_text().splitlines())
    return [line for line in lines if line["event"] == "profile"]


def test_a_run_says_where_the_time_of_its_steps_went(text, tmp_path, capsys):
    run = tmp_path / "run"
    result = train(text, run, steps=4, profile="2:3", progress="plain")
    folder = run / "profiles" / "step-2"
    shown = capsys.readouterr().out
    assert "steps 2 to 3, mesh data=2,fsdp=2,tensor=2" in shown
    assert str(folder / TRACE) in shown
    (event,) = profiles(run)
    assert (event["first_step"], event["step"], event["plan"]) == (2, 3, result.plan.digest)
    assert event["folder"] == "profiles/step-2"
    found = json.loads((folder / SUMMARY).read_text())
    assert found["num_devices"] == 8
    assert sum(event["parts_s"].values()) == pytest.approx(found["step_time_s"])
    assert {"attention", "feed-forward", "memory", "head", "optimizer"} <= event["parts_s"].keys()
    assert {"tensor", "fsdp", "data"} <= event["parts_s"].keys()
    assert any(each["source"] for each in found["operations"])
    assert event["memory_bytes"] == found["memory"]["parts"]
    state = [event[name][part] for name in ("memory_bytes", "predicted_bytes") for part in STATE]
    assert state[:2] == pytest.approx(state[2:], rel=0.02)
    assert event["memory_bytes"]["activations"] > 0
    assert sum(event["memory_bytes"].values()) == pytest.approx(event["allocated_bytes"], rel=0.05)
    assert gzip.decompress((folder / PROGRAM).read_bytes()).startswith(b"HloModule jit_train")
    assert (folder / MEMORY).stat().st_size
    assert list((folder / TRACE).rglob("*.trace.json.gz"))
    assert 'id="profiles"' in run_report(run)
    told = run_in_process("profile", run)
    assert "operations that take longest" in told.stdout
    assert "largest arrays when a step needs most" in told.stdout
    assert json.loads(run_in_process("profile", run, "--step", 2, "--json").stdout) == found
    refused = run_in_process("profile", run, "--step", 7)
    assert refused.returncode == 2
    assert "choose one that begins at step 2" in refused.stderr

    losses = [record.loss for record in result.history]
    plain = train(text, tmp_path / "plain", steps=4, progress="none")
    assert [record.loss for record in plain.history] == losses, "a trace changes nothing"
    assert "has no profile" in run_in_process("profile", tmp_path / "plain").stderr
    assert "there is no run with a profile" in run_in_process("profile", tmp_path / "no").stderr

    # It is asked for once: what is resumed goes on without.
    assert Config.from_json((run / "config.json").read_text()).log.profile is None
    train(None, run, resume=True, steps=6, profile="1:2", progress="plain")
    assert "step 4 is done, so --profile 1:2 traces nothing" in capsys.readouterr().out
    train(None, run, resume=True, steps=8, profile="5:7", progress="none")
    assert [(event["first_step"], event["step"]) for event in profiles(run)] == [(2, 3), (7, 7)]


def test_a_run_that_is_stopped_has_a_profile_of_what_it_did(text, tmp_path):
    class Stops(Callback):
        def on_start(self, run):
            self.stop = run.stop

        def on_step(self, record):
            if record.step == 3:
                self.stop()

    run = tmp_path / "run"
    result = train(text, run, steps=9, profile="2:8", progress="none", callbacks=[Stops()])
    assert result.reason == "interrupt"
    (event,) = profiles(run)
    assert (event["first_step"], event["step"]) == (2, result.history[-1].step)


def test_a_profiler_that_fails_ends_no_run(text, tmp_path, capfd, monkeypatch):
    def no_trace(*_, **__):
        raise RuntimeError("Only one profile may be run at a time.")

    monkeypatch.setattr(jax.profiler, "start_trace", no_trace)
    result = train(text, tmp_path / "run", steps=4, profile="2:3", progress="none")
    assert result.reason == "done"
    said = capfd.readouterr().err
    assert "the profile has failed (start: RuntimeError: Only one profile" in said
    assert not profiles(tmp_path / "run")


@pytest.mark.parametrize("steps", ["5:2", "0:3", "ten", "3:", "-1:4", "1:2:3"])
def test_steps_to_profile_are_a_first_and_a_last_one(steps):
    with pytest.raises(ConfigError, match="FIRST:LAST, such as 10:15"):
        LogConfig(profile=steps)
    with pytest.raises(ConfigError, match="profile with --control off"):
        Config(control="auto", log=LogConfig(profile="10:15"))
    with pytest.raises(ConfigError, match="the run has 9 steps"):
        Config(steps=9, log=LogConfig(profile="10:15"))
    assert LogConfig(profile="7").profiled_steps == (7, 7)


def test_the_command_for_models_has_another_name():
    refused = run_in_process("profile", "--model", "gpt2-nano", "--data", "stdlib")
    assert refused.returncode == 2
    assert "summary.py --model gpt2-nano --data stdlib" in refused.stderr
