"""What a pipelined step sends, computes and holds, counted in the compiled program.

That it trains like one device is tested with all other plans
(tests/training/test_equal_to_one_device.py).
"""

import functools
from dataclasses import replace
from pathlib import Path

import hlo
import jax
import jax.numpy as jnp
import numpy as np
import plans
import pytest
from helpers import F32_RELATIVE
from jax import lax

from optimus_jax.config import Config, DataConfig
from optimus_jax.pipeline.residuals import Residuals
from optimus_jax.pipeline.schedule import Phase, Schedule, schedule_from_starts
from optimus_jax.pipeline.tables import SCHEDULES, make_schedule
from optimus_jax.training.step import build_program

MODEL = replace(plans.GPT, dropout=0.0, num_layers=4)
"""Its layers divide evenly over two stages and over four virtual ones."""
ACTIVATION_AXES = {"pipe", "tensor"}


@functools.cache
def compiled(case: plans.PlanCase) -> tuple[plans.Built, str]:
    built = plans.build(MODEL, case)
    return built, plans.compiled_step(built).as_text() or ""


def collectives(case: plans.PlanCase) -> list[hlo.Moved]:
    built, text = compiled(case)
    return hlo.collectives(text, built.program.mesh)


@pytest.mark.parametrize(
    "case",
    [
        plans.case("pipe=2,data=2,tensor=2", microbatches=4),
        plans.case("pipe=2,data=2", schedule="gpipe", microbatches=4),
        plans.case("pipe=2,fsdp=2", zero=1, schedule="interleaved", microbatches=4),
        plans.case("pipe=2,data=2", microbatches=4, stage_residuals="recompute"),
    ],
    ids=str,
)
def test_no_gradient_is_reduced_inside_a_tick(case):
    built, _ = compiled(case)
    in_ticks = [moved for moved in collectives(case) if "while/body" in moved.source]
    assert in_ticks
    assert {axis for moved in in_ticks for axis in moved.axes} <= ACTIVATION_AXES
    tokens = (
        plans.GLOBAL_BATCH * plans.SEQ_LEN // built.plan.batch_ways() // built.plan.microbatches
    )
    sizes = {int(np.prod(moved.shape)) for moved in in_ticks if moved.kind != "collective-permute"}
    value = tokens * built.config.model.embed_dim
    assert sizes <= {value, value // built.plan.axes.tensor, tokens, 2 * tokens, 1}, (
        "activations, devices' parts of them, and sums of the loss"
    )
    reduced = [
        moved for moved in collectives(case) if set(moved.axes) & {"data", "fsdp"} and moved.shape
    ]
    assert reduced
    assert {moved.loops for moved in reduced} == {()}


@pytest.mark.parametrize(
    "case",
    [
        plans.case("pipe=2,data=2", microbatches=4),
        plans.case("pipe=2,data=2", schedule="gpipe", microbatches=4),
        plans.case("pipe=2,fsdp=2", zero=1, schedule="interleaved", microbatches=4),
    ],
    ids=str,
)
def test_ticks_send_activations_only_in_directions_that_need_it(case):
    built, _ = compiled(case)
    schedule = built.plan.schedule()
    sends = [moved for moved in collectives(case) if moved.kind == "collective-permute"]
    rows = plans.GLOBAL_BATCH // 2 // 4
    assert {moved.shape for moved in sends} == {(rows, plans.SEQ_LEN, MODEL.embed_dim)}
    needed = sum(phase.num_ticks * directions_sent(schedule, phase) for phase in schedule.phases())
    assert sum(moved.times for moved in sends) == needed < 2 * schedule.num_ticks


def directions_sent(schedule: Schedule, phase: Phase) -> int:
    """Directions, of two, in which a tick of the phase brings what a neighbour computed the tick
    before.
    """
    arrivals = schedule.forward_ticks[:, :-1] + 1, schedule.backward_ticks[:, 1:] + 1
    return sum(bool(((ticks >= phase.start) & (ticks < phase.stop)).any()) for ticks in arrivals)


