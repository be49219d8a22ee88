"""The times of a step's parts, which many plans share.

A search prices dozens of plans on a mesh. They differ in schedules and repeats, which change how
often a part runs, and agree in what it takes. Meshes share parts too: a layer communicates over
fsdp and tensor, and does not depend on how the other devices are split.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from optimus_jax.config.axes import FSDP, PIPE, TENSOR
from optimus_jax.mesh.axes import LENGTH
from optimus_jax.plan import Plan
from optimus_jax.planning.cost.communication import (
    IN_LAYERS,
    LAYER_PARTS,
    LAYER_SUMS,
    OUTER,
    OUTSIDE_LAYERS,
    STEP,
    CommunicationOp,
    StepPart,
    head_ops,
    layer_ops,
    step_ops,
    tick_ops,
)
from optimus_jax.planning.cost.communication_time import CommunicationTimes
from optimus_jax.planning.cost.head_program import head_program, head_sizes, vocab_split
from optimus_jax.planning.cost.implementation_profile import ImplementationProfile
from optimus_jax.planning.cost.layer_shape import LayerShape, row_shape, rows_of, shape_point
from optimus_jax.planning.cost.overlap import OverlapTimes
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
    free_s: float
    """Seconds of backward's compute beside which more could run."""


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


class ClusterCosts:
    """Times of parts of steps of one workload on one cluster, computed once for all plans that
    share them. Everything is kept as long as this object.
    """

    def __init__(
        self,
        workload: Workload,
        cluster: Cluster,
        rates: Rates,
        implementation: ImplementationProfile,
    ):
        self.workload, self.cluster = workload, cluster
        self.rates, self.implementation = rates, implementation
        self._meshes: dict[tuple, MeshCosts] = {}
        self._shared: dict[tuple, dict] = {}

    def mesh(self, plan: Plan) -> "MeshCosts":
        """The costs of plans with this plan's axes, rules, precision and kernel.

        Raises PlanError if the mesh is larger than the cluster.
        """
        key = plan.axes, plan.rules, plan.precision, plan.attention
        found = self._meshes.get(key)
        if found is None:
            found = self._meshes[key] = MeshCosts(plan, self, self._shared)
        return found


