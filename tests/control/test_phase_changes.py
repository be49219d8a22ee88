"""Batch phases in whole runs: each phase equals a restart with its batch shape, and is compiled
before it begins.
"""

import shutil

import numpy as np
import pytest
from small_runs import events, losses, quick, run_tiny, slow_devices, text  # noqa: F401

import optimus_jax
from optimus_jax.checkpoint.checkpoints import Checkpoints
from optimus_jax.config import CheckpointConfig, Config
from optimus_jax.control import switch
from optimus_jax.control.executables import compile_plan
from optimus_jax.control.journal import switches
from optimus_jax.data.dataset import load_data
from optimus_jax.data.sampler import count_examples, cut_examples, example_order
from optimus_jax.errors import PlanError
from optimus_jax.mesh.sharding import put_batch
from optimus_jax.training.state import abstract_stored_state, from_stored

STEPS = 8
PHASES = "3:16,5:x16"
"""8 x 32 tokens, after step 3 16 x 32, after step 5 16 x 16."""
RAMP = {
    "mesh": "data=8",
    "phases": PHASES,
    "steps": STEPS,
    "checkpoint_every": 1,
    "checkpoint.keep": STEPS,
    "eval_every": 4,
    "data.eval_fraction": 0.5,
    "eval_batches": 1,
}


@pytest.fixture(scope="module")
def ramp(quick, text, tmp_path_factory):  # noqa: F811
    return run_tiny(tmp_path_factory.mktemp("ramp") / "run", text, **RAMP)


def test_steps_have_the_batch_shape_of_their_phase(ramp):
    assert [record.tokens for record in ramp.history] == [8 * 32] * 3 + [16 * 32] * 2 + [
        16 * 16
    ] * 3
    assert [
        (
            event["step"],
            event["global_batch"],
            event["seq_len"],
            event["examples_before"],
            event["was_ready"],
        )
        for event in events(ramp, "phase")
    ] == [(3, 16, 32, 3 * 8, True), (5, 16, 16, 0, True)]
    assert {event["plan"] for event in events(ramp, "phase")} == {ramp.plan.digest}, (
        "nothing has to move"
    )
    assert [event["tokens"] for event in events(ramp, "eval")] == [
        8 * 32,
        8 * 32,
    ], "eval_batches=1 is one batch of the first phase, in all"


def test_a_phase_equals_a_restart_with_its_batch_shape(ramp, text):  # noqa: F811
    """Train from the checkpoint at each boundary under a config without phases, on examples
    selected here.
    """
    data = load_data(
        Config().with_values({"data.sources": (text,), "data.eval_fraction": 0.5}).data,
        seq_len=32,
        vocab_size=257,
        model_name="",
    )
    for boundary, until, batch, length, first in ((3, 5, 16, 32, 3 * 8), (5, STEPS, 16, 16, 0)):
        config = Config.from_json((ramp.run_dir / "config.json").read_text()).with_values(
            {"data.phases": (), "data.global_batch": batch, "data.seq_len": length}
        )
        program = compile_plan(config, ramp.plan, rest=False).program
        wanted = abstract_stored_state(
            program.shapes, program.optimizer, config.precision, program.plan, program.mesh
        )
        stored = (
            Checkpoints(ramp.run_dir / "checkpoints", CheckpointConfig())
            .restore(wanted, boundary, paddable=program.shapes.may_be_padded)
            .state
        )
        state, found = (
            from_stored(stored, program.shapes, program.plan, program.state_shardings),
            [],
        )
        order = example_order(count_examples(data.train, length), config.seed)
        for step in range(boundary, until):
            examples = np.array(
                [order[first + (step - boundary) * batch + row] for row in range(batch)]
            )
            rows = cut_examples(data.train, examples, seq_len=length, respect_documents=True) | {
                "examples": np.arange(batch, dtype=np.int32)
            }
            state, metrics = program.train_step(
                state, put_batch(rows, program.batch_sharding, batch)
            )
            found.append(float(metrics["loss"]))
        assert found == losses(ramp)[boundary:until]


