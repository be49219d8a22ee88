"""The built-in schedules, by name."""

from collections.abc import Callable
from functools import lru_cache

from optimus_jax.errors import PlanError, explain, nearest
from optimus_jax.pipeline.gpipe import gpipe
from optimus_jax.pipeline.interleaved import interleaved
from optimus_jax.pipeline.one_f_one_b import one_f_one_b
from optimus_jax.pipeline.schedule import Schedule

SCHEDULES: dict[str, Callable[[int, int, int, int], Schedule]] = {
    "gpipe": lambda num_stages, num_microbatches, _, latency: gpipe(
        num_stages, num_microbatches, latency
    ),
    "1f1b": lambda num_stages, num_microbatches, _, latency: one_f_one_b(
        num_stages, num_microbatches, latency
    ),
    "interleaved": interleaved,
}
"""Name -> builder (stages, microbatches, repeats, latency) of a schedule for training."""
MOST_TASKS = 2**26
"""Largest number of tasks of a schedule; more would be a typing mistake, and take gigabytes."""
REPEATING = ("interleaved",)
"""Schedules that support more than one repeat."""


@lru_cache(maxsize=64)  # a search checks the same few tables for thousands of layouts
def make_schedule(
    name: str, num_stages: int, num_microbatches: int, num_repeats: int = 1, latency: int = 1
) -> Schedule:
    """The schedule called `name`.

    Raises PlanError for an unknown name or for counts that the schedule does not support.
    """
    if name not in SCHEDULES:
        raise PlanError(
            explain(f"unknown schedule {name!r}", given=name, do=nearest(name, SCHEDULES))
        )
    if num_repeats != 1 and name not in REPEATING:
        raise PlanError(
            explain(
                f"schedule {name!r} visits each device once",
                given=f"repeats={num_repeats}",
                do=f"set repeats=1, or choose schedule {' or '.join(REPEATING)}",
            )
        )
    if num_stages * num_microbatches * num_repeats > MOST_TASKS:
        raise PlanError(
            explain(
                f"a schedule has {MOST_TASKS:,} tasks at most",
                given=(
                    f"stages={num_stages}, microbatches={num_microbatches}, repeats={num_repeats}"
                ),
                do="use fewer",
            )
        )
    return SCHEDULES[name](num_stages, num_microbatches, num_repeats, latency)
