"""The closed form of ticks equals the count in schedule tables."""

import pytest
from pricing import plan_of

from optimus_jax.pipeline.schedule import IDLE
from optimus_jax.plan import Pipelining
from optimus_jax.planning.cost.pipeline_time import Ticks, count_ticks

SCHEDULES = [
    (name, stages, microbatches, repeats, slack)
    for name, repeats in (("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3))
    for stages in (2, 3, 4)
    for microbatches in (1, 2, 3, 4, 6, 8, 9, 12)
    for slack in (False, True)
    if repeats == 1 or microbatches % stages == 0
]


@pytest.mark.parametrize(("name", "stages", "microbatches", "repeats", "slack"), SCHEDULES)
def test_tick_counts_equal_those_of_the_schedule_table(name, stages, microbatches, repeats, slack):
    plan = plan_of(
        f"pipe={stages}", schedule=name, repeats=repeats, slack=slack, microbatches=microbatches
    )
    schedule = plan.schedule()
    forward, backward = (
        (table != IDLE).any(axis=1).sum() for table in (schedule.forward, schedule.backward)
    )
    assert plan.pipeline is not None
    assert count_ticks(plan.pipeline, stages, microbatches) == Ticks(
        forward, backward, microbatches * repeats
    )


def test_ticks_of_a_user_written_table_are_counted():
    """The table has an idle tick between forward and backward."""
    table = (
        '{"name": "mine", "stages": 2, "microbatches": 2, "repeats": 1, "latency": 1, "forward":'
        ' [[0, -1], [1, 0], [-1, 1], [-1, -1], [-1, -1]], "backward": [[-1, -1], [-1, -1], [-1, 0],'
        " [0, 1], [1, -1]]}"
    )
    pipeline = Pipelining(
        schedule="mine",
        layers_per_stage=(1, 1),
        repeats=1,
        send_slack=False,
        keep_residuals=True,
        table=table,
    )
    assert count_ticks(pipeline, 2, 2) == Ticks(forward=3, backward=3, useful=2)
