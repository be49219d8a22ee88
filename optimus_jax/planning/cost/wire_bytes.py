"""The bytes that a device sends in a step, as a compiled program's are counted
(planning/ahead_of_time/compile_report.py)."""

import math

from optimus_jax.plan import Plan
from optimus_jax.planning.cost.communication import CommunicationOp
from optimus_jax.planning.cost.cost import StepTimes
from optimus_jax.planning.cost.implementation_profile import OURS
from optimus_jax.planning.cost.mesh_costs import ClusterCosts
from optimus_jax.planning.cost.rates import Rates
from optimus_jax.planning.cost.workload import Workload
from optimus_jax.planning.profiles.cluster import Cluster
from optimus_jax.planning.profiles.measurements import PERMUTE, WIRE_SHARE


def wire_bytes(
    workload: Workload, plan: Plan, cluster: Cluster, rates: Rates
) -> dict[tuple[str, tuple[str, ...]], float]:
    """The predicted bytes that a device sends in a step, in rings, by kind and mesh axes. What a
    generator, or the reference of preferences, exchanges is not in it.

    Raises what `predict` raises.
    """
    steps = StepTimes(ClusterCosts(workload, cluster, rates, OURS), plan)
    ops = [op for op, _, _ in steps.mesh_costs.exchanges(plan)] + [
        op._replace(count=_runs(op, steps) * op.count)
        for op in steps.mesh_costs.outside_layers(plan)
    ]
    sent: dict[tuple[str, tuple[str, ...]], float] = {}
    for op in ops:
        kind = PERMUTE if op.kind == "send" else op.kind
        # An axis of one device is in no compiled group.
        axes = tuple(axis for axis in op.axes if plan.axes[axis] > 1)
        share = WIRE_SHARE[kind](math.prod([plan.axes[axis] for axis in axes]))
        sent[kind, axes] = sent.get((kind, axes), 0.0) + share * op.count * op.num_bytes
    return {key: num_bytes for key, num_bytes in sent.items() if num_bytes}


def _runs(op: CommunicationOp, steps: StepTimes) -> float:
    """How often a step runs the part of `op`: gathers of what other stages have sent are in tasks
    (pipeline/stage_parts.py), all else is in every tick of its phase.
    """
    pipeline, microbatches = steps.plan.pipeline, steps.plan.microbatches
    if op.kind == "all-gather" and pipeline is not None:
        if op.part == "tick":
            return 2 * steps.streams * pipeline.repeats * microbatches
        if op.part == "broadcast":
            return (steps.streams + steps.trains_embed) * microbatches
    return steps.runs_outside[op.part]