class MeshCosts:
    """Times of parts of steps on one mesh; the plans given agree in axes, rules, precision and
    kernel.

    All methods raise PlanError if the plan sends over a link of unknown speed.

    Args:
      shared: costs of layers and microbatches of all meshes, by what they depend on. The speed of
        communication over some axes depends on the devices and hosts that these span.
    """

    def __init__(self, plan: Plan, costs: ClusterCosts, shared: dict[tuple, dict]):
        self._workload, self._rates, self._implementation = (
            costs.workload,
            costs.rates,
            costs.implementation,
        )
        communication = CommunicationTimes(plan.axes, costs.cluster, costs.rates)
        self._overlap = OverlapTimes(
            communication, costs.rates, costs.implementation, costs.cluster.accelerator.platform
        )
        model = costs.workload.model
        self._row_shape = row_shape(costs.workload, plan)
        self._batch_ways = plan.batch_ways()
        device = self._row_shape, plan.axes.tensor
        rules = plan.active_rules(model)
        in_layers = [rules.get(logical, ()) for logical in IN_LAYERS]
        vocab = vocab_split(model, plan, costs.implementation)
        length = rules.get(LENGTH, ())
        in_head = dict.fromkeys((*vocab.axes, *length, PIPE, TENSOR))

        def shared_by(*key: object, axes: Iterable[tuple[str, ...]]) -> dict:
            spans = tuple([(names, communication.span(names)) for names in axes])
            return shared.setdefault((*device, *key, spans), {})

        self._layers: dict[tuple, LayerCosts] = shared_by("layer", axes=in_layers)
        self._microbatches: dict[tuple, MicrobatchCosts] = shared_by(
            "microbatch", vocab, length, axes=_combinations(in_head)
        )
        self._step_ends: dict[tuple, StepEnd] = {}

    def layer(self, plan: Plan, zero: int) -> LayerCosts:
        """One layer of a microbatch, at this ZeRO stage in the place of the plan's."""
        recomputes = plan.pipeline is not None and not plan.pipeline.keep_residuals
        rows = rows_of(self._workload, self._batch_ways, plan.microbatches)
        loop = plan.pipeline.most_layers if plan.pipeline else self._workload.model.num_layers

        def costs(plan: Plan) -> LayerCosts:
            # Only gathers ahead depend on the number of layers of a loop.
            ahead = plan.overlap != "none" and (
                plan.overlap,
                loop if zero == 3 else None,
                self._overlap.behind_sums(plan),
            )
            key = rows, zero, plan.remat, plan.pipeline is None, recomputes, ahead, plan.scatter
            found = self._layers.get(key)
            if found is None:
                found = self._layers[key] = self._layer(replace(plan, zero=zero))
            return found

        if not plan.kept_layers:
            return costs(plan)
        kept = costs(replace(plan, remat="none"))
        return _mean(costs(plan), kept, plan.kept_layers / loop)

    def microbatch(self, plan: Plan) -> MicrobatchCosts:
        """A microbatch without its layers."""
        rows = rows_of(self._workload, self._batch_ways, plan.microbatches)
        pipeline = plan.pipeline
        key = rows, pipeline and (pipeline.send_slack, pipeline.keep_residuals)
        found = self._microbatches.get(key)
        if found is None:
            found = self._microbatches[key] = self._microbatch(plan, rows)
        return found

    def step_end(self, plan: Plan, zero: int) -> StepEnd:
        """What the step has once, at this ZeRO stage in the place of the plan's."""
        gathers = plan.microbatches if plan.pipeline is None and zero >= 2 else 1
        beside = (plan.overlap, plan.remat, plan.kept_layers) if plan.sums_by_layer else None
        key = zero, layers_on_device(self._workload.model, plan), gathers, beside, plan.scatter
        found = self._step_ends.get(key)
        if found is None:
            found = self._step_ends[key] = self._step_end(replace(plan, zero=zero))
        return found

    def exchanges(self, plan: Plan) -> Iterator[tuple[CommunicationOp, float, float]]:
        """The exchanges of a step in layers, of matrices outside them, and at its end: with their
        counts and seconds in the whole step, and those of these beside compute.
        """
        num_layers = self._workload.model.num_layers
        loop = plan.pipeline.most_layers if plan.pipeline else num_layers
        kept, visits = plan.kept_layers / loop, plan.microbatches * num_layers / plan.axes.pipe
        parts = [
            (share * visits, ops, usable_s)
            for share, layers in ((kept, replace(plan, remat="none")), (1 - kept, plan))
            for _, ops, usable_s in self._layer_parts(layers)
        ]
        for times, ops, usable_s in parts + [(1.0, *end) for end in self._ends(plan)]:
            for op, time_s, beside_s in zip(
                ops, *self._overlap.times(ops, plan, usable_s), strict=True
            ):
                yield op._replace(count=times * op.count), times * time_s, times * beside_s

    def outside_layers(self, plan: Plan) -> list[CommunicationOp]:
        """The communication of an embedding, of head and loss, of a broadcast from a stage to all,
        and of a tick.
        """
        rows = rows_of(self._workload, self._batch_ways, plan.microbatches)
        shape = self._row_shape.with_rows(rows)
        return [
            *head_ops(self._workload, plan, shape, self._implementation),
            *tick_ops(plan, shape, self._implementation),
        ]

    def _layer_parts(
        self, plan: Plan
    ) -> tuple[tuple[LayerTime, list[CommunicationOp], float], ...]:
        """Forward and backward of a layer: its compute, exchanges, and the seconds of that part's
        compute beside which they can run.
        """
        recomputes = plan.pipeline is not None and not plan.pipeline.keep_residuals
        rows = rows_of(self._workload, self._batch_ways, plan.microbatches)
        streams = 2 if plan.overlap == "halves" else 1
        shape = self._row_shape.with_rows(rows / streams)
        ops = [
            op if op.axes == (FSDP,) else op._replace(count=op.count * streams)
            for op in layer_ops(self._workload.model, plan, shape, self._implementation)
        ]
        forward, backward = ([op for op in ops if op.part == part] for part in LAYER_PARTS)
        time = layer_time(
            shape,
            shape_point(shape, plan.axes.tensor),
            plan.remat,
            recomputes,
            plan.pipeline is not None and not recomputes,
            (sum(op.count for op in forward), sum(op.count for op in backward)),
            self._rates,
            self._implementation,
        )
        if streams > 1:
            time = LayerTime(*[streams * seconds for seconds in time])
        usable_s = self._overlap.usable_s
        return (
            (time, forward, usable_s(time.forward)),
            (time, backward, usable_s(time.backward)),
        )

    def _layer(self, plan: Plan) -> LayerCosts:
        (time, forward, forward_s), (_, backward, backward_s) = self._layer_parts(plan)
        in_forward, _ = self._exposed(forward, forward_s, plan)
        in_backward, free_s = self._exposed(backward, backward_s, plan)
        return LayerCosts(
            time,
            time.forward + sum(in_forward.values()),
            time.backward + sum(in_backward.values()),
            {
                name: in_forward.get(name, 0.0) + in_backward.get(name, 0.0)
                for name in (TENSOR, FSDP)
            },
            free_s,
        )

    def _microbatch(self, plan: Plan, rows: float) -> MicrobatchCosts:
        workload, rates, implementation = self._workload, self._rates, self._implementation
        shape = self._row_shape.with_rows(rows)
        place = shape_point(shape, plan.axes.tensor)
        program = head_program(workload, plan.precision, splits_length=shape.splits_length)
        sizes = head_sizes(workload.model, plan, shape, implementation)
        ops: dict[StepPart, list[CommunicationOp]] = {
            part: [] for part in (*OUTSIDE_LAYERS, "tick")
        }
        for op in self.outside_layers(plan):
            ops[op.part].append(op)
        return MicrobatchCosts(
            shape=shape,
            place=place,
            head=head_time(program, sizes, shape.width, place, rates, implementation),
            embed_again=embed_time(program, sizes, shape.width, place, rates),
            exposed={
                part: sum(self._exposed(found, math.inf, plan)[0].values())
                for part, found in ops.items()
            },
        )

    def _step_end(self, plan: Plan) -> StepEnd:
        exposed: dict[str, float] = {}
        for ops, usable_s in self._ends(plan):
            for name, time_s in self._exposed(ops, usable_s, plan)[0].items():
                exposed[name] = exposed.get(name, 0.0) + time_s
        model = self._workload.model
        return StepEnd(exposed, updated_params(model, plan, self._implementation))

    def _ends(self, plan: Plan) -> Iterator[tuple[list[CommunicationOp], float]]:
        """The exchanges of `step_ops` by the compute beside which they can run, with its seconds:
        what the layers' own leave of backward, embedding and head, and these with the optimizer.
        """
        model, implementation = self._workload.model, self._implementation
        by_part: dict[StepPart, list[CommunicationOp]] = {}
        for op in step_ops(model, plan, self._row_shape.width, implementation):
            by_part.setdefault(op.part, []).append(op)
        if sums := by_part.get(LAYER_SUMS):
            yield sums, model.num_layers * self.layer(plan, plan.zero).free_s
        # In a pipeline they run before and after all of its ticks.
        head_s = (
            0.0
            if plan.pipeline is not None
            else self.microbatch(replace(plan, microbatches=1)).head
        )
        if outer := by_part.get(OUTER):
            yield outer, head_s
        update_s = (
            updated_params(model, plan, implementation)
            * implementation.optimizer_bytes
            / self._rates.memory_bytes_per_s
        )
        yield by_part.get(STEP, []), head_s + update_s

    def _exposed(
        self, ops: Sequence[CommunicationOp], usable_s: float, plan: Plan
    ) -> tuple[Mapping[str, float], float]:
        """Seconds that operations add to a part of the step, by term; and those of the usable
        compute beside which none runs.

        Overlapped compute and communication slow each other down.
        """
        exposed: dict[str, float] = {}
        saved_share = max(0.0, 2.0 - self._rates.overlap_slowdown)
        times, beside = self._overlap.times(ops, plan, usable_s)
        for op, time_s, beside_s in zip(ops, times, beside, strict=True):
            exposed[op.term] = exposed.get(op.term, 0.0) + time_s - saved_share * beside_s
        return exposed, max(0.0, usable_s - sum(beside))


def _mean(one: LayerCosts, other: LayerCosts, share: float) -> LayerCosts:
    """The mean costs of layers, of which a share are like `other`."""

    def mean(first: float, second: float) -> float:
        return (1 - share) * first + share * second

    return LayerCosts(
        LayerTime(*map(mean, one.compute, other.compute)),
        mean(one.forward, other.forward),
        mean(one.backward, other.backward),
        {name: mean(time_s, other.exposed[name]) for name, time_s in one.exposed.items()},
        mean(one.free_s, other.free_s),
    )


def _combinations(axes: Iterable[str]) -> Iterator[tuple[str, ...]]:
    """All that a collective over some of these mesh axes may span."""
    names = tuple(axes)
    for number in range(1, len(names) + 1):
        yield from itertools.combinations(names, number)
