"""Interleaved 1F1B: each device has several virtual stages, which divides the bubble by their
number.
"""

import numpy as np
from numpy.typing import NDArray

from optimus_jax.errors import PlanError, explain
from optimus_jax.pipeline.one_f_one_b import one_f_one_b
from optimus_jax.pipeline.schedule import Schedule, check_counts, schedule_from_starts


def interleaved(
    num_stages: int, num_microbatches: int, num_repeats: int, latency: int = 1
) -> Schedule:
    """A group of microbatches runs all its repeats, one after the other, and then the next group
    starts; backward mirrors this order.

    There are S stages, M microbatches, V repeats and latency L; b(i, r) is `repeat_starts` of
    microbatch i and repeat r. Stage s runs forward of (i, r) in tick b(i, r) + L s, and its
    backward in tick D + b(i, V - 1 - r) + L (S - 1 - s). Let G be the size of the largest group, or
    L S if that is more. D = (V - 1) G + L (S - 1) is the tick in which the last virtual stage
    finishes its first microbatch. A later D is not needed: in every group, repeat V - 1 starts at
    most (V - 1) G ticks after repeat 0.

    If M >= L S, no stage waits between its first and its last forward task, nor between its first
    and its last backward task. Then M V + L (S - 1) ticks have forward work and as many have
    backward work, and the bubble is L (S - 1) / (M V). For L = 1, G is S.
    If M < L S (M = S, L = 2), microbatches do not wait for each other, and there are M + 2 L (S V -
    1) ticks: the time of one microbatch's path, and M - 1 ticks for the others.

    Memory: where no stage waits, stage s has min(M V, (V - 1) G + 2 L (S - 1 - s) + 1) tasks in
    flight, each with 1/V of a device's layers.

    The table would be valid for any M; multiples of S keep the groups, and therefore memory, small.

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
    """[microbatches, repeats]: tick in which stage 0 runs forward of each, chosen so that stage 0
    rarely waits.

    A microbatch returns to stage 0 one lap, L S ticks, after it started there. A group of at least
    that many microbatches fills the lap: one repeat of the group takes as many ticks as it has
    microbatches, so repeats follow each other without a gap, and so do groups. There are as many
    groups as this allows, of nearly equal size, because the largest group determines how many tasks
    are in flight. If there are fewer microbatches than ticks in a lap, they form one group, and
    stage 0 waits for the rest of each lap.
    """
    lap = latency * num_stages
    starts = np.zeros((num_microbatches, num_repeats), np.int64)
    begin = 0
    for group in np.array_split(np.arange(num_microbatches), max(1, num_microbatches // lap)):
        period = max(len(group), lap)
        starts[group] = begin + np.arange(len(group))[:, None] + period * np.arange(num_repeats)
        begin += period * num_repeats
    return starts