def test_zero_2_and_3_communicate_in_every_tick():
    """docs/pipelines.md says what that costs."""
    for zero, kind in ((2, "reduce-scatter"), (3, "all-gather")):
        case = plans.case("pipe=2,fsdp=2", zero=zero, microbatches=4)
        assert any(
            moved.kind == kind and "while/body" in moved.source for moved in collectives(case)
        )


def flops(case: plans.PlanCase) -> tuple[int, int]:
    """FLOPs of the matmuls on one device: of the layers and of the head."""
    built, text = compiled(case)
    rows = built.plan.padded_vocab(MODEL) // built.plan.axes.pipe // built.plan.axes.tensor
    assert rows not in (MODEL.embed_dim, MODEL.mlp_dim, plans.SEQ_LEN), (
        "the head is told by its size"
    )
    totals = {True: 0, False: 0}
    for matmul in hlo.matmuls(text):
        totals[any(rows in shape for shape in matmul.operands)] += matmul.total_flops
    return totals[False], totals[True]


@pytest.mark.parametrize(
    "case",
    [
        plans.case("pipe=2,data=2", microbatches=4),
        plans.case("pipe=4", microbatches=8),
        plans.case("pipe=4,tensor=2", microbatches=4, schedule="gpipe"),
        plans.case("pipe=2", microbatches=4, schedule="interleaved"),
    ],
    ids=str,
)
def test_idle_stages_compute_nothing_and_the_head_is_split_evenly(case):
    built, _ = compiled(case)
    layers, head = flops(case)
    layers_alone, head_alone = flops(plans.ONE_DEVICE)
    devices = built.plan.num_devices
    assert built.plan.schedule().idle_fraction > 0
    assert layers * devices == layers_alone
    assert head * devices == head_alone, "each stage computes its part of the vocabulary"


def test_devices_that_hold_the_same_stage_value_send_a_part_each():
    case = plans.case("pipe=2,data=2,tensor=2", microbatches=4)
    built, _ = compiled(case)
    schedule, found = built.plan.schedule(), collectives(case)
    rows, tensor = plans.GLOBAL_BATCH // 2 // 4, 2
    whole = (rows, plans.SEQ_LEN, MODEL.embed_dim)
    sent = {moved.shape for moved in found if moved.kind == "collective-permute"}
    assert [np.prod(shape) * tensor for shape in sent] == [np.prod(whole)]
    gathered = [m for m in found if m.kind == "all-gather" and m.axes == ("tensor",)]
    assert {moved.shape for moved in gathered} == {whole}
    # Of a task forward and one backward, the last hidden state, and the embedding's gradient.
    assert sum(moved.times for moved in gathered) == 4 * schedule.num_microbatches


def test_recomputing_residuals_adds_one_forward():
    keep, recompute = (
        flops(plans.case("pipe=2,data=2", microbatches=4, stage_residuals=how))[0]
        for how in ("keep", "recompute")
    )
    assert recompute / keep == pytest.approx(4 / 3, rel=0.02)


