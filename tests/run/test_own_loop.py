"""A run whose loop is its user's: the same steps, files and ends as with `train`."""

import json
import os
import signal

import numpy as np
import pytest
from helpers import F32_RELATIVE
from shared_programs import shared_programs  # noqa: F401

import optimus_jax
from optimus_jax.data.batch import synthetic_batch
from optimus_jax.errors import ConfigError, LearningError, PlanError
from optimus_jax.run.mesh_changes import WHY
from optimus_jax.run_directory.directory import RunDirectory
from optimus_jax.training.callbacks import Callback

OPTIONS = {
    "model.num_layers": 2,
    "model.embed_dim": 32,
    "model.mlp_dim": 64,
    "seq_len": 32,
    "global_batch": 8,
    "mesh": "data=2,fsdp=2,tensor=2",
    "evaluation.examples": 8,
    "progress": "none",
    "control": "off",
}


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("to be or not to be, that is the question. " * 100)
    return str(path)


def begin(text, run_dir, model="gpt2-nano", **more):
    return optimus_jax.training_loop(model, data=text, run_dir=run_dir, **OPTIONS | more)


def events(run_dir, name):
    return [event for event in RunDirectory(run_dir).events() if event["event"] == name]


def test_it_takes_the_steps_of_train_and_goes_on_with_either(text, tmp_path):
    whole = optimus_jax.train(
        "gpt2-nano", data=text, run_dir=tmp_path / "whole", steps=6, eval_every=3, **OPTIONS
    )
    losses, run = [], tmp_path / "run"
    with begin(text, run, steps=4, eval_every=3, **{"optimizer.decay_steps": 6}) as loop:
        assert (loop.steps_done, loop.plan, loop.run_dir) == (0, whole.plan, run)
        for batch in loop:
            assert batch["tokens"].shape == (8, 32)
            losses.append(loop.step(batch)["loss"])
            if loop.steps_done == 3:
                measured = loop.evaluate()
                loop.save()
        assert loop.is_stopping
        assert int(loop.state.step) == 4
    assert [event["step"] for event in events(run, "checkpoint")] == [3, 4]
    assert [event["reason"] for event in events(run, "end")] == ["done"]
    assert [(event["step"], event["loss"]) for event in events(run, "eval")] == [(3, measured.loss)]
    assert measured.loss == events(tmp_path / "whole", "eval")[0]["loss"]

    again = optimus_jax.train(run_dir=run, resume=True, steps=5, progress="none")
    with optimus_jax.training_loop(run_dir=run, resume=True, steps=6, progress="none") as loop:
        for batch in loop:
            losses.append(loop.step(batch)["loss"])
    recorded = [record.loss for record in RunDirectory(run).metrics()]
    assert recorded == [record.loss for record in whole.history]
    assert [float(loss) for loss in losses] == [*recorded[:4], recorded[5]]
    assert again.history[-1].step == 5


def test_batches_of_another_loader_and_what_it_does_not_do(text, tmp_path):
    with begin(text, tmp_path / "run", steps=3, eval_every=0, profile="2:3") as loop:
        while not loop.is_stopping:
            batch = synthetic_batch(vocab_size=250, rows=8, seq_len=32, seed=loop.steps_done)
            metrics = loop.step(batch)
            assert int(metrics["tokens"]) == 8 * 32
        with pytest.raises(ConfigError, match="the run has no more steps"):
            loop.step(batch)
    assert (loop.reason, loop.exit_code) == ("done", 0)
    with pytest.raises(ConfigError, match="the run is over"):
        loop.save()
    with begin(text, tmp_path / "other", steps=3, eval_every=0) as loop:
        loop.step(batch)
        wrong = {**batch, "tokens": batch["tokens"].astype(np.int64), "ids": batch["examples"]}
        del wrong["segments"]
        told = r"tokens: int64 \[8, 32\](.|\n)*segments: missing(.|\n)*ids: leave it out"
        with pytest.raises(ConfigError, match=told):
            loop.step(wrong)
        with pytest.raises(ConfigError, match="the run holds nothing out"):
            loop.evaluate()
    assert [event["first_step"] for event in events(tmp_path / "run", "profile")] == [2]
    refused = {
        "control": "advise",
        "phases": "2:16",
        "checkpoint.snapshot_every": 2,
    }
    for name, value in refused.items():
        with (
            pytest.raises(ConfigError, match=r"by itself(.|\n)*use optimus_jax.train"),
            begin(text, tmp_path / "refused", steps=3, **{name: value}),
        ):
            raise AssertionError("it has begun")
    assert not (tmp_path / "refused").exists()


def learn(text, run, after, **more):
    """Run a loop that calls `after` with itself after every step."""
    with begin(text, run, eval_every=0, **more) as loop:
        for batch in loop:
            loop.step(batch)
            after(loop)


def test_a_batch_cannot_be_left_out(text, tmp_path):
    def leave_one_out(loop):
        batches = iter(loop)
        next(batches)
        next(batches)

    with pytest.raises(ConfigError, match=r"the batch of step 2, and 1 steps are done"):
        learn(text, tmp_path / "run", leave_one_out, steps=4)


