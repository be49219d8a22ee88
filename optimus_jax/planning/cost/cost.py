"""Predict the time of a training step under a plan, term by term.

A microbatch's time in a stage is the sum over layers of operators and communication
(planning/cost/mesh_costs.py). The schedule's ticks (planning/cost/pipeline_time.py) multiply it.
Gradient reduction, the optimizer and a fixed overhead are added once.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

from optimus_jax.config.axes import DATA, FSDP, PIPE, TENSOR
from optimus_jax.errors import PlanError, explain
from optimus_jax.pipeline.partition import stage_costs
from optimus_jax.plan import Plan
from optimus_jax.planning.cost.communication import (
    OUTSIDE_LAYERS,
    VOCABULARY,
    CommunicationOp,
    StepPart,
)
from optimus_jax.planning.cost.corrections import spread
from optimus_jax.planning.cost.implementation_profile import OURS, ImplementationProfile
from optimus_jax.planning.cost.mesh_costs import (
    ClusterCosts,
    LayerCosts,
    MicrobatchCosts,
    StepEnd,
)
from optimus_jax.planning.cost.pipeline_time import Ticks, count_ticks
from optimus_jax.planning.cost.rates import HEAD, LAYER, Rates
from optimus_jax.planning.cost.stage_time import F32_BYTES, LayerTime
from optimus_jax.planning.cost.workload import ADAM_MOMENTS, Workload
from optimus_jax.planning.profiles.cluster import TO_HOST, Cluster

NINE_IN_TEN = 1.645
"""Half-width of the central 90% interval of a normal distribution, in standard deviations."""
BUBBLE = "bubble"
REFERENCE_PASS = "reference"
"""Term of the forward pass without adapters, of a task with a reference."""
GENERATOR = "generator"
"""Term of a generator: its layers, its head, and its share of the embedding."""
IN_LAYERS = ("attention", "feed-forward", "recompute", "memory", "launching", REFERENCE_PASS)
"""Terms for a layer's operators."""
HOST_COPIES = "host copies"
"""The term for offloading."""
COMMUNICATION = (TENSOR, VOCABULARY, FSDP, DATA, PIPE)
"""Terms for communication."""
TERMS = (*IN_LAYERS, GENERATOR, HEAD, *COMMUNICATION, BUBBLE, "optimizer", HOST_COPIES, "overhead")
"""All terms."""


