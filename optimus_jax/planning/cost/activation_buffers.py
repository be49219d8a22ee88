"""How many slots a pipeline's rings have, in closed form: what pipeline/buffers.py deals out,
without its tables.

In flight on the first stage are the tasks between a microbatch's forward and its backward there;
the derivations are with the schedules (pipeline/one_f_one_b.py, gpipe.py, interleaved.py), and a
test holds these numbers to theirs.
"""

from dataclasses import dataclass
from functools import lru_cache

from optimus_jax.pipeline.buffers import Buffers
from optimus_jax.pipeline.schedule import Schedule
from optimus_jax.pipeline.tables import make_schedule
from optimus_jax.plan import Pipelining, Plan


@dataclass(frozen=True, kw_only=True)
class Rings:
    """Slots, the spare ones not counted."""

    inputs: int
    """Inputs of virtual stages."""
    residuals: int
    """What forward keeps; 0 where backward computes a stage again."""
    cotangents: int
    """Gradients by outputs of virtual stages."""
    ends_alone: bool
    """Whether the last phase is a single tick, which to XLA is no loop."""


def rings_of(plan: Plan) -> Rings:
    """The rings of a plan with stages."""
    pipeline = plan.pipeline
    assert pipeline is not None
    latency, stages, microbatches = (
        2 if pipeline.send_slack else 1,
        plan.axes.pipe,
        plan.microbatches,
    )
    if pipeline.table is not None or (
        pipeline.repeats > 1 and microbatches % max(1, microbatches // (latency * stages))
    ):
        # groups of unequal size, with slack: who waits for whom has no short formula
        return _of_table(pipeline, stages, microbatches)
    # One microbatch with slack goes through ticks in which nothing else happens, so that no two in
    # a row are alike.
    halting, keeps = latency > 1 and microbatches == 1, pipeline.keep_residuals
    if pipeline.schedule == "gpipe":
        return _rings(microbatches, keeps, cotangents=microbatches, ends_alone=halting)
    repeats, lap = pipeline.repeats, latency * stages
    group = max(lap, -(-microbatches // max(1, microbatches // lap)))
    in_flight = min(microbatches * repeats, (repeats - 1) * group + 2 * latency * (stages - 1) + 1)
    # In a group larger than a lap, what comes back to the first stage waits for the rest of the
    # group.
    waiting = group - lap if repeats > 1 else 0
    return _rings(
        in_flight,
        keeps,
        cotangents=1 + waiting,
        waiting=min(waiting, microbatches * repeats - in_flight if not keeps else waiting),
        ends_alone=repeats == 1 and (halting or latency * (stages - 1) == 1),
    )


def _rings(
    in_flight: int, keeps: bool, *, cotangents: int, ends_alone: bool, waiting: int = 0
) -> Rings:
    return Rings(
        inputs=(1 if keeps else in_flight) + waiting,
        residuals=in_flight if keeps else 0,
        cotangents=cotangents,
        ends_alone=ends_alone,
    )


@lru_cache(maxsize=256)
def _of_table(pipeline: Pipelining, stages: int, microbatches: int) -> Rings:
    """Dealt out, which takes milliseconds."""
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
    return Rings(
        inputs=buffers.num_inputs,
        residuals=buffers.num_residuals,
        cotangents=buffers.num_cotangents,
        ends_alone=last.num_ticks == 1 and last.backward and not last.forward,
    )
