"""The closed form of ticks equals the count in schedule tables."""

import numpy as np
import pytest
from pricing import plan_of

from optimus_jax.pipeline.schedule import IDLE, schedule_from_starts
from optimus_jax.pipeline.tables import REPEATING, SCHEDULES
from optimus_jax.plan import Pipelining
from optimus_jax.planning.cost.pipeline_time import Ticks, count_ticks

CASES = [
    (name, stages, microbatches, repeats, slack)
    for name in SCHEDULES
    for repeats in ((2, 3) if name in REPEATING else (1,))
    for stages in (2, 3, 4)
    for microbatches in (1, 2, 3, 4, 6, 8, 9, 12)
    for slack in (False, True)
    if repeats == 1 or microbatches % stages == 0
]


@pytest.mark.parametrize(("name", "stages", "microbatches", "repeats", "slack"), CASES)
def test_tick_counts_equal_those_of_the_schedule_table(name, stages, microbatches, repeats, slack):
    plan = plan_of(
        f"pipe={stages}", schedule=name, repeats=repeats, slack=slack, microbatches=microbatches
    )
    schedule = plan.schedule()
    forward, backward = (
        (table != IDLE).any(axis=1).sum() for table in (schedule.forward, schedule.backward)
    )
    assert plan.pipeline is not None
    of_phases = {
        kind: sum(phase.num_ticks for phase in schedule.phases() if getattr(phase, kind))
        for kind in ("head", "embed", "embed_backward")
    }
    assert count_ticks(plan.pipeline, stages, microbatches) == Ticks(forward, backward, **of_phases)
    # Where all share a processor, only work takes time.
    tasks = microbatches * repeats
    shared = count_ticks(plan.pipeline, stages, microbatches, stages_per_processor=stages)
    assert shared == Ticks(tasks, tasks, **of_phases)


def _two_stages(schedule, table=None):
    """A pipeline of two stages with a layer each."""
    return Pipelining(
        schedule=schedule,
        layers_per_stage=(1, 1),
        repeats=1,
        send_slack=False,
        keep_residuals=True,
        table=table,
    )


def test_ticks_of_a_user_written_table_are_counted():
    """The table has an idle tick between forward and backward."""
    table = (
        '{"name": "mine", "stages": 2, "microbatches": 2, "repeats": 1, "latency": 1, "forward":'
        ' [[0, -1], [1, 0], [-1, 1], [-1, -1], [-1, -1]], "backward": [[-1, -1], [-1, -1], [-1, 0],'
        " [0, 1], [1, -1]]}"
    )
    assert count_ticks(_two_stages("mine", table), 2, 2) == Ticks(
        forward=3, backward=3, head=3, embed=2, embed_backward=2
    )


def test_a_named_schedule_without_a_formula_is_counted_in_its_table(monkeypatch):
    """A schedule of one stage at a time: as many ticks as tasks of all stages."""

    def one_at_a_time(stages, microbatches, _, latency):
        starts = np.arange(microbatches)[:, None] * stages * latency
        turn = int(starts[-1, 0]) + stages * latency
        return schedule_from_starts(
            "mine", starts, turn + starts, num_stages=stages, latency=latency
        )

    monkeypatch.setitem(SCHEDULES, "mine", one_at_a_time)
    assert count_ticks(_two_stages("mine"), 2, 3) == Ticks(
        forward=6, backward=6, head=6, embed=6, embed_backward=6
    )


def test_stages_that_share_a_processor_take_part_of_a_tick():
    """Four stages on two processors: a microbatch takes half of a tick of one in each stage."""

    def ticks(microbatches, **shared):
        plan = plan_of("pipe=4", microbatches=microbatches)
        assert plan.pipeline is not None
        return count_ticks(plan.pipeline, 4, microbatches, **shared)[:2]

    assert ticks(1) == (4, 4)
    assert ticks(1, stages_per_processor=2) == (2, 2)
    # Half of the first processor, nine ticks of all of one, and half of the second.
    assert ticks(8, stages_per_processor=2) == (10, 10)
