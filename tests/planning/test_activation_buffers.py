"""The closed form of buffer slots equals the slots that a schedule's buffers allocate."""

import itertools

import pytest

from optimus_jax.config.axes import AxisSizes
from optimus_jax.pipeline.buffers import Buffers
from optimus_jax.pipeline.schedule import Schedule
from optimus_jax.pipeline.tables import REPEATING, SCHEDULES, make_schedule
from optimus_jax.plan import Pipelining, Plan
from optimus_jax.planning.cost.activation_buffers import BufferSlots, buffer_slots


def plan_of(
    name: str,
    stages: int,
    microbatches: int,
    repeats: int,
    latency: int,
    *,
    keep: bool,
    table: str | None = None,
) -> Plan:
    pipeline = Pipelining(
        schedule=name,
        layers_per_stage=(1,) * stages * repeats,
        repeats=repeats,
        send_slack=latency == 2,
        keep_residuals=keep,
        table=table,
    )
    return Plan(
        axes=AxisSizes(pipe=stages),
        rules=(),
        zero=0,
        microbatches=microbatches,
        pipeline=pipeline,
        remat="none",
        precision="f32",
        attention="xla",
        loss_chunk_tokens=1,
    )


def allocated_slots(schedule: Schedule, *, keep: bool) -> BufferSlots:
    buffers, last = Buffers.of(schedule, keep_residuals=keep), schedule.phases()[-1]
    return BufferSlots(
        inputs=buffers.num_inputs,
        residuals=buffers.num_residuals,
        cotangents=buffers.num_cotangents,
        ends_in_single_tick=last.num_ticks == 1 and last.backward and not last.forward,
    )


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("latency", [1, 2])
@pytest.mark.parametrize(
    ("name", "repeats"),
    [
        *((name, 1) for name in SCHEDULES),
        *((name, repeats) for name in REPEATING for repeats in (2, 3, 4)),
    ],
)
def test_buffer_slots_equal_allocated_slots(name, repeats, latency, keep):
    for stages, microbatches in itertools.product((2, 3, 4, 6), range(1, 26)):
        if repeats == 1 or microbatches % stages == 0:
            schedule = make_schedule(name, stages, microbatches, repeats, latency)
            found = buffer_slots(plan_of(name, stages, microbatches, repeats, latency, keep=keep))
            assert found == allocated_slots(schedule, keep=keep), (stages, microbatches)


def test_buffer_slots_of_a_user_written_table_equal_allocated():
    """The table is GPipe's; the plan's schedule name has another closed form."""
    schedule = make_schedule("gpipe", 3, 6)
    assert buffer_slots(
        plan_of("1f1b", 3, 6, 1, 1, keep=True, table=schedule.to_json())
    ) == allocated_slots(schedule, keep=True)
    assert buffer_slots(plan_of("1f1b", 3, 6, 1, 1, keep=True)).residuals < 6


def test_a_named_schedule_without_a_formula_is_counted_in_its_table(monkeypatch):
    monkeypatch.setitem(SCHEDULES, "mine", SCHEDULES["gpipe"])
    plan = plan_of("mine", 3, 6, 1, 1, keep=True)
    assert buffer_slots(plan) == allocated_slots(make_schedule("gpipe", 3, 6), keep=True)