def temp_bytes(mesh: str, microbatches: int, **parallel: object) -> int:
    """Temporary bytes of a step whose microbatches have two rows each."""
    config = Config(
        model=MODEL, data=DataConfig(seq_len=plans.SEQ_LEN, global_batch=2 * microbatches)
    ).with_values(
        {
            "parallel.mesh": mesh,
            "parallel.microbatches": microbatches,
            **{f"parallel.{name}": value for name, value in parallel.items()},
        }
    )
    plan = plans.plan_for(config, plans.AxisSizes.parse(mesh), plans.discover())
    program = build_program(config, plan, jax.devices()[: plan.num_devices])
    arguments = program.abstract_state(), program.abstract_batch()
    compiled = program.train_step.lower(*arguments).compile({"xla_backend_optimization_level": 0})
    return compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize(
    ("schedule", "residuals"),
    [
        ("1f1b", "keep"),
        pytest.param("1f1b", "recompute", marks=pytest.mark.nightly),
        pytest.param("gpipe", "keep", marks=pytest.mark.nightly),
        ("gpipe", "recompute"),
    ],
)
def test_memory_of_1f1b_is_flat_in_microbatches_and_gpipes_grows(schedule, residuals):
    few, many = (
        temp_bytes("pipe=2", count, schedule=schedule, stage_residuals=residuals)
        for count in (4, 64)
    )
    if schedule == "1f1b":
        assert many <= 1.02 * few
        return
    added_slots, hidden_bytes = 60, 2 * plans.SEQ_LEN * MODEL.embed_dim * 4
    if residuals == "recompute":
        assert many - few == pytest.approx(added_slots * 2 * hidden_bytes, rel=0.02), (
            "an input and a cotangent each"
        )
    else:
        assert many - few > added_slots * (1 + 5 * MODEL.num_layers // 2) * hidden_bytes, (
            "a cotangent and residuals each"
        )


def two_halves() -> Schedule:
    """On two stages, forward and backward of two microbatches and then of two more, which no named
    schedule does.
    """
    return schedule_from_starts(
        "mine", [[0], [1], [6], [7]], [[3], [4], [9], [10]], num_stages=2, latency=1
    )


def test_user_written_table_trains_like_one_device(tmp_path: Path):
    (tmp_path / "mine.json").write_text(two_halves().to_json())
    case = plans.case("pipe=2", schedule=str(tmp_path / "mine.json"))
    built, one = plans.build(MODEL, case), plans.build(MODEL, plans.ONE_DEVICE)
    assert built.plan.pipeline is not None
    assert (built.plan.pipeline.schedule, built.plan.microbatches) == ("mine", 4)
    step = plans.compiled_step(built)
    # Three ticks of forward, three of backward, and again: each is a loop of its own that sends one
    # way.
    sends = [
        moved
        for moved in hlo.collectives(step.as_text() or "", built.program.mesh)
        if moved.kind == "collective-permute"
    ]
    assert [moved.loops for moved in sends] == [(3,), (3,), (3,), (3,)]
    for name in SCHEDULES:
        assert len(make_schedule(name, 2, 4).phases()) < 4
    losses = [
        float(side.program.eval_step(plans.random_state(side.program).params, side.batch).loss)
        for side in (built, one)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=F32_RELATIVE)
    metrics = [
        compiled(plans.random_state(side.program), side.batch)[1]
        for side, compiled in ((built, step), (one, plans.compiled_step(one)))
    ]
    assert float(metrics[0]["grad_norm"]) == pytest.approx(
        float(metrics[1]["grad_norm"]), rel=F32_RELATIVE
    )


def test_buffers_of_residuals_hold_no_weights_or_constants():
    params, constants = {"w": jnp.full((3, 8, 8), 0.5)}, {"scale": jnp.ones((1, 8))}

    def layers(params, constants, x, microbatch):
        after = lax.scan(
            lambda x, w: (jnp.tanh(x @ w) * constants["scale"] + microbatch, None), x, params["w"]
        )[0]
        return after, {"squares": jnp.square(after).sum()}

    x, microbatch = jnp.ones((2, 8)), jnp.full((2, 8), 0.1)
    residuals = Residuals(layers, (params, constants), x, microbatch)
    assert all(8 * 8 not in (like.size, like.size // 3) for like in residuals.like)
    (after, auxiliary), kept = residuals.forward((params, constants), x, microbatch)
    assert [value.shape for value in kept] == [like.shape for like in residuals.like]
    expected, pull = jax.vjp(lambda params, x: layers(params, constants, x, microbatch), params, x)
    jax.tree.map(np.testing.assert_array_equal, (after, auxiliary), expected)
    d_params, (d_x,) = residuals.backward((params, constants), kept, ([after], auxiliary))
    jax.tree.map(np.testing.assert_array_equal, (d_params, d_x), pull((after, auxiliary)))
