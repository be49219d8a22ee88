"""The times of a step's parts, which many plans with one mesh and the same rules share.

A search prices dozens of plans on a mesh. They differ in schedules and repeats, which change how
often a part runs, and agree in what it takes.
"""

import math
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import NamedTuple

from optimus_jax.config import AttentionKernel, Precision
from optimus_jax.config.axes import FSDP, TENSOR, AxisSizes
from optimus_jax.mesh.rules import Rules
from optimus_jax.plan import Plan
from optimus_jax.planning.cost.communication import (
    LAYER_PARTS,
    OUTSIDE_LAYERS,
    CommunicationOp,
    StepPart,
    head_ops,
    layer_ops,
    step_ops,
    tick_ops,
)
from optimus_jax.planning.cost.communication_time import CommunicationTimes
from optimus_jax.planning.cost.head_program import head_program, head_sizes
from optimus_jax.planning.cost.implementation_profile import ImplementationProfile
from optimus_jax.planning.cost.layer_shape import LayerShape, layer_shape, shape_point
from optimus_jax.planning.cost.parameters import layers_on_device, updated_params
from optimus_jax.planning.cost.rates import Rates, ShapePoint
from optimus_jax.planning.cost.stage_time import LayerTime, embed_time, head_time, layer_time
from optimus_jax.planning.cost.workload import Workload
from optimus_jax.planning.profiles.cluster import Cluster


class LayerCosts(NamedTuple):
    """Seconds of one layer of a microbatch on one device."""

    compute: LayerTime
    """Without communication."""
    forward: float
    """Forward, with communication."""
    backward: float
    """Backward, with communication."""
    exposed: Mapping[str, float]
    """Communication forward and backward, by mesh axis."""


class MicrobatchCosts(NamedTuple):
    """Seconds of one microbatch on one device, without its layers."""

    shape: LayerShape
    place: ShapePoint
    """Where corrections are looked up (planning/cost/corrections.py)."""
    head: float
    """Compute of embedding, head and loss."""
    embed_again: float
    """Compute of an embedding in a tick that needs none."""
    exposed: Mapping[StepPart, float]
    """Communication of an embedding, of head and loss, of a broadcast from a stage to all, and of a
    tick's send to the next stage."""


class StepEnd(NamedTuple):
    """What a step has once."""

    exposed: Mapping[str, float]
    """Seconds of communication, by mesh axis."""
    updated_params: float
    """Parameters that the optimizer updates on one device."""


class MeshCosts:
    """Times of parts of steps on one mesh. Parts are computed once for all plans that share them;
    the plans given agree in axes, rules, precision and kernel.

    All methods raise PlanError if the plan sends over a link of unknown speed.
    """

    def __init__(
        self,
        workload: Workload,
        axes: AxisSizes,
        cluster: Cluster,
        rates: Rates,
        implementation: ImplementationProfile,
    ):
        self._workload, self._rates, self._implementation = workload, rates, implementation
        self._time_of = CommunicationTimes(axes, cluster, rates).time
        self._microbatches: dict[tuple, MicrobatchCosts] = {}
        self._layers: dict[tuple, LayerCosts] = {}
        self._step_ends: dict[tuple, StepEnd] = {}

    def layer(self, plan: Plan) -> LayerCosts:
        """One layer of a microbatch."""
        recomputes = plan.pipeline is not None and not plan.pipeline.keep_residuals
        key = plan.microbatches, plan.zero, plan.remat, recomputes
        found = self._layers.get(key)
        if found is None:
            found = self._layers[key] = self._layer(plan, recomputes)
        return found

    def microbatch(self, plan: Plan) -> MicrobatchCosts:
        """A microbatch without its layers."""
        key = plan.microbatches, plan.pipeline and plan.pipeline.send_slack
        found = self._microbatches.get(key)
        if found is None:
            found = self._microbatches[key] = self._microbatch(plan)
        return found

    def step_end(self, plan: Plan) -> StepEnd:
        """What the step has once."""
        gathers = plan.microbatches if plan.pipeline is None else 1
        key = plan.zero, layers_on_device(self._workload.model, plan), gathers
        found = self._step_ends.get(key)
        if found is None:
            found = self._step_ends[key] = self._step_end(plan)
        return found

    def _layer(self, plan: Plan, recomputes: bool) -> LayerCosts:
        shape, place, *_ = self.microbatch(plan)
        ops = layer_ops(self._workload.model, plan, shape, self._implementation)
        forward, backward = ([op for op in ops if op.part == part] for part in LAYER_PARTS)
        time = layer_time(
            shape,
            place,
            plan.remat,
            recomputes,
            (sum(op.count for op in forward), sum(op.count for op in backward)),
            self._rates,
            self._implementation,
        )
        in_forward = self._exposed(forward, time.forward)
        in_backward = self._exposed(backward, time.backward)
        return LayerCosts(
            time,
            time.forward + sum(in_forward.values()),
            time.backward + sum(in_backward.values()),
            {
                name: in_forward.get(name, 0.0) + in_backward.get(name, 0.0)
                for name in (TENSOR, FSDP)
            },
        )

    def _microbatch(self, plan: Plan) -> MicrobatchCosts:
        workload, rates, implementation = self._workload, self._rates, self._implementation
        shape = layer_shape(workload, plan)
        place = shape_point(shape, plan.axes.tensor)
        program = head_program(workload, plan.precision, splits_length=shape.splits_length)
        sizes = head_sizes(workload.model, plan, shape, implementation)
        ops = [
            *head_ops(workload, plan, shape, implementation),
            *tick_ops(plan, shape, implementation),
        ]
        return MicrobatchCosts(
            shape=shape,
            place=place,
            head=head_time(program, sizes, shape.width, place, rates, implementation),
            embed_again=embed_time(program, sizes, shape.width, place, rates),
            exposed={
                part: sum(self._exposed([op for op in ops if op.part == part]).values())
                for part in (*OUTSIDE_LAYERS, "tick")
            },
        )

    def _step_end(self, plan: Plan) -> StepEnd:
        model, implementation = self._workload.model, self._implementation
        width = self.microbatch(plan).shape.width
        ops = step_ops(model, plan, width, implementation)
        return StepEnd(self._exposed(ops), updated_params(model, plan, implementation))

    def _exposed(
        self, ops: Iterable[CommunicationOp], compute_s: float = math.inf
    ) -> Mapping[str, float]:
        """Seconds that operations add to a part of the step, by term.

        Overlapped compute and communication slow each other down.

        Args:
          compute_s: the compute of that part, beside which operations can run.
        """
        exposed: dict[str, float] = {}
        for op in ops:
            time_s = self._time_of(op) * op.count
            if op.hides:
                beside = min(time_s * self._rates.overlap_share, compute_s)
                compute_s -= beside
                time_s -= max(0.0, 2.0 - self._rates.overlap_slowdown) * beside
            exposed[op.term] = exposed.get(op.term, 0.0) + time_s
        return exposed


@lru_cache(maxsize=1 << 12)
def mesh_costs(
    workload: Workload,
    axes: AxisSizes,
    rules: Rules,
    precision: Precision,
    kernel: AttentionKernel,
    cluster: Cluster,
    rates: Rates,
    implementation: ImplementationProfile,
) -> MeshCosts:
    """The costs for all plans with these axes, rules, precision and kernel."""
    return MeshCosts(workload, axes, cluster, rates, implementation)
