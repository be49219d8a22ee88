"""Interleaved 1F1B: each device has several virtual stages, which makes the bubble as many times
smaller.
"""

import numpy as np
from numpy.typing import NDArray

from optimus_jax.errors import PlanError, explain
from optimus_jax.pipeline.one_f_one_b import one_f_one_b
from optimus_jax.pipeline.schedule import Schedule, check_counts, schedule_from_starts


def interleaved(
    num_stages: int, num_microbatches: int, num_repeats: int, latency: int = 1
) -> Schedule:
    """A group of microbatches runs one repeat after the other, then the next group; backward
    mirrors it.

    With S stages, M microbatches, V repeats, latency L: b(i, r) being `repeat_starts`, stage s runs
    forward of (i, r) in tick b(i, r) + L s, and backward in tick D + b(i, V - 1 - r) + L (S - 1 -
    s). G being the largest group, or L S if that is more, D = (V - 1) G + L (S - 1) is the tick in
    which the first microbatch leaves the last virtual stage, and no later D is needed: within every
    group repeat V - 1 starts at most (V - 1) G ticks after repeat 0.

    If M >= L S, no stage waits between its first and last forward, or backward, task: M V + L (S -
    1) ticks have forward work, as many backward, and the bubble is L (S - 1) / (M V). G is S for L
      = 1.
    With fewer (M = S, L = 2) microbatches wait for none but themselves: M + 2 L (S V - 1) ticks,
    which is what their way alone takes.

    Memory: where no stage waits, min(M V, (V - 1) G + 2 L (S - 1 - s) + 1) tasks in flight on stage
    s, each 1/V of a stage.

    The table would be right for any M; whole multiples of S keep groups, and so memory, small.

    Raises:
      PlanError: num_repeats > 1 and num_microbatches is no multiple of num_stages.
    Source: Narayanan et al. 2021, arXiv:2104.04473, section 2.2.
    """
    check_counts(
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        num_repeats=num_repeats,
        latency=latency,
    )
    if num_repeats == 1:
        return one_f_one_b(num_stages, num_microbatches, latency)
    below = num_microbatches // num_stages * num_stages
    if below != num_microbatches:
        raise PlanError(
            explain(
                "interleaving needs a multiple of the stages as microbatches",
                given=f"microbatches={num_microbatches}, pipe={num_stages}",
                do="choose microbatches="
                + " or ".join(str(n) for n in (below, below + num_stages) if n)
                + ", or schedule 1f1b, which takes any number",
            )
        )
    start = repeat_starts(num_stages, num_microbatches, num_repeats, latency)
    turn = int((start[:, -1] - start[:, 0]).max()) + latency * (num_stages - 1)
    return schedule_from_starts(
        "interleaved", start, turn + start[:, ::-1], num_stages=num_stages, latency=latency
    )


def repeat_starts(
    num_stages: int, num_microbatches: int, num_repeats: int, latency: int
) -> NDArray[np.int64]:
    """[microbatches, repeats]: tick in which stage 0 runs forward of each, such that it rarely
    waits.

    A microbatch is back on stage 0 a lap of L S ticks after it left. A group of at least that many
    microbatches fills the lap: one repeat of all of them takes as long as the group is large, so
    repeats follow each other without a gap, and groups too. Groups are as many as that allows and
    nearly equal, since the largest decides what is in flight. Fewer microbatches than a lap are
    one group that waits for the rest of each lap.
    """
    lap = latency * num_stages
    starts = np.zeros((num_microbatches, num_repeats), np.int64)
    begin = 0
    for group in np.array_split(np.arange(num_microbatches), max(1, num_microbatches // lap)):
        period = max(len(group), lap)
        starts[group] = begin + np.arange(len(group))[:, None] + period * np.arange(num_repeats)
        begin += period * num_repeats
    return starts
