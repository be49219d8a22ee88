"""GPipe (all forward tasks, then all backward tasks), and forward-only schedules."""

import numpy as np

from optimus_jax.pipeline.interleaved import repeat_starts
from optimus_jax.pipeline.schedule import Schedule, check_counts, schedule_from_starts


def gpipe(num_stages: int, num_microbatches: int, latency: int = 1) -> Schedule:
    """Every microbatch's forward pass, then every backward pass.

    With S stages, M microbatches and latency L, stage s runs forward of microbatch i in tick i + L
    s and its backward in tick M + L (S - 1) + i + L (S - 1 - s). There are 2 (M + L (S - 1)) ticks,
    half of them forward, so the bubble is L (S - 1) / M. Backward runs in the order of forward, so
    gradients are summed in the same order as in 1F1B.

    Memory: every stage has M microbatches in flight, and M cotangents from the head.

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
    """The forward tasks of `interleaved`, for any number of microbatches and without backward. Used
    for evaluation.

    With S stages, latency L and at least L S microbatches (M), no stage waits between its first and
    its last task, and there are M num_repeats + L (S - 1) ticks. Memory: only inputs on their way
    between stages; no task is in flight.
    """
    check_counts(
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        num_repeats=num_repeats,
        latency=latency,
    )
    start = repeat_starts(num_stages, num_microbatches, num_repeats, latency)
    return schedule_from_starts("forward", start, None, num_stages=num_stages, latency=latency)
