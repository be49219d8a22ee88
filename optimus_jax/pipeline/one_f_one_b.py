"""1F1B in lockstep: each stage alternates one forward with one backward task."""

import numpy as np

from optimus_jax.pipeline.schedule import Schedule, check_counts, schedule_from_starts


def one_f_one_b(num_stages: int, num_microbatches: int, latency: int = 1) -> Schedule:
    """The backward pass of a microbatch begins in the tick in which the last stage finishes its
    forward pass.

    With S stages, M microbatches and latency L, stage s runs forward of microbatch i in tick i + L
    s and its backward in tick i + L (2 (S - 1) - s). There are M + 2 L (S - 1) ticks, of which M +
    L (S - 1) have forward work and as many have backward work, so the bubble is L (S - 1) / M.
    (With M = 1 and L = 2, every other tick only sends, which the bubble does not count.)

    Memory: stage s has min(M, 2 L (S - 1 - s) + 1) microbatches in flight. Without lockstep S - s
    would be enough; in lockstep, the microbatches on their way to the last stage and back are
    added.

    Source: Narayanan et al. 2021, arXiv:2006.09503 (PipeDream-flush).
    """
    check_counts(
        num_stages=num_stages, num_microbatches=num_microbatches, num_repeats=1, latency=latency
    )
    start = np.arange(num_microbatches)[:, None]
    return schedule_from_starts(
        "1f1b", start, start + latency * (num_stages - 1), num_stages=num_stages, latency=latency
    )