@pytest.mark.parametrize("step", [2, 3, 4, 6])
def test_a_run_is_resumed_in_the_phase_of_its_checkpoint(ramp, tmp_path, step):
    """In the middle of a phase, at a boundary, and before later boundaries."""
    run = shutil.copytree(ramp.run_dir, tmp_path / "run")
    for later in range(step + 1, STEPS + 1):
        shutil.rmtree(run / "checkpoints" / str(later))
    assert losses(optimus_jax.train(run_dir=run, resume=True)) == losses(ramp)


def test_after_a_damaged_checkpoint_the_run_resumes_in_an_earlier_phase(ramp, tmp_path):
    run = shutil.copytree(ramp.run_dir, tmp_path / "run")
    for later in range(3, STEPS + 1):
        if later != 7:
            shutil.rmtree(run / "checkpoints" / str(later))
    for path in (run / "checkpoints" / "7" / "state").rglob("*"):
        if path.is_file():
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    assert losses(optimus_jax.train(run_dir=run, resume=True)) == losses(ramp)


def test_a_phase_that_cannot_be_compiled_keeps_the_state(ramp, quick, text, tmp_path, monkeypatch):  # noqa: F811
    def refuse(config, plan, **_):
        raise MemoryError("the compiler has no room")

    with monkeypatch.context() as patch:
        patch.setattr(switch, "compile_plan", refuse)
        with pytest.raises(
            PlanError, match=r"16 x 32 tokens from step 4 cannot be compiled(.|\n)*no room"
        ):
            run_tiny(tmp_path / "run", text, **RAMP | {"checkpoint_every": 0})
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["3"]
    assert losses(optimus_jax.train(run_dir=tmp_path / "run", resume=True)) == losses(ramp)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"phases": "3:12"},
            (
                r"the batches after step 3 \(data.phases: 12 x 32 tokens from step 4\): (.|\n)*over"
                r" data\*fsdp=8"
            ),
        ),
        (
            {"phases": "3:x128", "data.eval_fraction": 0.995},
            r"shorter than one example(.|\n)*seq_len=128",
        ),
        ({"phases": "3:16,5:12"}, "the batches after step 5"),
    ],
)
def test_phases_that_cannot_be_trained_are_refused_before_the_run(
    quick,  # noqa: F811
    text,  # noqa: F811
    tmp_path,
    settings,
    message,
):
    with pytest.raises(optimus_jax.errors.OptimusError, match=message):
        run_tiny(tmp_path / "run", text, **RAMP | settings)
    assert not list(tmp_path.iterdir())


def test_a_phase_may_need_another_mesh(slow_devices, text, tmp_path):  # noqa: F811
    """Four examples divide over eight devices only with another mesh: the state moves even without
    a controller.
    """
    result = run_tiny(
        tmp_path / "run",
        text,
        mesh="auto",
        phases="3:4",
        steps=5,
        global_batch=8,
        **{"parallel.trials": 1},
    )
    (phase,) = events(result, "phase")
    first = result.history[0].plan
    assert phase["from_plan"] == first != phase["plan"] == result.plan.digest
    assert [(event["step"], event["plan"]) for event in events(result, "remesh")] == [
        (3, result.plan.digest)
    ]
    assert [record.ending for record in switches(result.run_dir)] == ["kept"], (
        "there is no way back to other batches"
    )
    assert (result.run_dir / "plan.json").read_text() == result.plan.to_json()
    assert [record.plan for record in result.history] == [first] * 3 + [result.plan.digest] * 2


def test_the_advisor_considers_upcoming_phases(slow_devices, text, tmp_path):  # noqa: F811
    result = run_tiny(
        tmp_path / "run", text, mesh="data=8", phases="5:16", steps=STEPS, control="auto"
    )
    assert "the phase that begins at step 6" in [
        event["trigger"] for event in events(result, "decision")
    ]
    assert [event["step"] for event in events(result, "phase")] == [5]
    assert not events(result, "remesh")
    assert [record.tokens for record in result.history] == [8 * 32] * 5 + [16 * 32] * (STEPS - 5)
