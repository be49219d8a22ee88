"""Switches in whole runs between other rules for splitting layers, and between other numbers of
stages.

After each switch, the run equals a restart from its checkpoint bit for bit.
"""

import jax
import numpy as np
import pytest
from small_runs import (
    Scripted,
    devices_of,
    events,
    losses,
    plan_on,
    quick,  # noqa: F401
    run_tiny,
    slow_devices,  # noqa: F401
    switch_at,
    text,  # noqa: F401
)

from optimus_jax.checkpoint.checkpoints import Checkpoints
from optimus_jax.config import CheckpointConfig, Config
from optimus_jax.config.phases import in_phase, phase_after
from optimus_jax.control import assembly
from optimus_jax.control.executables import compile_plan
from optimus_jax.control.journal import switches
from optimus_jax.mesh.sharding import put_batch
from optimus_jax.reshard.checksum import named_leaves
from optimus_jax.run.inputs import Inputs
from optimus_jax.training.state import abstract_stored_state, from_stored

AT, STEPS = 3, 8
SAVED = {"steps": STEPS, "checkpoint_every": AT, "checkpoint.keep": STEPS, "control": "auto"}
LAYERS = {"model.num_layers": 5, "microbatches": 2}
"""The layers divide evenly over neither four nor three stages."""


@pytest.fixture(autouse=True)
def scripted(slow_devices, monkeypatch):  # noqa: F811
    monkeypatch.setattr(assembly, "Advisor", Scripted)


def restarted(result, plan, without):
    """State and losses of the steps after AT, from the checkpoint at AT, under a plan and in the
    batch phase that begins there.
    """
    devices = [device for device in jax.devices() if device.id not in without]
    whole = Config.from_json((result.run_dir / "config.json").read_text())
    config, inputs = in_phase(whole, phase_after(whole, AT)), Inputs.of(whole)
    program = compile_plan(config, plan, devices=devices, rest=False).program
    wanted = abstract_stored_state(
        program.shapes, program.optimizer, config.precision, plan, program.mesh
    )
    stored = (
        Checkpoints(result.run_dir / "checkpoints", CheckpointConfig())
        .restore(wanted, AT, paddable=program.shapes.may_be_padded)
        .state
    )
    state, found = from_stored(stored, program.shapes, plan, program.state_shardings), []
    for step in range(AT + 1, STEPS + 1):
        batch = put_batch(
            inputs.phase_batches(program, AT).loader.batch(step),
            program.batch_sharding,
            config.data.global_batch,
        )
        state, metrics = program.train_step(state, batch)
        found.append(float(metrics["loss"]))
    return state, found


def assert_is_a_restart(result, plan, without=frozenset()):
    state, expected = restarted(result, plan, without)
    assert result.plan == plan
    assert losses(result)[AT:] == expected
    leaves = named_leaves(state)
    for path, leaf in named_leaves(result.state).items():
        assert leaf.sharding == leaves[path].sharding, path
        found, wanted = (np.ascontiguousarray(each) for each in (leaf, leaves[path]))
        assert (found.dtype, found.tobytes()) == (wanted.dtype, wanted.tobytes()), path


FEED_FORWARD_WHOLE = {"parallel.rules": "mlp=none"}


@pytest.mark.parametrize(
    "there", [True, False], ids=["to attention over tensor alone", "and back to both"]
)
def test_a_switch_can_change_the_rules_of_the_feed_forward_block(text, tmp_path, there):  # noqa: F811
    """Attention is split over `tensor`; the feed-forward block is whole on every device, where the
    sequence is split instead.
    """
    settings = ({}, FEED_FORWARD_WHOLE) if there else (FEED_FORWARD_WHOLE, {})
    plan = plan_on("data=2,tensor=4", **settings[1])
    result = run_tiny(
        tmp_path / "run",
        text,
        {AT: switch_at(AT, plan)},
        mesh="data=2,tensor=4",
        **SAVED,
        **settings[0],
    )
    (remesh,) = events(result, "remesh")
    assert (remesh["bytes_moved"] > 0) == there, "who has the whole has every part of it"
    assert_is_a_restart(result, plan)
    spec = {
        path: str(leaf.sharding.spec) for path, leaf in named_leaves(result.state.params).items()
    }
    assert ("tensor" in spec["layers/mlp/up"]) != there
    assert "tensor" in spec["layers/attention/query"]


