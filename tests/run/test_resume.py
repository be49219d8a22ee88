"""Stopping and resuming: bit for bit on the same mesh, within rounding on another, whatever stopped
the run.
"""

import contextlib
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest
from helpers import F32_RELATIVE, fitted, host_leaves
from plans import in_order, make_plan
from quick_flags import QUICK_FLAGS
from shared_programs import own_programs, shared_programs  # noqa: F401

import optimus_jax
from optimus_jax.checkpoint.checkpoints import Checkpoints
from optimus_jax.cluster.launch_detection import Launch
from optimus_jax.config import CheckpointConfig, Config
from optimus_jax.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    FaultError,
    LearningError,
    OptimusError,
    PlanError,
    RunDirectoryError,
)
from optimus_jax.faults.stopping import EXIT_RESTART
from optimus_jax.inference.loading import load_text_model
from optimus_jax.mesh.topology import Topology
from optimus_jax.planning.ahead_of_time import compiled_step
from optimus_jax.reshard.restack import is_stacked
from optimus_jax.run import open_directory
from optimus_jax.run.first_plan import for_available_devices
from optimus_jax.run_directory import directory as run_directory
from optimus_jax.run_directory.directory import RunDirectory
from optimus_jax.training.state import (
    abstract_stored_state,
    from_stored,
    to_stored,
)
from optimus_jax.training.step import build_program
from optimus_jax.training.watchers import Display

STEPS = 7
TINY = {
    "steps": STEPS,
    "global_batch": 8,
    "seq_len": 32,
    "lr": 1e-2,
    "eval_every": 0,
    "progress": "none",
    "model.num_layers": 2,
    "model.embed_dim": 32,
    "model.num_heads": 4,
    "model.num_kv_heads": 4,
    "model.head_dim": 8,
    "model.mlp_dim": 64,
    "model.dropout": 0.1,
}


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_text(
        "".join(
            f"{n} bottles of beer on the wall, take {n % 7} down and pass them around.\n"
            for n in range(300)
        )
    )
    return str(path)


def test_a_resume_uses_and_records_settings_edited_in_the_config(
    uninterrupted, text, tmp_path, monkeypatch
):
    """The old values come from the checkpoint. Edited are derived values and a setting itself."""
    messages: list[str] = []
    monkeypatch.setattr(Display, "message", lambda self, message: messages.append(message))
    run_dir = shutil.copytree(uninterrupted[1], tmp_path / "run")
    config = json.loads((run_dir / "config.json").read_text())
    config["derived"] |= {"precision.compute": "bf16", "optimizer.decay_steps": 100}
    config["optimizer"] |= {"lr": 0.5, "weight_decay": 0.25}
    (run_dir / "config.json").write_text(json.dumps(config))
    result = optimus_jax.train(run_dir=run_dir, resume=True, steps=STEPS + 1)
    assert result.plan.precision == "bf16"
    changed = next(message for message in messages if message.startswith("changed since"))
    for name, before, now in (
        ("optimizer.lr", 0.01, 0.5),
        ("optimizer.weight_decay", 0.1, 0.25),
        ("precision.compute", "f32", "bf16"),
    ):
        assert f"{name} from {before} to {now}" in changed
    assert not any("as at the start of the run" in message for message in messages)
    saved = Checkpoints(run_dir / "checkpoints", CheckpointConfig()).latest()
    assert saved is not None
    recorded = json.loads(saved.metadata["config"])
    assert (
        recorded["precision"]["compute"]
        == json.loads(saved.metadata["plan"])["precision"]
        == "bf16"
    )
    resumed = RunDirectory(run_dir, writer=False).events()
    assert next(event for event in resumed if event["event"] == "resume")[
        "lr_before"
    ] == pytest.approx(1e-3)


LAYERS_IN_STAGES = 9
"""A layer for every virtual stage of pipe=4 interleaved, and one more: no pipe size
divides them.
"""


@pytest.fixture(scope="module")
def uninterrupted(text, tmp_path_factory):
    """Losses of every step of an undisturbed run, and its directory."""
    run_dir = tmp_path_factory.mktemp("runs") / "whole"
    result = optimus_jax.train(
        "gpt2-nano", run_dir=run_dir, data=text, mesh="data=2,fsdp=2,tensor=2", **TINY
    )
    assert result.reason == "done"
    return losses(result), run_dir