@dataclass(frozen=True, kw_only=True)
class Term:
    """One part of a step's time: a line of `--explain`."""

    name: str
    """What takes the time."""
    time_s: float
    """Seconds on the critical path, without overlapped time."""
    how: str
    """How the figure was derived, in words."""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The predicted time of a step."""

    terms: tuple[Term, ...]
    """Their times add up to step_time_s."""
    step_time_s: float
    """Seconds that a step takes."""
    low_s: float
    """5th percentile of the step time, in seconds."""
    high_s: float
    """95th percentile of the step time, in seconds."""
    bubble: float
    """Share of the step that stages spend waiting for others."""
    communication: float
    """Share of the step that devices spend on communication alone."""
    tokens_per_s: float
    """Tokens per second of all devices together."""
    mfu: float | None
    """Model FLOPs (models/flops.py) over the dense 16-bit peak; None if the peak is unknown or the
    precision is f32."""

    def operator_shares(self) -> tuple[float, float]:
        """Share of the step that scales with the time of a layer's operators, and with that of the
        head.
        """
        times = {term.name: term.time_s for term in self.terms}
        layers = sum(times.get(name, 0.0) for name in IN_LAYERS)
        # The bubble scales with the time of layers and of the communication inside them.
        waiting = times.get(BUBBLE, 0.0) * layers / max(1e-30, layers + times.get(TENSOR, 0.0))
        return (layers + waiting) / self.step_time_s, times.get(HEAD, 0.0) / self.step_time_s


def predict(
    workload: Workload,
    plan: Plan,
    cluster: Cluster,
    rates: Rates,
    implementation: ImplementationProfile = OURS,
) -> Prediction:
    """Predict a step of `plan` on `cluster` with devices of these `rates`.

    Raises:
      PlanError: the mesh is larger than the cluster, or the plan sends over a link of unknown
        speed.
    """
    return predict_with(_cluster_costs(workload, cluster, rates, implementation), plan)


def predict_with(costs: ClusterCosts, plan: Plan) -> Prediction:
    """`predict` with costs that the caller keeps for further plans."""
    steps, workload = StepTimes(costs, plan), costs.workload
    times = steps.times(plan.zero)
    time_s, num_sequences = sum(times.values()), workload.global_batch
    margin = math.exp(NINE_IN_TEN * spread(costs.rates, LAYER, steps.microbatch.place))
    peak = costs.cluster.accelerator.dense_peak_flops if plan.precision != "f32" else None
    return Prediction(
        terms=steps.terms(times),
        step_time_s=time_s,
        low_s=time_s / margin,
        high_s=time_s * margin,
        **shares_of(times),
        tokens_per_s=num_sequences * workload.seq_len / time_s,
        mfu=workload.step_flops / (time_s * peak * plan.num_devices) if peak else None,
    )


def shares_of(times: Mapping[str, float]) -> dict[str, float]:
    """The shares of the bubble and of communication in a step with these terms."""
    time_s = sum(times.values())
    return {
        "bubble": times.get(BUBBLE, 0.0) / time_s,
        "communication": sum([times.get(name, 0.0) for name in COMMUNICATION]) / time_s,
    }


def term_times(
    workload: Workload,
    plan: Plan,
    cluster: Cluster,
    rates: Rates,
    implementation: ImplementationProfile = OURS,
) -> dict[str, float]:
    """Seconds of every term of `predict`, without explanations: faster, for searches over many
    plans.

    Raises what `predict` raises.
    """
    return StepTimes(_cluster_costs(workload, cluster, rates, implementation), plan).times(
        plan.zero
    )


def hidden_shares(
    workload: Workload,
    plan: Plan,
    cluster: Cluster,
    rates: Rates,
    implementation: ImplementationProfile = OURS,
) -> dict[tuple[str, tuple[str, ...]], float]:
    """The predicted share of the time of exchanges that runs beside compute, by kind and mesh axes:
    of those in layers, of the matrices of embedding and head, and at the end of a step.

    Raises what `predict` raises.
    """
    times: dict[tuple[str, tuple[str, ...]], float] = {}
    beside = dict(times)
    costs = _cluster_costs(workload, cluster, rates, implementation)
    for op, time_s, beside_s in costs.mesh(plan).exchanges(plan):
        key = op.kind, op.axes
        times[key] = times.get(key, 0.0) + time_s
        beside[key] = beside.get(key, 0.0) + beside_s
    return {key: beside[key] / time_s for key, time_s in times.items() if time_s}


@lru_cache(maxsize=1 << 8)
def _cluster_costs(
    workload: Workload, cluster: Cluster, rates: Rates, implementation: ImplementationProfile
) -> ClusterCosts:
    return ClusterCosts(workload, cluster, rates, implementation)


class _OutsideLayers(NamedTuple):
    """Seconds outside the layers of a step, whatever its ZeRO stage."""

    head: float
    """Compute of embedding and head."""
    vocabulary: float
    """Communication of embedding and head."""
    send: float
    """The send of one tick to the next stage."""


class StepTimes:
    """Computes the times of a plan's step, on the critical path of one device.

    What does not depend on the ZeRO stage is computed once, for plans that differ only in theirs.
    """

    def __init__(self, costs: ClusterCosts, plan: Plan):
        self.plan, self.costs, self.mesh_costs = plan, costs, costs.mesh(plan)
        workload = costs.workload
        self.trains_embed = workload.model.tuning.trains("embedding")
        self.streams = 1 + workload.num_references
        """Passes through the layers, each with its own residual stream."""
        num_stages = 1 if plan.pipeline is None else plan.axes.pipe
        self.executions = plan.microbatches * workload.model.num_layers / num_stages
        """Layer executions per device: microbatches times layers per stage."""

    @property
    def microbatch(self) -> MicrobatchCosts:
        """A microbatch without its layers."""
        return self.mesh_costs.microbatch(self.plan)

    def times(self, zero: int) -> dict[str, float]:
        """Seconds by term under this ZeRO stage, in display order."""
        outside, mesh_costs = self._outside_layers, self.mesh_costs
        layer, end = mesh_costs.layer(self.plan, zero), mesh_costs.step_end(self.plan, zero)
        compute, exposed, at_end = layer.compute, layer.exposed, end.exposed.get
        visits = self._visits(layer)
        sends, bubble = self._pipeline(layer, visits)
        return {
            "attention": visits * compute.attention,
            "feed-forward": visits * compute.feed_forward,
            "recompute": visits * compute.again,
            "memory": visits * compute.memory,
            "launching": visits * compute.launching,
            REFERENCE_PASS: self.executions * (self.streams - 1) * layer.forward,
            **self._generator(zero),
            HEAD: outside.head,
            TENSOR: visits * exposed[TENSOR] + at_end(TENSOR, 0.0),
            VOCABULARY: outside.vocabulary,
            FSDP: visits * exposed[FSDP] + at_end(FSDP, 0.0),
            DATA: at_end(DATA, 0.0),
            PIPE: sends,
            BUBBLE: bubble,
            "optimizer": self._optimizer(end),
            HOST_COPIES: self._host_copies(layer.compute, end, visits),
            "overhead": self.costs.rates.step_s,
        }

    def layers_s(self) -> float:
        """Seconds of the layers, with their communication and with ticks in which stages idle, for
        stages in lockstep.

        A step takes at least so long (up to rounding), under the plan's ZeRO stage and under higher
        ones, which add communication to a layer and save none.
        """
        layer = self.mesh_costs.layer(self.plan, self.plan.zero)
        if self._ticks is not None:
            return self._in_lockstep(layer, self._ticks)
        visits = self._visits(layer)
        return (visits + self.executions * (self.streams - 1)) * layer.forward + (
            visits * layer.backward
        )

    def before_end_s(self) -> float:
        """`layers_s` with embedding, head and sends: all but what a step has once. A lower bound of
        the same steps.
        """
        outside, ticks = self._outside_layers, self._ticks
        sends = 0.0 if ticks is None else (ticks.forward + ticks.backward) * outside.send
        return self.layers_s() + outside.head + outside.vocabulary + sends

    def _in_lockstep(self, layer: LayerCosts, ticks: Ticks) -> float:
        """Seconds of the layers in a pipeline whose ticks last as long as the fullest stage."""
        assert self.plan.pipeline is not None
        forward, backward = self.streams * layer.forward, layer.backward
        return self._busiest * (ticks.forward * forward + ticks.backward * backward)

    def _visits(self, layer: LayerCosts) -> float:
        """Executions, of which one without backward counts as forward's share of both.

        Layers that are not trained and have nothing trained below have no backward
        (Decoder.run_layers).
        """
        if self.plan.pipeline is not None or self.trains_embed:
            return self.executions
        share = layer.backward / (layer.forward + layer.backward)
        frozen = self.costs.workload.model.tuning.freeze_layers
        return self.executions - self.plan.microbatches * frozen * share

    def terms(self, times: dict[str, float]) -> tuple[Term, ...]:
        """The times of the plan itself with explanations, without terms that take no time."""
        plan, whole_layer = self.plan, self.mesh_costs.layer(self.plan, self.plan.zero)
        layer = whole_layer.compute
        visits, executions = (
            f" x {number:g} layers and microbatches"
            for number in (self._visits(whole_layer), self.executions)
        )
        how = {
            "attention": f"matmuls, {_ms(layer.attention)}{visits}",
            "feed-forward": f"matmuls, {_ms(layer.feed_forward)}{visits}",
            "recompute": f"remat {plan.remat}, {_ms(layer.again)}{visits}",
            "memory": f"passes over memory, {_ms(layer.memory)}{visits}",
            "launching": f"kernels that wait for the host, {_ms(layer.launching)}{visits}",
            REFERENCE_PASS: f"forward without adapters, {_ms(whole_layer.forward)}{executions}",
            GENERATOR: "restores hidden tokens, whole on every stage",
            HEAD: f"{_ms(self.microbatch.head)} x {plan.microbatches} microbatches",
            TENSOR: self._exchanged(TENSOR),
            VOCABULARY: "all-reduces of embedding and head",
            FSDP: f"zero {plan.zero}, {self._exchanged(FSDP)}",
            DATA: f"gradients, {self._exchanged(DATA)}",
            PIPE: f"sends between pipe={plan.axes.pipe} stages",
            BUBBLE: "stages that wait for others",
            "optimizer": "passes over parameters and moments",
            HOST_COPIES: f"offload {plan.offload}, over {self.costs.cluster.to_host}",
            "overhead": "what a step has once",
        }
        return tuple(
            [
                Term(name=name, time_s=time_s, how=how[name])
                for name, time_s in times.items()
                if time_s > 0
            ]
        )

    def _generator(self, zero: int) -> dict[str, float]:
        """The term of a generator, forward and backward, if there is one."""
        costs, sizes = self.costs, self.costs.workload.model.generator
        workload = costs.workload.generator
        if workload is None or sizes is None:
            return {}
        own = _cluster_costs(workload, costs.cluster, costs.rates, costs.implementation)
        plan = replace(self.plan.of_generator(sizes), zero=zero)
        return {GENERATOR: StepTimes(own, plan).before_end_s()}

    @cached_property
    def _exchanges(self) -> list[tuple[CommunicationOp, float, float]]:
        """`MeshCosts.exchanges` of the plan."""
        return list(self.mesh_costs.exchanges(self.plan))

    def _exchanged(self, axis: str) -> str:
        """What a step exchanges over a mesh axis, and how much of its time is not in that term."""
        found = [each for each in self._exchanges if axis in each[0].axes]
        times = sum([time_s for _, time_s, _ in found])
        beside = sum([beside_s for _, _, beside_s in found])
        kinds = ", ".join(sorted({f"{op.kind}s" for op, _, _ in found})) or "exchanges"
        hidden = f"; {beside / times:.0%} of {_ms(times)} is beside compute" if beside else ""
        return f"{kinds} over {axis}={self.plan.axes[axis]}{hidden}"

    @cached_property
    def _busiest(self) -> float:
        """Mean layers that take as long as the layers of the busiest virtual stage."""
        pipeline, workload = self.plan.pipeline, self.costs.workload
        assert pipeline is not None
        if not workload.model.encoder_layers:
            return pipeline.most_layers
        return max(stage_costs(pipeline.layers_per_stage, workload.layer_shares))

    @cached_property
    def _ticks(self) -> Ticks | None:
        """Those of the schedule; None if no stage waits for another's ticks."""
        plan, implementation = self.plan, self.costs.implementation
        if plan.pipeline is None or not (implementation.lockstep or implementation.head_shared):
            return None
        stages, together = plan.axes.pipe, 1
        if self.costs.rates.shares_processor:
            hosts = self.costs.cluster.hosts_crossed(plan.axes, (PIPE,))
            together = stages // hosts if stages % hosts == 0 else 1
        return count_ticks(plan.pipeline, stages, plan.microbatches, stages_per_processor=together)

    def _pipeline(self, layer: LayerCosts, visits: float) -> tuple[float, float]:
        """Seconds of sends, and of the bubble: the schedule's time beyond that of the visits to
        layers.
        """
        pipeline, stages = self.plan.pipeline, self.plan.axes.pipe
        if pipeline is None:
            return 0.0, 0.0
        layers, useful = self._busiest, self.plan.microbatches * pipeline.repeats
        forward, backward = self.streams * layer.forward, layer.backward
        send, ticks = self._outside_layers.send, self._ticks
        if ticks is not None and self.costs.implementation.lockstep:
            bubble = self._in_lockstep(layer, ticks) - visits * (forward + backward)
            return 2 * useful * send, bubble + (ticks.forward + ticks.backward - 2 * useful) * send
        # Stages without lockstep start when their input arrives: the first microbatch fills the
        # pipeline, then the slowest stage sets the pace.
        filling = (stages - 1) * (layers * (forward + backward) + 2 * send)
        sends = 2 * useful * send if self.costs.implementation.waits_for_sends else 0.0
        return sends, filling + (useful * layers - visits) * (forward + backward)

    @property
    def runs_outside(self) -> dict[StepPart, float]:
        """How often a step runs the parts of embedding and head, and ticks."""
        embeds, broadcasts, ticks = self.plan.microbatches, 0, self._ticks
        if ticks is not None and self.costs.implementation.head_shared:
            embeds, broadcasts = ticks.embed, self.streams * ticks.head
            if self.trains_embed:
                broadcasts += ticks.embed_backward
        return {
            "embed": embeds,
            "head": self.plan.microbatches,
            "broadcast": broadcasts,
            "tick": 0.0 if ticks is None else self.streams * (ticks.forward + ticks.backward),
        }

    @cached_property
    def _outside_layers(self) -> _OutsideLayers:
        microbatch, runs = self.microbatch, self.runs_outside
        exposed, microbatches = microbatch.exposed, self.plan.microbatches
        # Some ticks compute an embedding and need none.
        idle_embeds = runs["embed"] - microbatches
        return _OutsideLayers(
            head=microbatches * microbatch.head + idle_embeds * microbatch.embed_again,
            vocabulary=sum(runs[part] * exposed[part] for part in OUTSIDE_LAYERS),
            send=self.streams * exposed["tick"],
        )

    def _optimizer(self, end: StepEnd) -> float:
        # Moments are read and written.
        costs, moment_bytes = self.costs, self.plan.moment_bytes
        smaller = 2 * (ADAM_MOMENTS * F32_BYTES - costs.workload.num_moments * moment_bytes)
        return (
            end.updated_params
            * (costs.implementation.optimizer_bytes - smaller)
            / costs.rates.memory_bytes_per_s
        )

    def _host_copies(self, layer: LayerTime, end: StepEnd, visits: float) -> float:
        """Seconds that copies to and from the host add to a step.

        Moments are copied in both directions at once, without overlap with compute. Copies of layer
        inputs overlap with the layer's forward and backward.
        """
        plan, costs = self.plan, self.costs
        if plan.offload == "none":
            return 0.0
        speed = costs.cluster.to_host.bytes_per_s
        if speed is None:
            raise PlanError(
                explain(
                    "the plan keeps something in the host's memory, over a link of unknown speed",
                    given=f"offload={plan.offload} on {costs.cluster}",
                    do=f"give its speed, such as --link {TO_HOST}=50GB/s, or use offload=none",
                )
            )
        rate, time_s = costs.rates.host_share * speed, 0.0
        if plan.offloads_moments:
            time_s += costs.workload.num_moments * plan.moment_bytes * end.updated_params / rate
        if plan.offloads_activations:
            copy_s = self.microbatch.shape.stream_bytes / rate
            time_s += visits * (
                max(0.0, copy_s - layer.forward) + max(0.0, copy_s - layer.backward)
            )
        return time_s


def _ms(time_s: float) -> str:
    return f"{time_s * 1e3:.3g} ms"