class Told(Callback):
    def on_end(self, step, reason):
        self.ended = step, reason


def test_an_error_in_the_loop_costs_no_step(text, tmp_path):
    def fail(loop):
        if loop.steps_done == 2:
            raise ZeroDivisionError

    told, run = Told(), tmp_path / "run"
    with pytest.raises(ZeroDivisionError):
        learn(text, run, fail, steps=4, callbacks=[told])
    assert told.ended == (2, "error")
    (end,) = events(run, "end")
    assert (end["step"], end["reason"], end["why"]) == (2, "error", "ZeroDivisionError")
    with optimus_jax.training_loop(run_dir=run, resume=True, progress="none") as loop:
        assert loop.steps_done == 2, "the state was saved"


def test_a_loop_that_is_left_early_was_interrupted(text, tmp_path):
    with begin(text, tmp_path / "run", steps=9, eval_every=0) as loop:
        for batch in loop:
            loop.step(batch)
            if loop.steps_done == 2:
                break
    assert loop.reason == "interrupt"
    assert [event["reason"] for event in events(tmp_path / "run", "end")] == ["interrupt"]

    def leave(loop):
        if loop.steps_done == 3:
            raise SystemExit(5)

    told = Told()
    with pytest.raises(SystemExit) as left:
        learn(text, tmp_path / "left", leave, steps=9, callbacks=[told])
    assert left.value.code == 5
    assert told.ended == (3, "interrupt")
    assert [event["step"] for event in events(tmp_path / "left", "checkpoint")] == [3]


def test_a_signal_ends_the_loop_after_the_step(text, tmp_path, capfd):
    before = signal.getsignal(signal.SIGINT)
    with begin(text, tmp_path / "run", steps=9, eval_every=0) as loop:
        for batch in loop:
            loop.step(batch)
            if loop.steps_done == 3:
                os.kill(os.getpid(), signal.SIGINT)
    assert loop.steps_done == 3
    assert signal.getsignal(signal.SIGINT) is before
    assert [event["reason"] for event in events(tmp_path / "run", "end")] == ["interrupt"]
    assert "saved first" in capfd.readouterr().err


def test_a_run_that_no_longer_learns_ends(text, tmp_path):
    more = {"optimizer.max_skipped_steps": 2, "lr": 1e30, "optimizer.clip_norm": 0.0}
    with pytest.raises(LearningError):
        learn(text, tmp_path / "run", lambda loop: None, steps=40, **more)
    assert len(RunDirectory(tmp_path / "run").metrics()) < 40


def test_a_loop_moves_to_another_mesh_and_back(text, tmp_path):
    options = {"steps": 7, "eval_every": 3, "model.dropout": 0.1, "optimizer.decay_steps": 7}
    whole = optimus_jax.train(
        "gpt2-nano", data=text, run_dir=tmp_path / "whole", **OPTIONS | options
    )
    run, plans = tmp_path / "run", []
    with begin(text, run, **options) as loop:
        first = loop.plan
        for batch in loop:
            if loop.steps_done == 1:
                with pytest.raises(ConfigError, match=r"not learnt yet(.|\n)*loop\.step"):
                    loop.remesh("fsdp=8")
            loop.step(batch)
            plans.append(loop.plan)
            if loop.steps_done == 2:
                assert loop.remesh("pipe=2,fsdp=4", zero=1, microbatches=2) == loop.plan
                assert (str(loop.plan.axes), loop.plan.zero) == ("pipe=2,fsdp=4", 1)
                measured = loop.evaluate()
            if loop.steps_done == 4:
                for wrong, error in (("fsdp=5", PlanError), ("data=3", PlanError)):
                    with pytest.raises(error):
                        loop.remesh(wrong)
                with pytest.raises(ConfigError, match=r"nothing else(.|\n)*optimizer\.lr"):
                    loop.remesh("fsdp=8", lr=1.0)
                moved = loop.plan
                loop.remesh(str(first.axes))
            if loop.steps_done == 5:
                break
        for _ in loop:
            break  # the batch is not learnt, and given again
        assert loop.remesh(str(first.axes)) == first
    assert plans == [first, first, moved, moved, first]
    assert moved != first
    moves = events(run, "remesh")
    assert [(event["step"], event["plan"]) for event in moves] == [
        (2, moved.digest),
        (4, first.digest),
    ]
    assert all(event["bytes_moved"] > 0 for event in moves)
    assert all(event["step_delay_s"] > event["phases_s"]["wait"] > 0 for event in moves)
    assert [event["step"] for event in events(run, "compile")] == [0, 2, 4]
    records = [json.loads(line) for line in (run / "switches.jsonl").read_text().splitlines()]
    assert [record["why"] for record in records if "by_choice" in record] == [WHY, WHY]
    assert not any(record.get("by_choice") for record in records)
    assert measured.loss > 0
    optimus_jax.train(run_dir=run, resume=True, progress="none")
    losses = [
        [record.loss for record in RunDirectory(path).metrics()] for path in (run, whole.run_dir)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=F32_RELATIVE)
    assert losses[0][:2] == losses[1][:2]
