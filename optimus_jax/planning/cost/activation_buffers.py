"""Compute the number of slots in a pipeline's activation buffers, in closed form.

pipeline/buffers.py allocates the slots. With hundreds of microbatches that takes up to 70 ms, too
long for a search, so this module computes only their number. A test compares the two. `in_flight`
is the largest number of tasks on the first stage whose forward has run and whose backward has not.
The derivations are with the schedules (pipeline/one_f_one_b.py, gpipe.py, interleaved.py).
"""

from dataclasses import dataclass
from functools import lru_cache

from optimus_jax.pipeline.buffers import Buffers
from optimus_jax.pipeline.schedule import Schedule
from optimus_jax.pipeline.tables import make_schedule
from optimus_jax.plan import Pipelining, Plan
from optimus_jax.planning.cost.pipeline_time import CLOSED_FORMS, group_size


@dataclass(frozen=True, kw_only=True)
class BufferSlots:
    """Number of slots in each buffer, without the spare slot."""

    inputs: int
    """Inputs of virtual stages."""
    residuals: int
    """Residuals saved by forward; 0 if backward recomputes the stage."""
    cotangents: int
    """Gradients with respect to outputs of virtual stages."""
    ends_in_single_tick: bool
    """Whether the last phase is a single tick, which XLA does not compile to a loop."""


def buffer_slots(plan: Plan) -> BufferSlots:
    """The number of slots for a plan with pipeline stages."""
    pipeline = plan.pipeline
    assert pipeline is not None
    latency, stages, microbatches = (
        2 if pipeline.send_slack else 1,
        plan.axes.pipe,
        plan.microbatches,
    )
    has_form = pipeline.table is None and pipeline.schedule in CLOSED_FORMS
    if not has_form or (
        pipeline.repeats > 1 and microbatches % max(1, microbatches // (latency * stages))
    ):
        # Groups of unequal size have no simple closed form.
        return _of_table(pipeline, stages, microbatches)
    # A single microbatch with slack alternates between computing and sending ticks, so no two
    # consecutive ticks are alike.
    halting, keeps = latency > 1 and microbatches == 1, pipeline.keep_residuals
    if pipeline.schedule == "gpipe":
        return _buffer_slots(
            microbatches, keeps, cotangents=microbatches, ends_in_single_tick=halting
        )
    repeats, lap = pipeline.repeats, latency * stages
    group = group_size(stages, microbatches, latency)
    in_flight = min(microbatches * repeats, (repeats - 1) * group + 2 * latency * (stages - 1) + 1)
    # If a group is larger than a lap, activations that return to the first stage wait for the rest
    # of the group.
    waiting = group - lap if repeats > 1 else 0
    return _buffer_slots(
        in_flight,
        keeps,
        cotangents=1 + waiting,
        waiting=min(waiting, microbatches * repeats - in_flight if not keeps else waiting),
        ends_in_single_tick=repeats == 1 and (halting or latency * (stages - 1) == 1),
    )


def _buffer_slots(
    in_flight: int, keeps: bool, *, cotangents: int, ends_in_single_tick: bool, waiting: int = 0
) -> BufferSlots:
    return BufferSlots(
        inputs=(1 if keeps else in_flight) + waiting,
        residuals=in_flight if keeps else 0,
        cotangents=cotangents,
        ends_in_single_tick=ends_in_single_tick,
    )


@lru_cache(maxsize=256)
def _of_table(pipeline: Pipelining, stages: int, microbatches: int) -> BufferSlots:
    """The number of slots that pipeline/buffers.py allocates."""
    schedule = (
        Schedule.from_json(pipeline.table)
        if pipeline.table is not None
        else make_schedule(
            pipeline.schedule,
            stages,
            microbatches,
            pipeline.repeats,
            2 if pipeline.send_slack else 1,
        )
    )
    buffers, last = (
        Buffers.of(schedule, keep_residuals=pipeline.keep_residuals),
        schedule.phases()[-1],
    )
    return BufferSlots(
        inputs=buffers.num_inputs,
        residuals=buffers.num_residuals,
        cotangents=buffers.num_cotangents,
        ends_in_single_tick=last.num_ticks == 1 and last.backward and not last.forward,
    )
