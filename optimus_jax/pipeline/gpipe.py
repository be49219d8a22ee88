"""GPipe: all forward tasks, then all backward tasks; and schedules with forward tasks alone."""

import numpy as np

from optimus_jax.pipeline.interleaved import repeat_starts
from optimus_jax.pipeline.schedule import Schedule, check_counts, schedule_from_starts


def gpipe(num_stages: int, num_microbatches: int, latency: int = 1) -> Schedule:
    """Every microbatch's forward pass, then every backward pass.

    With S stages, M microbatches, latency L: stage s runs forward of microbatch i in tick i + L s
    and its backward in tick M + L (S - 1) + i + L (S - 1 - s). 2 (M + L (S - 1)) ticks, half of
    them forward: the bubble is L (S - 1) / M. Microbatches come back in the order in which they
    went, so gradients are summed in the order of 1F1B.

    Memory: M microbatches in flight on every stage, and M cotangents that the head made.

    Source: Huang et al. 2019, arXiv:1811.06965.
    """
    check_counts(
        num_stages=num_stages, num_microbatches=num_microbatches, num_repeats=1, latency=latency
    )
    start = np.arange(num_microbatches)[:, None]
    turn = num_microbatches + latency * (num_stages - 1)
    return schedule_from_starts(
        "gpipe", start, turn + start, num_stages=num_stages, latency=latency
    )


def forward_only(
    num_stages: int, num_microbatches: int, num_repeats: int = 1, latency: int = 1
) -> Schedule:
    """The forward tasks of `interleaved` for any number of microbatches, and no backward: for
    evaluation.

    With at least L S microbatches no stage waits between its first and its last task:
    M num_repeats + L (S - 1) ticks. Memory: what is on its way, nothing in flight.
    """
    check_counts(
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        num_repeats=num_repeats,
        latency=latency,
    )
    start = repeat_starts(num_stages, num_microbatches, num_repeats, latency)
    return schedule_from_starts("forward", start, None, num_stages=num_stages, latency=latency)