def losses(result):
    history = result.history
    assert [record.step for record in history] == list(range(1, len(history) + 1)), (
        "each step once, in order"
    )
    return [record.loss for record in history]


@pytest.fixture(scope="module")
def pipelined_run(text, tmp_path_factory):
    """A run with two pipeline stages of different numbers of layers."""
    result = optimus_jax.train(
        "gpt2-nano",
        run_dir=tmp_path_factory.mktemp("runs") / "staged",
        data=text,
        mesh="pipe=2,data=2,tensor=2",
        **TINY | {"model.num_layers": LAYERS_IN_STAGES, "checkpoint_every": STEPS - 3},
    )
    assert result.plan.pipeline.layers_per_stage == (4, 5)
    return result


@pytest.fixture
def crashed(pipelined_run, tmp_path):
    """The same run as if killed before its last checkpoint was written."""
    run_dir = shutil.copytree(pipelined_run.run_dir, tmp_path / "run")
    shutil.rmtree(run_dir / "checkpoints" / str(STEPS))
    return run_dir


@pytest.fixture
def stop_at(monkeypatch):
    """Send a run a signal while step `step` is shown."""

    def arrange(step, number):
        def show(self, record):
            if record.step == step:
                os.kill(os.getpid(), number)

        monkeypatch.setattr(Display, "step", show)

    return arrange


@pytest.mark.usefixtures("own_programs")
def test_a_resumed_run_is_bit_identical(uninterrupted, text, tmp_path, stop_at, monkeypatch):
    stop_at(3, signal.SIGTERM)
    stopped = optimus_jax.train(
        "gpt2-nano", run_dir=tmp_path / "run", data=text, mesh="data=2,fsdp=2,tensor=2", **TINY
    )
    assert stopped.reason == "terminate"
    assert stopped.exit_code == EXIT_RESTART
    assert 3 <= len(stopped.history) < STEPS
    monkeypatch.undo()
    resumed = optimus_jax.train(run_dir=tmp_path / "run", resume=True)
    assert losses(resumed) == uninterrupted[0]


@pytest.mark.parametrize("mesh", ["tensor=4,data=2", "fsdp=8"])
def test_a_run_resumed_on_another_mesh_agrees_within_rounding(
    uninterrupted, text, tmp_path, stop_at, monkeypatch, mesh
):
    stop_at(3, signal.SIGINT)
    stopped = optimus_jax.train(
        "gpt2-nano", run_dir=tmp_path / "run", data=text, mesh="data=2,fsdp=2,tensor=2", **TINY
    )
    assert (stopped.reason, stopped.exit_code) == ("interrupt", 0)
    monkeypatch.undo()
    resumed = optimus_jax.train(run_dir=tmp_path / "run", resume=True, mesh=mesh)
    assert resumed.plan.axes != stopped.plan.axes
    assert losses(resumed) == pytest.approx(uninterrupted[0], rel=F32_RELATIVE)
    assert losses(resumed)[: len(stopped.history)] == uninterrupted[0][: len(stopped.history)]


