"""The number of consecutive layers that each virtual stage gets, and what they cost."""

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, islice, pairwise

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


def stage_costs(layers_per_stage: Sequence[int], costs: Sequence[float]) -> list[float]:
    """Cost of each virtual stage: the sum of its layers' costs.

    Args:
      layers_per_stage: of each virtual stage, in the order in which a microbatch visits them.
      costs: of each layer, in order.
    """
    remaining = iter(costs)
    return [sum(islice(remaining, number)) for number in layers_per_stage]


@lru_cache(maxsize=1 << 8)
def balanced_layers(
    costs: tuple[float, ...], num_virtual_stages: int, factors: tuple[float, ...] = ()
) -> tuple[int, ...]:
    """Layers of each virtual stage, at least one, such that the costliest one costs least.

    Args:
      costs: of each layer, in order.
      factors: on the cost of each virtual stage; empty: all 1.
    """
    layers_per_stage(len(costs), num_virtual_stages)  # raises if there are too few
    factors = factors or (1.0,) * num_virtual_stages
    before = (0.0, *accumulate(costs))
    # The least cost of the costliest of `stages` that hold the first `end` layers, and where the
    # last one of them begins.
    best = [[(factors[0] * before[end], 0) for end in range(len(before))]]
    for stages in range(1, num_virtual_stages):
        best.append(
            [
                min(
                    (
                        max(best[-1][start][0], factors[stages] * (before[end] - before[start])),
                        start,
                    )
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
