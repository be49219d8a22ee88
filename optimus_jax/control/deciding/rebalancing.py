"""Gives slow pipeline stages fewer layers. If some processes compute more slowly than the others,
all stages wait for theirs.

Layers can be divided unevenly. Rows cannot, because every process runs the same program on shards
of the same shape.
"""

import heapq
from collections.abc import Sequence
from dataclasses import replace

from optimus_jax.plan import Plan


def stage_factors(plan: Plan, factors: Sequence[float]) -> list[float]:
    """Factor on the compute time of each stage: that of its slowest device.

    Args:
      plan: the plan, on as many devices as there are factors.
      factors: factor on the compute time of each device, in mesh order.
    """
    size = len(factors) // plan.axes.pipe
    return [max(factors[first : first + size]) for first in range(0, len(factors), size)]


def effective_skew(plan: Plan, factors: Sequence[float]) -> float:
    """Factor on the compute time of the slowest stage of `plan`: less than the largest of the
    devices' factors if the slow stages have fewer layers.
    """
    if plan.pipeline is None:
        return max(factors)
    layers, factors = plan.pipeline.layers_per_stage, stage_factors(plan, factors)
    # Virtual stages are assigned to devices round-robin.
    times = [number * factors[place % plan.axes.pipe] for place, number in enumerate(layers)]
    return max(times) / max(layers)


def rebalanced(plan: Plan, factors: Sequence[float]) -> Plan | None:
    """The plan with its layers divided so that the slowest stage is as fast as possible; None: they
    already are, or the plan has no stages.
    """
    if plan.pipeline is None:
        return None
    factors = stage_factors(plan, factors)
    num_virtual = len(plan.pipeline.layers_per_stage)
    layers = _assigned_layers(
        sum(plan.pipeline.layers_per_stage),
        [factors[place % plan.axes.pipe] for place in range(num_virtual)],
    )
    other = replace(plan, pipeline=replace(plan.pipeline, layers_per_stage=layers))

    def slowest(each: Sequence[int]) -> float:
        return max(number * factors[place % plan.axes.pipe] for place, number in enumerate(each))

    return other if slowest(layers) < slowest(plan.pipeline.layers_per_stage) else None


def _assigned_layers(num_layers: int, factors: Sequence[float]) -> tuple[int, ...]:
    """Number of layers of each stage, at least one. Each further layer goes to the stage that is
    fastest with it, which is optimal (pipeline/partition.py).
    """
    layers = [1] * len(factors)
    queue = [(2 * factor, -place) for place, factor in enumerate(factors)]
    heapq.heapify(queue)
    for _ in range(num_layers - len(factors)):
        place = -queue[0][1]
        layers[place] += 1
        heapq.heapreplace(queue, ((layers[place] + 1) * factors[place], -place))
    return tuple(layers)
