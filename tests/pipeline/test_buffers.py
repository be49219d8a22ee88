"""No slot is overwritten too early, and no smaller buffer would be enough."""

from dataclasses import replace

import numpy as np
import pytest
from buffer_simulator import check_buffers
from hypothesis import assume, given
from hypothesis import strategies as st
from schedules import forward_schedules, schedules, training_schedules

from optimus_jax.pipeline.buffers import Buffers
from optimus_jax.pipeline.interleaved import interleaved
from optimus_jax.pipeline.one_f_one_b import one_f_one_b
from optimus_jax.pipeline.schedule import Schedule, schedule_from_starts
from optimus_jax.pipeline.tables import make_schedule

BUFFERS = {"input": "num_inputs", "residual": "num_residuals", "cotangent": "num_cotangents"}


def field_of(table_name: str) -> str:
    """The field with the slots of the buffer that a table points into."""
    return BUFFERS[table_name.rpartition("_")[2]]


@st.composite
def schedules_with_pauses(draw: st.DrawFn) -> Schedule:
    """Valid but wasteful tables: random pauses, and backward in another order than forward."""
    num_stages, latency = draw(st.integers(1, 4)), draw(st.sampled_from((1, 2)))
    pauses = draw(st.lists(st.integers(0, 1), min_size=1, max_size=6))
    start = np.arange(len(pauses)) + np.minimum(
        np.cumsum([0, *pauses[1:]]), latency * (num_stages - 1)
    )
    turn = start.max() + latency * (num_stages - 1) + 1
    order = np.array(draw(st.permutations(range(len(pauses)))))
    return schedule_from_starts(
        "unhurried", start[:, None], (turn + order)[:, None], num_stages=num_stages, latency=latency
    )


@given(schedule=st.one_of(schedules(), schedules_with_pauses()), keep_residuals=st.booleans())
def test_every_read_finds_its_value(schedule, keep_residuals):
    buffers = Buffers.of(schedule, keep_residuals=keep_residuals)
    check_buffers(schedule, buffers, keep_residuals=keep_residuals)
    for name, table in buffers.tables.items():
        assert table.dtype == np.int32
        assert table.shape == schedule.forward.shape
        assert table.min() >= 0
        assert table.max() <= getattr(buffers, field_of(name))
        assert not table.flags.writeable


@given(schedule=st.one_of(schedules(), schedules_with_pauses()), keep_residuals=st.booleans())
def test_no_ring_could_be_smaller(schedule, keep_residuals):
    """The last slot of a buffer can neither be merged with any other nor be dropped."""
    buffers = Buffers.of(schedule, keep_residuals=keep_residuals)
    for kind, field in BUFFERS.items():
        last = getattr(buffers, field) - 1
        for slot in range(last + 1 if last >= 0 else 0):
            tables = {
                name: np.where(table == last, slot, np.minimum(table, last))
                for name, table in buffers.tables.items()
                if name.endswith(kind)
            }
            with pytest.raises(AssertionError):
                check_buffers(
                    schedule,
                    replace(buffers, **{field: last}, **tables),
                    keep_residuals=keep_residuals,
                )


@given(
    schedule=st.one_of(training_schedules(), schedules_with_pauses()),
    keep_residuals=st.booleans(),
    data=st.data(),
)
def test_check_buffers_notices_every_wrong_slot(schedule, keep_residuals, data):
    buffers = Buffers.of(schedule, keep_residuals=keep_residuals)
    # An input that is embedded, used and forgotten in one step may lie in any slot.
    names = [name for name in buffers.tables if not (keep_residuals and name == "forward_input")]
    name = data.draw(st.sampled_from(names))
    num_slots = getattr(buffers, field_of(name))
    table = buffers.tables[name].copy()
    used = np.argwhere(table != num_slots)
    assume(len(used))
    place = tuple(used[data.draw(st.integers(0, len(used) - 1))])
    table[place] = data.draw(
        st.integers(0, num_slots + 1).filter(lambda slot: slot != table[place])
    )
    with pytest.raises(AssertionError):
        check_buffers(schedule, replace(buffers, **{name: table}), keep_residuals=keep_residuals)


@given(schedule=training_schedules(), keep_residuals=st.booleans())
def test_buffers_have_a_slot_per_task_in_flight(schedule, keep_residuals):
    buffers = Buffers.of(schedule, keep_residuals=keep_residuals)
    in_flight = int(schedule.in_flight().max())
    assert buffers.num_residuals == (in_flight if keep_residuals else 0)
    if not keep_residuals and schedule.num_repeats == 1:
        S, M, L = schedule.num_stages, schedule.num_microbatches, schedule.latency
        assert (
            buffers.num_inputs
            == in_flight
            == (M if schedule.name == "gpipe" else min(M, 2 * L * (S - 1) + 1))
        )
        assert buffers.num_cotangents == (M if schedule.name == "gpipe" else 1)


@given(schedule=forward_schedules(), keep_residuals=st.booleans())
def test_forward_only_buffers_keep_only_inputs_in_transit(schedule, keep_residuals):
    buffers = Buffers.of(schedule, keep_residuals=keep_residuals)
    assert buffers.num_residuals == buffers.num_cotangents == 0
    if schedule.num_repeats == 1:
        assert buffers.num_inputs == 1


def test_interleaving_keeps_a_slot_for_each_task_in_flight():
    for repeats in (2, 3, 4):
        assert Buffers.of(interleaved(4, 16, repeats)).num_inputs == (repeats - 1) * 4 + 2 * 3 + 1


@pytest.mark.parametrize("latency", [1, 2])
def test_a_slot_is_reused_as_soon_as_the_order_of_a_tick_allows(latency):
    """Backward is the last to read with latency 1, and arrival comes after it with latency 2."""
    buffers = Buffers.of(one_f_one_b(3, 12, latency))
    freed, taken = (
        {
            (slot, tick)
            for tick, slot in enumerate(table[:, 1].tolist())
            if slot != buffers.num_inputs
        }
        for table in (buffers.backward_input, buffers.arrival_input)
    )
    taken_in_the_next_tick = {(slot, tick - 1) for slot, tick in taken}
    assert bool(freed & taken) == (latency == 2)
    assert bool(freed & taken_in_the_next_tick) == (latency == 1)


def test_slots_of_1f1b_on_two_stages_by_hand():
    buffers = Buffers.of(make_schedule("1f1b", 2, 4))
    assert buffers.num_inputs == 3
    spare = 3
    assert buffers.forward_input.T.tolist() == [
        [0, 1, 2, 0, spare, spare],
        [spare, 0, 0, 0, 0, spare],
    ]
    assert buffers.backward_input.T.tolist() == [
        [spare, spare, 0, 1, 2, 0],
        [spare, 0, 0, 0, 0, spare],
    ]
    assert buffers.arrival_input.T.tolist() == [[spare] * 6, [spare, 0, 0, 0, 0, spare]]
    assert buffers.head_cotangent.T.tolist() == [[1] * 6, [1, 0, 0, 0, 0, 1]]