def test_steps_repeated_after_a_crash_are_recorded_once(uninterrupted, tmp_path):
    """A crash loses the steps after the newest checkpoint, whose metrics are already recorded."""
    losses_before, run_dir = uninterrupted
    crashed = tmp_path / "crashed"
    shutil.copytree(run_dir, crashed)
    shutil.rmtree(crashed / "checkpoints")
    lines = (crashed / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (crashed / "metrics.jsonl").write_bytes(b"".join(lines[:4]) + lines[4][:20])
    resumed = optimus_jax.train(run_dir=crashed, resume=True)
    assert losses(resumed) == losses_before
    abandoned = (crashed / "metrics.abandoned.jsonl").read_bytes()
    assert abandoned == b"".join(lines[:4]), "what the run went back behind is kept"


def test_after_going_back_only_steps_of_the_new_course_count(uninterrupted, tmp_path):
    run_dir = tmp_path / "run"
    shutil.copytree(uninterrupted[1], run_dir)
    shutil.rmtree(run_dir / "checkpoints")
    again = optimus_jax.train(run_dir=run_dir, resume=True, steps=2, lr=1e-3)
    assert [record.lr for record in again.history] == [pytest.approx(1e-3), pytest.approx(1e-4)]
    assert len((run_dir / "metrics.abandoned.jsonl").read_bytes().splitlines()) == STEPS


def test_fewer_steps_than_already_done_are_refused(uninterrupted, tmp_path):
    run_dir = tmp_path / "run"
    shutil.copytree(uninterrupted[1], run_dir)
    before = {path: path.read_bytes() for path in run_dir.iterdir() if path.is_file()}
    with pytest.raises(ConfigError, match=f"has already finished step {STEPS}(.|\\n)*--steps 3"):
        optimus_jax.train(run_dir=run_dir, resume=True, steps=3)
    assert {path: path.read_bytes() for path in before} == before


def test_a_run_directory_is_locked_by_one_process(uninterrupted):
    with (
        contextlib.closing(RunDirectory.resume(uninterrupted[1])),
        pytest.raises(RunDirectoryError, match=f"process {os.getpid()} on "),
    ):
        optimus_jax.train(run_dir=uninterrupted[1], resume=True)


BY_ENGINE = pytest.mark.parametrize(
    ("launcher", "is_repeated", "is_fault"),
    [
        ("SLURM", True, True),
        ("environment", True, True),
        ("SLURM", False, False),
        ("flags", True, False),
    ],
)
"""Launchers that restart jobs and others, and whether `--resume auto` was given."""


@BY_ENGINE
@pytest.mark.parametrize("is_begun", [True, False])
def test_a_lock_is_a_fault_where_the_launcher_restarts_jobs(
    uninterrupted, tmp_path, monkeypatch, launcher, is_repeated, is_fault, is_begun
):
    """The lock may belong to a process of the last start that is about to exit, or that died with
    its host.
    """
    monkeypatch.setattr(open_directory, "PATIENCE_S", 0.0)
    run_dir, launch = (
        uninterrupted[1] if is_begun else tmp_path,
        Launch(launcher=launcher, why="", restarts=launcher != "flags"),
    )
    holder = RunDirectory.resume(run_dir) if is_begun else RunDirectory.create(run_dir, "gpt2-nano")
    with (
        contextlib.closing(holder),
        pytest.raises(
            FaultError if is_fault else RunDirectoryError, match=f"process {os.getpid()} on "
        ),
    ):
        open_directory.open_as_writer(
            (
                partial(RunDirectory.resume, run_dir)
                if is_begun
                else partial(RunDirectory.create, run_dir, "gpt2-nano")
            ),
            launch,
            is_repeated,
        )


@BY_ENGINE
def test_a_run_created_meanwhile_is_a_fault_where_jobs_restart(
    uninterrupted, launcher, is_repeated, is_fault
):
    with pytest.raises(FaultError if is_fault else ConfigError, match="already holds a run"):
        open_directory.new_directory(
            uninterrupted[1],
            Config(),
            Launch(launcher=launcher, why="", restarts=launcher != "flags"),
            Display(),
            is_repeated,
        )


def test_changed_data_is_refused_unless_allowed(text, tmp_path, capsys):
    data, run_dir = tmp_path / "text.txt", tmp_path / "run"
    shutil.copyfile(text, data)
    small = TINY | {"model.num_layers": 1, "progress": "plain"}
    optimus_jax.train("gpt2-nano", run_dir=run_dir, data=data, **small | {"steps": 1})
    data.write_text(data.read_text().replace("beer", "cola"))
    with pytest.raises(
        DataError,
        match=(
            r"not what this run was trained on(.|\n)*content was \w+ and is"
            r" \w+(.|\n)*data.allow_change=true"
        ),
    ):
        optimus_jax.train(run_dir=run_dir, resume=True, steps=2)
    optimus_jax.train(run_dir=run_dir, resume=True, steps=2, **{"data.allow_change": True})
    assert "the data has changed" in capsys.readouterr().out
    # from here on the new data belongs to the run
    optimus_jax.train(run_dir=run_dir, resume=True, steps=3)
    shutil.copyfile(text, data)
    with pytest.raises(DataError, match="not what this run was trained on"):
        optimus_jax.train(run_dir=run_dir, resume=True, steps=4)


def test_a_metrics_file_that_cannot_be_written_keeps_the_state(text, tmp_path, monkeypatch):
    run_dir, plain = tmp_path / "run", run_directory.append

    def full(path, lines):
        if path.name == "metrics.jsonl" and b'"step": 2' in lines:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        plain(path, lines)

    monkeypatch.setattr(run_directory, "append", full)
    with pytest.raises(
        RunDirectoryError,
        match=r"metrics\.jsonl of the run cannot be read or written: No space left",
    ):
        optimus_jax.train("gpt2-nano", run_dir=run_dir, data=text, **TINY | {"model.num_layers": 1})
    saved = [int(path.name) for path in (run_dir / "checkpoints").iterdir()]
    assert saved == [TINY["steps"]], "the run continues to its end, and its state is saved"
    monkeypatch.undo()
    resumed = optimus_jax.train(run_dir=run_dir, resume=True, steps=TINY["steps"] + 1)
    assert resumed.history[-1].step == TINY["steps"] + 1


@pytest.mark.parametrize("problem", ["data", "tracker"])
def test_a_failed_start_leaves_no_files(text, tmp_path, monkeypatch, problem):
    if problem == "data":
        settings = TINY | {"data": tmp_path / "missing.txt"}
    else:
        settings = TINY | {"data": text, "log": "tensorboard"}
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(OptimusError, match=r"no such data file|pip install"):
        optimus_jax.train("gpt2-nano", run_dir=tmp_path / "run", **settings)
    assert not list(tmp_path.iterdir())


def test_a_program_too_large_for_the_device_leaves_no_files(text, tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise PlanError("too large")

    monkeypatch.setattr(compiled_step, "compile_step", refuse)
    with pytest.raises(PlanError, match="too large"):
        optimus_jax.train("gpt2-nano", run_dir=tmp_path / "run", data=text, **TINY)
    assert not list(tmp_path.iterdir())


def test_the_config_file_records_derived_values(uninterrupted):
    derived = json.loads((uninterrupted[1] / "config.json").read_text())["derived"]
    assert derived["optimizer.warmup_steps"] == 1
    assert derived["parallel.zero"] == 3
    assert derived["parallel.mesh"] == "data=2,fsdp=2,tensor=2"


def test_an_extended_run_keeps_its_warmup_and_decay(uninterrupted, tmp_path, capsys):
    run_dir = shutil.copytree(uninterrupted[1], tmp_path / "run")
    extended = optimus_jax.train(run_dir=run_dir, resume=True, steps=STEPS + 2, progress="plain")
    assert [record.lr for record in extended.history[STEPS - 1 :]] == [pytest.approx(1e-3)] * 3
    shown = capsys.readouterr().out
    assert (
        f"before 0.001 (step {STEPS}), now 0.001 (step {STEPS + 1}), at the end 0.001 (step"
        f" {STEPS + 2})" in shown
    )
    assert f"--set optimizer.decay_steps={STEPS + 2}" in shown
    config = json.loads((run_dir / "config.json").read_text())
    assert (
        config["steps"],
        config["optimizer"]["decay_steps"],
        config["derived"]["optimizer.decay_steps"],
    ) == (STEPS + 2, None, STEPS)
    events = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    (resume,) = [event for event in events if event["event"] == "resume"]
    assert resume["lr_end"] == pytest.approx(1e-3)
    changed = {name: values for name, values in resume["settings"].items() if "log." not in name}
    assert changed == {"steps": [STEPS, STEPS + 2]}


def test_a_damaged_newest_checkpoint_is_set_aside(uninterrupted, text, tmp_path, capsys):
    run_dir = tmp_path / "run"
    optimus_jax.train(
        "gpt2-nano",
        run_dir=run_dir,
        data=text,
        mesh="data=2,fsdp=2,tensor=2",
        **TINY | {"checkpoint_every": 3, "progress": "plain"},
    )
    newest = run_dir / "checkpoints" / str(STEPS)
    for path in newest.rglob("*"):
        if path.is_file():
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    capsys.readouterr()
    resumed = optimus_jax.train(run_dir=run_dir, resume=True)
    shown = capsys.readouterr().out
    assert f"checkpoint of step {STEPS} is damaged" in shown
    assert losses(resumed) == uninterrupted[0]
    aside = run_dir / "damaged" / str(STEPS)
    assert f"was moved to {aside}" in shown
    assert aside.is_dir(), "set aside, not deleted"
    assert newest.is_dir(), "saved anew"


def test_resume_auto_starts_and_resumes_with_the_same_arguments(
    uninterrupted, text, tmp_path, stop_at, monkeypatch
):
    arguments = {
        "run_dir": tmp_path / "run",
        "data": text,
        "mesh": "data=2,fsdp=2,tensor=2",
        "resume": "auto",
        **TINY,
    }
    stop_at(3, signal.SIGTERM)
    stopped = optimus_jax.train("gpt2-nano", **arguments)
    assert stopped.exit_code == EXIT_RESTART
    monkeypatch.undo()
    resumed = optimus_jax.train("gpt2-nano", **arguments)
    assert losses(resumed) == uninterrupted[0]
    with pytest.raises(ConfigError, match=r"another model, data or seed\n.*changes to seed"):
        optimus_jax.train("gpt2-nano", **arguments | {"seed": 1})


def test_resume_auto_needs_a_run_directory(text):
    with pytest.raises(ConfigError, match="--run-dir DIR"):
        optimus_jax.train("gpt2-nano", data=text, resume="auto", **TINY)


def test_a_killed_run_resumes_from_its_snapshot(uninterrupted, text, tmp_path, monkeypatch):
    class Killed(BaseException):
        """In place of SIGKILL: nothing is saved or cleaned up."""

    def die(self, record):
        if record.step == 6:
            raise Killed

    arguments = {
        "run_dir": tmp_path / "run",
        "data": text,
        "mesh": "data=2,fsdp=2,tensor=2",
        "resume": "auto",
        **TINY
        | {
            "checkpoint.snapshot_every": 2,
            "checkpoint.snapshot_dir": str(tmp_path),
            "checkpoint_every": 3,
        },
    }
    monkeypatch.setattr(Display, "step", die)
    with pytest.raises(Killed):
        optimus_jax.train("gpt2-nano", **arguments)
    monkeypatch.undo()
    (memory,) = tmp_path.glob("optimus_jax-*/*")
    assert sorted(path.name for path in memory.iterdir()) == ["2", "4"], "it dies before the next"
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "6", ignore_errors=True)
    resumed = optimus_jax.train("gpt2-nano", **arguments)
    events = [
        json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()
    ]
    assert [event["step"] for event in events if event["event"] == "resume"] == [4]
    assert losses(resumed) == uninterrupted[0]
    assert not list(tmp_path.glob("optimus_jax-*")), "the memory is given back"


def test_a_mesh_that_needs_lost_devices_is_replaced_by_the_planner():
    config = Config().with_values(
        {
            "parallel.mesh": "data=2,fsdp=2,tensor=2",
            "parallel.microbatches": 2,
            "parallel.remat": "dots",
        }
    )
    topology = Topology(
        num_devices=4, num_processes=1, platform="cpu", device_kind="cpu", bytes_per_device=None
    )
    freed = for_available_devices(config, topology).parallel
    assert (freed.mesh, freed.microbatches, freed.remat) == ("auto", None, "dots")
    assert for_available_devices(config, replace(topology, num_devices=8)) == config


@pytest.mark.usefixtures("own_programs")
def test_a_pipeline_resumed_is_bit_identical(pipelined_run, crashed):
    resumed = optimus_jax.train(run_dir=crashed, resume=True)
    assert losses(resumed) == losses(pipelined_run)
    expected = host_leaves(pipelined_run.state)
    for path, leaf in host_leaves(resumed.state).items():
        np.testing.assert_array_equal(leaf, expected[path], err_msg=path)


@pytest.mark.parametrize(
    "settings",
    [{"mesh": "data=4,tensor=2"}, {"mesh": "pipe=4,fsdp=2", "schedule": "interleaved"}],
    ids=lambda settings: settings["mesh"],
)
def test_a_pipeline_resumed_on_another_mesh_agrees(pipelined_run, crashed, settings):
    resumed = optimus_jax.train(run_dir=crashed, resume=True, **settings)
    assert resumed.plan.axes != pipelined_run.plan.axes
    assert losses(resumed) == pytest.approx(losses(pipelined_run), rel=F32_RELATIVE)


def test_a_pipeline_resumed_on_one_device_agrees(pipelined_run, crashed):
    script = (
        f"import optimus_jax; optimus_jax.train(run_dir={str(crashed)!r}, resume=True,"
        " mesh='data=1', cpu_devices=1)"
    )
    environment = os.environ | {"XLA_FLAGS": QUICK_FLAGS}
    subprocess.run([sys.executable, "-c", script], env=environment, check=True)
    found = [
        json.loads(line)["loss"] for line in (crashed / "metrics.jsonl").read_text().splitlines()
    ]
    assert found == pytest.approx(losses(pipelined_run), rel=F32_RELATIVE)


@pytest.mark.parametrize(
    ("mesh", "schedule"),
    [
        ("pipe=4,fsdp=2", "interleaved"),
        ("pipe=2", "1f1b"),
        ("data=2,tensor=2", "auto"),
        ("data=1", "auto"),
    ],
)
def test_checkpoints_move_between_pipelines_bit_for_bit(pipelined_run, tmp_path, mesh, schedule):
    """Saved under two stages, restored under another plan, saved under that, and restored under two
    stages.
    """
    here, there = program_of(pipelined_run), program_of(pipelined_run, mesh, schedule)
    state = restored_for(
        Checkpoints(pipelined_run.run_dir / "checkpoints", CheckpointConfig()), there
    )
    original = in_order(here, host_leaves(pipelined_run.state))
    for path, leaf in in_order(there, host_leaves(state)).items():
        np.testing.assert_array_equal(leaf, fitted(original[path], leaf.shape), err_msg=path)
    again = Checkpoints(tmp_path, CheckpointConfig())
    again.save(1, to_stored(state, there.shapes, there.plan, there.state_shardings), {})
    back = restored_for(again, here)
    again.close()
    expected = host_leaves(pipelined_run.state)
    for path, leaf in host_leaves(back).items():
        np.testing.assert_array_equal(leaf, expected[path], err_msg=path)


def program_of(result, mesh=None, schedule="auto"):
    """The program of a run's config, on another mesh if one is given."""
    config = Config.from_json((result.run_dir / "config.json").read_text())
    config = config.with_values(
        {"parallel.mesh": mesh or config.parallel.mesh, "parallel.schedule": schedule}
    )
    plan = make_plan(config)
    return build_program(config, plan, jax.devices()[: plan.num_devices])


def restored_for(checkpoints, program):
    """Restore the newest checkpoint's state for a program."""
    target = abstract_stored_state(
        program.shapes, program.optimizer, program.config.precision, program.plan, program.mesh
    )
    return from_stored(
        checkpoints.restore(target, paddable=program.shapes.may_be_padded).state,
        program.shapes,
        program.plan,
        program.state_shardings,
    )


def test_empty_pipeline_slots_stay_zero(pipelined_run):
    """Otherwise they would be non-zero padding in the checkpoint of a plan with its slots
    in order.
    """
    slots = np.array(program_of(pipelined_run).shapes.slots)
    assert slots.tolist() == [0, 1, 2, 3, -1, 4, 5, 6, 7, 8]
    stacked = {
        path: leaf for path, leaf in host_leaves(pipelined_run.state).items() if is_stacked(path)
    }
    assert {path.partition("/layers/")[0] for path in stacked} == {
        "params",
        "opt_state/0/mu",
        "opt_state/0/nu",
    }
    for path, leaf in stacked.items():
        # not -0.0 either, whose bits change a checksum
        assert not leaf[slots < 0].view(np.uint32).any(), path
        assert leaf[slots >= 0].any(), path


def test_text_is_generated_on_one_device_from_a_pipelined_run(pipelined_run):
    params = load_text_model(pipelined_run.run_dir).params
    expected = in_order(program_of(pipelined_run), host_leaves(pipelined_run.state))
    for path, leaf in host_leaves({"params": params}).items():
        np.testing.assert_array_equal(leaf, fitted(expected[path], leaf.shape), err_msg=path)


def test_an_undisturbed_run_logs_start_plan_compile_checkpoint_and_end(uninterrupted):
    events = [
        json.loads(line) for line in (uninterrupted[1] / "events.jsonl").read_text().splitlines()
    ]
    assert [event["event"] for event in events] == ["start", "plan", "compile", "checkpoint", "end"]
    assert events[-1]["reason"] == "done"


def test_a_diverged_run_can_go_back_to_an_earlier_checkpoint(uninterrupted, tmp_path, capsys):
    run_dir = shutil.copytree(uninterrupted[1], tmp_path / "run")
    with pytest.raises(
        LearningError,
        match=(
            rf"no longer learns(.|\n)*since step {STEPS + 2}(.|\n)*checkpoint.resume_step={STEPS}"
        ),
    ):
        optimus_jax.train(
            run_dir=run_dir,
            resume=True,
            steps=30,
            lr=1e30,
            checkpoint_every=1,
            progress="plain",
            **{"optimizer.clip_norm": 0.0, "checkpoint.keep": 2},
        )
    steps = sorted(int(path.name) for path in (run_dir / "checkpoints").iterdir())
    assert steps[0] == STEPS, "it would have been deleted long ago"
    assert len(steps) == 4, (
        "the two newest, that one, and the last from before the first step that was left out"
    )
    assert [record.skipped for record in RunDirectory(run_dir, writer=False).metrics()[-5:]] == [
        True
    ] * 5
    with pytest.raises(ConfigError, match="--resume auto"):
        optimus_jax.train(run_dir=run_dir, resume="auto", **{"checkpoint.resume_step": STEPS})
    capsys.readouterr()
    result = optimus_jax.train(
        run_dir=run_dir,
        resume=True,
        steps=STEPS + 1,
        lr=1e-2,
        **{"checkpoint.resume_step": STEPS, "optimizer.clip_norm": 1.0},
    )
    output = capsys.readouterr().out
    assert f"resumed from the checkpoint of step {STEPS}, as requested" in output
    assert (result.reason, losses(result)[:STEPS]) == ("done", uninterrupted[0])
    assert sorted(int(path.name) for path in (run_dir / "abandoned").iterdir()) == steps[1:]
    assert Config.from_json((run_dir / "config.json").read_text()).checkpoint.resume_step is None, (
        "it is for one start"
    )


def test_an_existing_run_is_not_overwritten(uninterrupted, text):
    before = (uninterrupted[1] / "metrics.jsonl").read_bytes()
    with pytest.raises(ConfigError, match=r"never overwritten[\s\S]*--resume"):
        optimus_jax.train("gpt2-nano", run_dir=uninterrupted[1], data=text, **TINY)
    assert (uninterrupted[1] / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"seed": 1}, ConfigError, "keeps its model, data and seed"),
        ({"global_batch": 16}, ConfigError, "data.global_batch"),
        ({"model": "llama-nano"}, ConfigError, "changes to model"),
        ({"mesh": "data=3"}, OptimusError, "needs 3 devices; this run has 8"),
    ],
)
def test_changes_that_a_resume_cannot_make_are_refused(uninterrupted, change, error, message):
    with pytest.raises(error, match=message):
        optimus_jax.train(run_dir=uninterrupted[1], resume=True, **change)