def test_four_pipeline_stages_become_three(text, tmp_path):  # noqa: F811
    """On six of the eight devices, with other numbers of layers per stage."""
    plan = plan_on("pipe=3,data=2", **LAYERS)
    assert plan.pipeline.layers_per_stage == (1, 2, 2)
    without = frozenset({2, 5})
    result = run_tiny(
        tmp_path / "run",
        text,
        {AT: switch_at(AT, plan, without=without)},
        mesh="pipe=4,data=2",
        **SAVED,
        **LAYERS,
    )
    assert devices_of(result.state) == set(range(8)) - without
    assert_is_a_restart(result, plan, without)


def test_tensor_parallelism_becomes_data_parallelism_as_the_batch_grows(text, tmp_path):  # noqa: F811
    """The switch is planned before the boundary, for the batches after it."""
    plan = plan_on("data=8", global_batch=16)
    result = run_tiny(
        tmp_path / "run",
        text,
        {1: switch_at(1, plan, at_step=AT)},
        mesh="tensor=4,data=2",
        phases=f"{AT}:16",
        **SAVED,
    )
    assert [event["step"] for event in events(result, "remesh")] == [AT]
    assert [(event["step"], event["plan"]) for event in events(result, "phase")] == [
        (AT, plan.digest)
    ]
    assert [record.tokens for record in result.history] == [8 * 32] * AT + [16 * 32] * (STEPS - AT)
    assert [record.ending for record in switches(result.run_dir)] == ["kept"], (
        "steps with other batches are not compared"
    )
    assert Scripted.messages == ["switched to data=8"]
    assert_is_a_restart(result, plan)


@pytest.mark.parametrize(
    ("precision", "query"),
    [
        pytest.param("bf16", {"query": "bfloat16"}, marks=pytest.mark.nightly),
        ("nf4", {"query/codes": "uint8"}),
    ],
)
def test_a_run_that_trains_adapters_switches(text, tmp_path, precision, query):  # noqa: F811
    """Frozen matrices, adapters, and moments of adapters alone move."""
    lora = {
        "model.tuning.method": "lora",
        "model.tuning.rank": 4,
        "model.tuning.dropout": 0.1,
        "model.tuning.base_precision": precision,
    }
    plan = plan_on("data=2,tensor=4", **lora)
    result = run_tiny(
        tmp_path / "run",
        text,
        {AT: switch_at(AT, plan)},
        mesh="fsdp=4,tensor=2",
        zero=3,
        **SAVED,
        **lora,
    )
    assert [event["step"] for event in events(result, "remesh")] == [AT]
    assert_is_a_restart(result, plan)
    dtypes = {path: leaf.dtype for path, leaf in named_leaves(result.state).items()}
    for name, dtype in query.items():
        assert dtypes[f"params/layers/attention/{name}"] == dtype
    assert dtypes["opt_state/0/mu/layers/attention/query_adapter/a"] == "float32"
    assert not [
        path for path in dtypes if path.startswith("opt_state/0/mu/layers/attention/query/")
    ]
    assert "opt_state/0/mu/layers/attention/query" not in dtypes


def test_a_switch_prepared_for_batches_of_the_old_phase_is_dropped(text, tmp_path):  # noqa: F811
    """A switch that is decided at the boundary itself does not happen."""
    result = run_tiny(
        tmp_path / "run",
        text,
        {AT: switch_at(AT, plan_on("data=8"))},
        mesh="tensor=4,data=2",
        phases=f"{AT}:16",
        **SAVED,
    )
    assert not events(result, "remesh")
    assert Scripted.messages == []
    assert_is_a_restart(result, plan_on("tensor=4,data=2", global_batch=16))
