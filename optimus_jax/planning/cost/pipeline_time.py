"""How many ticks of each kind a schedule has.

In lockstep every tick lasts as long as its slowest stage, so these counts and the time of one tick
of each kind are the time of a step. The named schedules have closed forms, which tests hold to the
tables; what has none is counted in its table.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from optimus_jax.pipeline.schedule import IDLE, Schedule
from optimus_jax.pipeline.tables import make_schedule
from optimus_jax.plan import Pipelining


@dataclass(frozen=True)
class Ticks:
    """Of one step."""

    forward: int
    """In which some stage runs a forward task, and the others compute along on idle data."""
    backward: int
    """The same for backward tasks."""
    useful: int
    """Forward tasks of a stage, and as many backward: the ticks that it would need without
    waiting."""


@lru_cache(maxsize=1 << 14)
def count_ticks(pipeline: Pipelining, num_stages: int, num_microbatches: int) -> Ticks:
    """The ticks of a pipeline's schedule.

    Raises PlanError if its table is no schedule, or there is none for these numbers.
    """
    useful, latency = num_microbatches * pipeline.repeats, 2 if pipeline.send_slack else 1
    if pipeline.table is not None:
        return _counted(Schedule.from_json(pipeline.table), useful)
    # Tasks follow each other on every stage without a gap: with fewer microbatches some ticks only
    # send, or wait for a lap to end.
    if num_microbatches >= (latency if pipeline.repeats == 1 else latency * num_stages):
        ticks = useful + latency * (num_stages - 1)
        return Ticks(ticks, ticks, useful)
    return _counted(
        make_schedule(pipeline.schedule, num_stages, num_microbatches, pipeline.repeats, latency),
        useful,
    )


def _counted(schedule: Schedule, useful: int) -> Ticks:
    forward, backward = (
        int(np.count_nonzero((table != IDLE).any(axis=1)))
        for table in (schedule.forward, schedule.backward)
    )
    return Ticks(forward, backward, useful)
