"""Stopping and going on: bit for bit on the same mesh, within rounding on another, whatever stopped the run."""

import json
import os
import shutil
import signal

import pytest
from helpers import F32_RELATIVE

import optimus_jax
from optimus_jax.errors import CheckpointError, ConfigError, OptimusError
from optimus_jax.training.display import Display
from optimus_jax.training.stopping import EXIT_RESTART

STEPS = 7
TINY = {
    "steps": STEPS, "global_batch": 8, "seq_len": 32, "lr": 1e-2, "eval_every": 0, "progress": "none",
    "model.num_layers": 2, "model.embed_dim": 32, "model.num_heads": 4, "model.num_kv_heads": 4, "model.head_dim": 8,
    "model.mlp_dim": 64, "model.dropout": 0.1}


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_text("".join(f"{n} bottles of beer on the wall, take {n % 7} down and pass them around.\n" for n in range(300)))
    return str(path)


@pytest.fixture(scope="session")
def uninterrupted(text, tmp_path_factory):
    """Losses of every step of a run that nothing disturbed, and its directory."""
    run_dir = tmp_path_factory.mktemp("runs") / "whole"
    result = optimus_jax.train("gpt2-nano", run_dir=run_dir, data=text, mesh="data=2,fsdp=2,tensor=2", **TINY)
    assert result.reason == "done"
    return losses(result), run_dir


def losses(result):
    history = result.history
    assert [record.step for record in history] == list(range(1, len(history) + 1)), "each step once, in order"
    return [record.loss for record in history]


@pytest.fixture
def stop_at(monkeypatch):
    """Make a run get a signal while step `step` is shown."""
    def arrange(step, number):
        def show(self, record):
            if record.step == step:
                os.kill(os.getpid(), number)
        monkeypatch.setattr(Display, "step", show)
    return arrange


def test_a_resumed_run_is_bit_identical(uninterrupted, text, tmp_path, stop_at, monkeypatch):
    stop_at(3, signal.SIGTERM)
    stopped = optimus_jax.train("gpt2-nano", run_dir=tmp_path / "run", data=text, mesh="data=2,fsdp=2,tensor=2", **TINY)
    assert stopped.reason == "terminate"
    assert stopped.exit_code == EXIT_RESTART
    assert 3 <= len(stopped.history) < STEPS
    monkeypatch.undo()
    resumed = optimus_jax.train(run_dir=tmp_path / "run", resume=True)
    assert losses(resumed) == uninterrupted[0]


@pytest.mark.parametrize("mesh", ["tensor=4,data=2", "fsdp=8"])
def test_a_run_resumed_on_another_mesh_agrees(uninterrupted, text, tmp_path, stop_at, monkeypatch, mesh):
    stop_at(3, signal.SIGINT)
    stopped = optimus_jax.train("gpt2-nano", run_dir=tmp_path / "run", data=text, mesh="data=2,fsdp=2,tensor=2", **TINY)
    assert (stopped.reason, stopped.exit_code) == ("interrupt", 0)
    monkeypatch.undo()
    resumed = optimus_jax.train(run_dir=tmp_path / "run", resume=True, mesh=mesh)
    assert resumed.plan.axes != stopped.plan.axes
    assert losses(resumed) == pytest.approx(uninterrupted[0], rel=F32_RELATIVE)
    assert losses(resumed)[:len(stopped.history)] == uninterrupted[0][:len(stopped.history)]


def test_steps_run_again_after_a_crash_are_not_written_twice(uninterrupted, tmp_path):
    """A crash loses what came after the newest checkpoint; metrics of those steps are already there."""
    losses_before, run_dir = uninterrupted
    crashed = tmp_path / "crashed"
    shutil.copytree(run_dir, crashed)
    shutil.rmtree(crashed / "checkpoints")
    lines = (crashed / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (crashed / "metrics.jsonl").write_bytes(b"".join(lines[:4]) + lines[4][:20])
    resumed = optimus_jax.train(run_dir=crashed, resume=True)
    assert losses(resumed) == losses_before


def test_a_damaged_newest_checkpoint_is_passed_over(uninterrupted, text, tmp_path, capsys):
    run_dir = tmp_path / "run"
    optimus_jax.train("gpt2-nano", run_dir=run_dir, data=text, mesh="data=2,fsdp=2,tensor=2",
                      **TINY | {"checkpoint_every": 3, "progress": "plain"})
    newest = run_dir / "checkpoints" / str(STEPS)
    for path in newest.rglob("*"):
        if path.is_file():
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    capsys.readouterr()
    resumed = optimus_jax.train(run_dir=run_dir, resume=True)
    assert f"checkpoint of step {STEPS} is damaged" in capsys.readouterr().out
    assert losses(resumed) == uninterrupted[0]


def test_events_tell_the_story(uninterrupted):
    events = [json.loads(line) for line in (uninterrupted[1] / "events.jsonl").read_text().splitlines()]
    assert [event["event"] for event in events] == ["start", "plan", "compile", "checkpoint", "end"]
    assert events[-1]["reason"] == "done"


def test_a_run_is_not_overwritten(uninterrupted, text):
    before = (uninterrupted[1] / "metrics.jsonl").read_bytes()
    with pytest.raises(ConfigError, match=r"never overwritten[\s\S]*--resume"):
        optimus_jax.train("gpt2-nano", run_dir=uninterrupted[1], data=text, **TINY)
    assert (uninterrupted[1] / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize(("change", "error", "message"), [
    ({"seed": 1}, ConfigError, "keeps its model, data and seed"),
    ({"global_batch": 16}, ConfigError, "data.global_batch"),
    ({"model": "llama-nano"}, ConfigError, "changes to model"),
    ({"mesh": "data=3"}, OptimusError, "needs 3 devices; this run has 8"),
])
def test_what_a_resumed_run_refuses(uninterrupted, change, error, message):
    with pytest.raises(error, match=message):
        optimus_jax.train(run_dir=uninterrupted[1], resume=True, **change)


def test_a_change_of_precision_begins_with_its_own_loss_scale(text, tmp_path, capsys):
    run_dir, small = tmp_path / "run", TINY | {"model.num_layers": 1, "progress": "plain", "precision.loss_scale": 1024}
    in_f16 = optimus_jax.train("gpt2-nano", run_dir=run_dir, data=text, precision="f16", **small | {"steps": 2})
    assert float(in_f16.state.loss_scale.scale) == 1024
    capsys.readouterr()
    in_f32 = optimus_jax.train(run_dir=run_dir, resume=True, precision="f32", steps=3)
    assert "precision was f16 and is f32: the loss scale begins anew, at 1" in capsys.readouterr().out
    assert float(in_f32.state.loss_scale.scale) == 1
    again = optimus_jax.train(run_dir=run_dir, resume=True, precision="f16", steps=4)
    assert float(again.state.loss_scale.scale) == 1024
    assert [record.loss_scale for record in again.history] == [1024, 1024, None, 1024]
    assert max(losses(again)) < 7, "entropy of bytes, not a multiple of it"


def test_a_checkpoint_of_another_model_is_refused(uninterrupted, text, tmp_path):
    run_dir = tmp_path / "other"
    shutil.copytree(uninterrupted[1], run_dir)
    config = json.loads((run_dir / "config.json").read_text())
    config["model"]["mlp_dim"] = 128
    (run_dir / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="of another model"):
        optimus_jax.train(run_dir=run_dir, resume=True)
