"""Count the ticks of each kind in a schedule.

In lockstep every tick lasts as long as its slowest stage, so these counts and the time of one tick
of each kind determine the time of a step. Named schedules have closed forms, which tests compare
with their tables. Where there is no closed form, the ticks are counted in the table.

Stages on virtual devices share a processor. One that is idle leaves its share to the others, so a
tick takes the part of its time that busy stages need: if half of them are, half a tick.
"""

from functools import lru_cache
from typing import NamedTuple

from optimus_jax.pipeline.schedule import IDLE, Schedule, Table
from optimus_jax.pipeline.tables import make_schedule
from optimus_jax.plan import Pipelining

CLOSED_FORMS = ("gpipe", "1f1b", "interleaved")
"""Schedules that the planner has formulas for; ticks and buffers of others are counted in their
tables."""


class Ticks(NamedTuple):
    """Numbers of ticks in one step."""

    forward: float
    """Ticks in which at least one stage runs a forward task."""
    backward: float
    """Ticks in which at least one stage runs a backward task."""
    head: int
    """Ticks in which the last stage broadcasts its output: those of phases in which some tick has a
    head (pipeline/executor.py)."""
    embed: int
    """Ticks that compute an embedding: those of phases in which some tick needs one."""
    embed_backward: int
    """Ticks in which the first stage broadcasts its input's gradient: those of phases in which some
    tick has an embedding's backward."""


def count_ticks(
    pipeline: Pipelining, num_stages: int, num_microbatches: int, *, stages_per_processor: int = 1
) -> Ticks:
    """The ticks of a pipeline's schedule.

    Args:
      stages_per_processor: consecutive stages that share a processor.
    Raises:
      PlanError: its table is not a valid schedule, or no schedule exists for these numbers.
    """
    useful, latency = num_microbatches * pipeline.repeats, 2 if pipeline.send_slack else 1
    if pipeline.table is not None:
        return _in_table(pipeline.table, stages_per_processor)
    # With this many microbatches, tasks on every stage follow each other without a gap. With fewer,
    # some ticks only send, or wait for a lap to end.
    fewest = latency if pipeline.repeats == 1 else latency * num_stages
    has_form = pipeline.schedule in CLOSED_FORMS and num_microbatches >= fewest
    if has_form and stages_per_processor == 1:
        ticks = useful + latency * (num_stages - 1)
        if pipeline.schedule == "gpipe":
            return Ticks(ticks, ticks, head=ticks, embed=ticks, embed_backward=ticks)
        # From the tick in which backward begins (pipeline/interleaved.py) there is one phase with
        # forward and backward. All heads are in it, and embeddings if a microbatch begins so late.
        repeating = (pipeline.repeats - 1) * group_size(num_stages, num_microbatches, latency)
        backward_begins = repeating + latency * (num_stages - 1)
        embed = ticks if useful - repeating > backward_begins else backward_begins
        head = ticks - backward_begins
        return Ticks(ticks, ticks, head=head, embed=embed, embed_backward=embed)
    return _in_schedule(
        pipeline.schedule,
        num_stages,
        num_microbatches,
        pipeline.repeats,
        latency,
        stages_per_processor,
    )


def group_size(num_stages: int, num_microbatches: int, latency: int) -> int:
    """Microbatches that an interleaved schedule runs in turns (pipeline/interleaved.py): those of
    its largest group.
    """
    lap = latency * num_stages
    return max(lap, -(-num_microbatches // max(1, num_microbatches // lap)))


@lru_cache(maxsize=1 << 8)
def _in_table(table: str, stages_per_processor: int) -> Ticks:
    """The ticks of a user's table."""
    return _counted(Schedule.from_json(table), stages_per_processor)


@lru_cache(maxsize=1 << 12)
def _in_schedule(
    name: str,
    num_stages: int,
    num_microbatches: int,
    num_repeats: int,
    latency: int,
    stages_per_processor: int,
) -> Ticks:
    """The ticks of a named schedule that has no closed form."""
    schedule = make_schedule(name, num_stages, num_microbatches, num_repeats, latency)
    return _counted(schedule, stages_per_processor)


def _counted(schedule: Schedule, stages_per_processor: int) -> Ticks:
    def count(table: Table) -> float:
        by_processor = (table != IDLE).reshape(len(table), -1, stages_per_processor)
        return float(by_processor.sum(axis=2).max(axis=1).sum() / stages_per_processor)

    of_phases = {
        kind: sum(phase.num_ticks for phase in schedule.phases() if getattr(phase, kind))
        for kind in ("head", "embed", "embed_backward")
    }
    return Ticks(count(schedule.forward), count(schedule.backward), **of_phases)
