"""Gives slow pipeline stages less to compute. If some processes compute more slowly than the
others, all stages wait for theirs.

Layers can be divided unevenly. Rows cannot, because every process runs the same program on shards
of the same shape.
"""

import heapq
from collections.abc import Sequence
from dataclasses import replace

from optimus_jax.pipeline.partition import balanced_layers, stage_costs
from optimus_jax.plan import Plan


def stage_factors(plan: Plan, factors: Sequence[float]) -> list[float]:
    """Factor on the compute time of each stage: that of its slowest device.

    Args:
      plan: the plan, on as many devices as there are factors.
      factors: factor on the compute time of each device, in mesh order.
    """
    size = len(factors) // plan.axes.pipe
    return [max(factors[first : first + size]) for first in range(0, len(factors), size)]


def effective_skew(plan: Plan, factors: Sequence[float], shares: Sequence[float]) -> float:
    """Factor on the compute time of the slowest stage of `plan`: less than the largest of the
    devices' factors if the slow stages have less to compute.

    Args:
      factors: as of `stage_factors`.
      shares: compute time of each layer, in that of the mean layer (`Workload.layer_shares`).
    """
    if plan.pipeline is None:
        return max(factors)
    costs = stage_costs(plan.pipeline.layers_per_stage, shares)
    times = zip(costs, _virtual_stage_factors(plan, factors), strict=True)
    return max(cost * factor for cost, factor in times) / max(costs)


def rebalanced(plan: Plan, factors: Sequence[float], shares: tuple[float, ...]) -> Plan | None:
    """The plan with its layers divided so that the slowest stage is as fast as possible; None: they
    already are, or the plan has no stages.

    Args:
      factors, shares: as of `effective_skew`.
    """
    if plan.pipeline is None:
        return None
    factors = _virtual_stage_factors(plan, factors)
    layers = (
        _assigned_layers(len(shares), factors)
        if len(set(shares)) == 1
        else balanced_layers(shares, len(factors), tuple(factors))
    )
    other = replace(plan, pipeline=replace(plan.pipeline, layers_per_stage=layers))

    def slowest(each: Sequence[int]) -> float:
        costs = stage_costs(each, shares)
        return max(cost * factor for cost, factor in zip(costs, factors, strict=True))

    return other if slowest(layers) < slowest(plan.pipeline.layers_per_stage) else None


def _virtual_stage_factors(plan: Plan, factors: Sequence[float]) -> list[float]:
    """`stage_factors` of each virtual stage; these are assigned to devices round-robin."""
    assert plan.pipeline is not None
    return stage_factors(plan, factors) * plan.pipeline.repeats


def _assigned_layers(num_layers: int, factors: Sequence[float]) -> tuple[int, ...]:
    """Number of layers of each stage, at least one, if all layers cost the same. Each further layer
    goes to the stage that is fastest with it, which is optimal.
    """
    layers = [1] * len(factors)
    queue = [(2 * factor, -place) for place, factor in enumerate(factors)]
    heapq.heapify(queue)
    for _ in range(num_layers - len(factors)):
        place = -queue[0][1]
        layers[place] += 1
        heapq.heapreplace(queue, ((layers[place] + 1) * factors[place], -place))
    return tuple(layers)
