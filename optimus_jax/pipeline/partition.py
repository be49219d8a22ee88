"""The number of consecutive layers that each virtual stage gets."""

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, pairwise

from optimus_jax.errors import PlanError, explain


def layers_per_stage(num_layers: int, num_virtual_stages: int) -> tuple[int, ...]:
    """Layers of each virtual stage, at least one, as even as possible.

    Later stages get the odd ones, because they have fewer microbatches in flight.

    Raises:
      PlanError: there are fewer layers than virtual stages, or no virtual stage.
    """
    if num_virtual_stages < 1:
        raise PlanError(
            explain(
                "a pipeline needs stages",
                given=f"pipe*repeats={num_virtual_stages}",
                do="set pipe=1 or more",
            )
        )
    if num_layers < num_virtual_stages:
        raise PlanError(
            explain(
                "there are fewer layers than virtual stages",
                given=f"num_layers={num_layers}, pipe*repeats={num_virtual_stages}",
                do=f"choose pipe and repeats such that pipe*repeats is {num_layers} or less"
                if num_layers > 0
                else "set num_layers=1 or more",
            )
        )
    fewest, odd = divmod(num_layers, num_virtual_stages)
    return (fewest,) * (num_virtual_stages - odd) + (fewest + 1,) * odd


@lru_cache(maxsize=1 << 8)
def balanced_layers(costs: Sequence[float], num_virtual_stages: int) -> tuple[int, ...]:
    """Layers of each virtual stage, at least one, such that the costliest one costs least.

    Args:
      costs: of each layer, in order; a tuple.
    """
    layers_per_stage(len(costs), num_virtual_stages)  # raises if there are too few
    before = (0.0, *accumulate(costs))
    # The least cost of the costliest of `stages` that hold the first `end` layers, and where the
    # last one of them begins.
    best = [[(before[end], 0) for end in range(len(before))]]
    for stages in range(1, num_virtual_stages):
        best.append(
            [
                min(
                    (max(best[-1][start][0], before[end] - before[start]), start)
                    for start in range(stages, end)
                )
                if end > stages
                else (float("inf"), 0)
                for end in range(len(before))
            ]
        )
    ends = [len(costs)]
    for stages in reversed(range(1, num_virtual_stages)):
        ends.append(best[stages][ends[-1]][1])
    ends = [0, *reversed(ends)]
    return tuple(end - start for start, end in pairwise(ends))