def test_after_a_change_of_precision_the_loss_scale_restarts(text, tmp_path, capsys):
    run_dir, small = (
        tmp_path / "run",
        TINY | {"model.num_layers": 1, "progress": "plain", "precision.loss_scale": 1024},
    )
    in_f16 = optimus_jax.train(
        "gpt2-nano", run_dir=run_dir, data=text, precision="f16", **small | {"steps": 2}
    )
    assert float(in_f16.state.loss_scale.scale) == 1024
    capsys.readouterr()
    in_f32 = optimus_jax.train(run_dir=run_dir, resume=True, precision="f32", steps=3)
    assert (
        "precision changed from f16 to f32: the loss scale restarts at 1" in capsys.readouterr().out
    )
    assert float(in_f32.state.loss_scale.scale) == 1
    again = optimus_jax.train(run_dir=run_dir, resume=True, precision="f16", steps=4)
    assert float(again.state.loss_scale.scale) == 1024
    assert [record.loss_scale for record in again.history] == [1024, 1024, None, 1024]
    assert max(losses(again)) < 7, "entropy of bytes, not a multiple of it"


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("mlp_dim", 128),
        ("mlp_dim", 32),
        ("num_layers", 3),
        ("num_layers", 1),
        ("norm_epsilon", 0.5),
    ],
)
def test_a_checkpoint_of_another_model_is_refused(uninterrupted, tmp_path, name, size):
    """Neither larger nor smaller: missing values are not padding, and too many are not damage."""
    run_dir = tmp_path / "other"
    shutil.copytree(uninterrupted[1], run_dir)
    config = json.loads((run_dir / "config.json").read_text())
    config["model"][name] = size
    (run_dir / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=f"another model\n.*model.{name}"):
        optimus_jax.train(run_dir=run_dir, resume=True)
    with pytest.raises(CheckpointError, match="another model"):
        load_text_model(run_dir)
