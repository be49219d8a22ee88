"""The communication of a step, by mesh axis, and its time.

A *communication op* is one collective or send of the step's program (mesh/collectives.py,
mesh/zero.py, pipeline/executor.py), with its count per *part* of the step: one layer's forward or
backward of one microbatch, one microbatch's head, one tick, or the whole step.
"""

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Literal, NamedTuple

from optimus_jax.config import ModelConfig
from optimus_jax.config.axes import DATA, FSDP, PIPE, TENSOR, AxisSizes
from optimus_jax.errors import PlanError, explain
from optimus_jax.mesh.axes import HEADS, MLP, VOCAB
from optimus_jax.models.families import table_width
from optimus_jax.plan import Plan
from optimus_jax.planning.cost.implementation_profile import ImplementationProfile
from optimus_jax.planning.cost.operators import LayerShape
from optimus_jax.planning.cost.rates import Rates
from optimus_jax.planning.profiles.cluster import Cluster
from optimus_jax.planning.profiles.links import Link

CollectiveKind = Literal["all-reduce", "all-gather", "reduce-scatter", "send"]
StepPart = Literal["layer forward", "layer backward", "head", "tick", "step"]

VOCABULARY = "vocabulary"
"""The term for communication of embedding and head; other terms are named by their first axis."""
F32_BYTES = 4


class CommunicationOp(NamedTuple):
    """A collective or send, with its count in a part of the step."""

    kind: CollectiveKind
    axes: tuple[str, ...]
    """Mesh axes that it spans."""
    part: StepPart
    """Part of the step."""
    num_bytes: float
    """The message on one device: the whole result (all-reduce, all-gather) or argument
    (reduce-scatter), or what is sent."""
    count: float
    """Executions in that part."""
    hides: bool = False
    """Whether it may overlap with compute."""

    @property
    def term(self) -> str:
        """The term of the prediction to which it contributes."""
        return VOCABULARY if self.part == "head" else self.axes[0]


def communication_ops(
    model: ModelConfig, plan: Plan, layer: LayerShape, style: ImplementationProfile
) -> list[CommunicationOp]:
    """All communication of a step of `plan`; `layer` is one device's part of a layer."""
    rules = plan.active_rules(model)
    vocab = _vocab_axes(rules, style)
    found = _in_head(plan, vocab, layer, style) + _in_step(model, plan, vocab, layer, style)
    if plan.axes.tensor > 1:
        found += _over_tensor(
            plan, [logical for logical in (HEADS, MLP) if logical in rules], layer, style
        )
    if plan.zero >= 2:
        found += _over_fsdp(plan, layer, style)
    if plan.pipeline is not None:
        found.append(
            CommunicationOp(
                "send",
                (PIPE,),
                "tick",
                layer.stream_bytes,
                1,
                plan.pipeline.send_slack or not style.lockstep,
            )
        )
    return found


def _over_tensor(
    plan: Plan, blocks: list[str], layer: LayerShape, style: ImplementationProfile
) -> list[CommunicationOp]:
    """All-reduces of each split block: its output in forward, its input gradient in backward."""
    again = 0
    if plan.remat in ("dots", "full") or (
        plan.pipeline is not None and not plan.pipeline.keep_residuals
    ):
        again = sum(1 for logical in blocks if logical == HEADS or style.repeats_last)
    num_bytes = _summed_bytes(plan, layer)
    return [
        CommunicationOp("all-reduce", (TENSOR,), "layer forward", num_bytes, len(blocks)),
        CommunicationOp("all-reduce", (TENSOR,), "layer backward", num_bytes, len(blocks) + again),
    ]


def _summed_bytes(plan: Plan, layer: LayerShape) -> float:
    """Bytes of the residual stream when it is summed over devices."""
    # f16 is summed in float32 (mesh/formats.py).
    return layer.stream_bytes * (F32_BYTES / layer.width if plan.precision == "f16" else 1)


def _over_fsdp(
    plan: Plan, layer: LayerShape, style: ImplementationProfile
) -> list[CommunicationOp]:
    """All-gathers of a layer's cast matrices, and reduce-scatters of their float32 gradients."""
    weights, hides = layer.attention_weights + layer.mlp_weights, style.fsdp_hides
    scatter = CommunicationOp(
        "reduce-scatter", (FSDP,), "layer backward", weights * F32_BYTES, 1, hides
    )
    if plan.zero == 2:
        return [scatter]
    # Backward gathers once for the layer's own recomputation, and once more if the whole stage is
    # recomputed.
    again = 2 if plan.pipeline is not None and not plan.pipeline.keep_residuals else 1
    return [
        CommunicationOp("all-gather", (FSDP,), "layer forward", weights * layer.width, 1, hides),
        CommunicationOp(
            "all-gather", (FSDP,), "layer backward", weights * layer.width, again, hides
        ),
        scatter,
    ]


def _in_head(
    plan: Plan, vocab: tuple[str, ...], layer: LayerShape, style: ImplementationProfile
) -> list[CommunicationOp]:
    """Communication of embedding and head.

    Reduces the embedded tokens, the gradient of the last hidden state, and the loss sums. With
    pipeline stages, also moves activations from the embedding to the first stage and from the last
    stage to the head.
    """
    found = []
    if vocab:
        # Embedded tokens (zeros on devices that lack their rows), and the last hidden state's
        # gradient.
        both = (layer.stream_bytes + _summed_bytes(plan, layer)) / 2
        found += [
            CommunicationOp("all-reduce", vocab, "head", both, 2),
            CommunicationOp("all-reduce", vocab, "head", layer.tokens * 3 * F32_BYTES, 1),
        ]
    if plan.pipeline is not None and style.head_shared:
        found.append(CommunicationOp("all-reduce", (PIPE,), "head", layer.stream_bytes, 2))
    return found


def _in_step(
    model: ModelConfig,
    plan: Plan,
    vocab: tuple[str, ...],
    layer: LayerShape,
    style: ImplementationProfile,
) -> list[CommunicationOp]:
    """Gradient reductions between replicas, and ZeRO's gathers and scatters."""
    axes, outer = plan.axes, _outer_params(model, plan, vocab, style)
    params = layer_params(model, plan, layer) + outer
    if plan.zero == 0:
        replicas = tuple(axis for axis in (DATA, FSDP) if axes[axis] > 1)
        return (
            [CommunicationOp("all-reduce", replicas, "step", params * style.gradient_bytes, 1)]
            if replicas
            else []
        )
    found = (
        [
            CommunicationOp(
                "all-reduce", (DATA,), "step", params / axes.fsdp * style.gradient_bytes, 1
            )
        ]
        if axes.data > 1
        else []
    )
    if plan.zero <= 2:
        found.append(CommunicationOp("all-gather", (FSDP,), "step", params * F32_BYTES, 1))
    if plan.zero == 1:
        return [*found, CommunicationOp("reduce-scatter", (FSDP,), "step", params * F32_BYTES, 1)]
    # Matrices outside the layers move once per microbatch, or once per step with pipeline stages.
    times = 1 if plan.pipeline is not None else plan.microbatches
    found.append(CommunicationOp("reduce-scatter", (FSDP,), "step", outer * F32_BYTES, times))
    if plan.zero == 3:
        found.append(CommunicationOp("all-gather", (FSDP,), "step", outer * layer.width, times))
    return found


def layer_params(model: ModelConfig, plan: Plan, layer: LayerShape) -> float:
    """Elements of the layers' matrices on one device, not split over fsdp.

    Includes the empty slots of uneven stages.
    """
    num_layers = (
        model.num_layers
        if plan.pipeline is None
        else max(plan.pipeline.layers_per_stage) * plan.pipeline.repeats
    )
    return num_layers * (layer.attention_weights + layer.mlp_weights)


def outer_params(model: ModelConfig, plan: Plan, style: ImplementationProfile) -> float:
    """Elements of the matrices outside the layers, on the device with the most."""
    return _outer_params(model, plan, _vocab_axes(plan.active_rules(model), style), style)


def _outer_params(
    model: ModelConfig, plan: Plan, vocab: tuple[str, ...], style: ImplementationProfile
) -> float:
    tables = 1 if model.tied or (plan.pipeline is not None and not style.head_shared) else 2
    return (
        tables
        * model.vocab_size
        / math.prod([plan.axes[axis] for axis in vocab])
        * table_width(model)
    )


def _vocab_axes(
    rules: Mapping[str, tuple[str, ...]], style: ImplementationProfile
) -> tuple[str, ...]:
    axes = rules.get(VOCAB, ())
    return axes if style.head_shared else tuple(axis for axis in axes if axis != PIPE)


class _PathTime(NamedTuple):
    """Parameters of the time model for communication along given mesh axes."""

    size: int
    """Number of devices."""
    s_per_byte: float
    """Seconds per byte of the slowest link of the ring."""
    latency_s: float
    """Latency of one pass around the ring."""
    tree_latency_s: float = 0.0
    """The same latency with trees between hosts, which NCCL uses for small all-reduces."""


class CommunicationTimes:
    """Times of communication ops on one mesh.

    A collective is modelled as a ring through all of its devices. Every link carries the same
    bytes, so the slowest link decides. The number of rings that cross between two hosts is the
    number of participating devices per host. Every step of a ring costs one latency.
    """

    def __init__(self, axes: AxisSizes, cluster: Cluster, rates: Rates):
        self._axes, self._cluster, self._rates = axes, cluster, rates
        self._path_times: dict[tuple[tuple[str, ...], bool], _PathTime] = {}

    def time(self, exchange: CommunicationOp) -> float:
        """Seconds that one execution takes without overlap.

        Raises PlanError if it crosses a link of unknown speed.
        """
        is_send = exchange.kind == "send"
        path = self._path_times.get((exchange.axes, is_send))
        if path is None:
            path = self._path_times[exchange.axes, is_send] = (
                self._send(exchange.axes) if is_send else self._ring(exchange.axes)
            )
        if is_send:
            return exchange.num_bytes * path.s_per_byte + path.latency_s
        around_s = (path.size - 1) / path.size * exchange.num_bytes * path.s_per_byte
        ring_s = (
            2.0 * (around_s + path.tree_latency_s)
            if exchange.kind == "all-reduce"
            else around_s + path.latency_s
        )
        return ring_s + self._rates.arrival_s if path.size > 1 else ring_s

    def _ring(self, names: tuple[str, ...]) -> _PathTime:
        cluster, rates, size = (
            self._cluster,
            self._rates,
            math.prod([self._axes[name] for name in names]),
        )
        if size == 1:
            return _PathTime(1, 0.0, 0.0, 0.0)
        hosts = cluster.hosts_crossed(self._axes, names)
        on_host, speed, latency_s, tree_latency_s = size / hosts, math.inf, 0.0, 0.0
        if on_host > 1:
            speed = speed_of(cluster.intra_host) * rates.collective_share
            latency_s = tree_latency_s = (on_host - 1) * _latency(
                cluster.intra_host, rates.latency_s
            )
        if hosts > 1:
            assert cluster.inter_host is not None, "several hosts have an inter-host link"
            speed = min(speed, speed_of(cluster.inter_host) * rates.inter_host_share * on_host)
            hop_s = _latency(cluster.inter_host, rates.inter_host_latency_s)
            latency_s += (hosts - 1) * hop_s
            # NCCL sums small messages along trees; it gathers and scatters in rings.
            tree_latency_s += min(hosts - 1, 2 * math.log2(hosts)) * hop_s
        return _PathTime(size, 1 / speed, latency_s, tree_latency_s)

    def _send(self, names: tuple[str, ...]) -> _PathTime:
        cluster, rates = self._cluster, self._rates
        if cluster.hosts_crossed(self._axes, names) == 1:
            return _PathTime(
                2,
                1 / (speed_of(cluster.intra_host) * rates.send_share),
                _latency(cluster.intra_host, rates.latency_s),
            )
        assert cluster.inter_host is not None, "several hosts have an inter-host link"
        return _PathTime(
            2,
            1 / (speed_of(cluster.inter_host) * rates.inter_host_share),
            _latency(cluster.inter_host, rates.inter_host_latency_s),
        )


@lru_cache(maxsize=1 << 12)
def communication_times(axes: AxisSizes, cluster: Cluster, rates: Rates) -> CommunicationTimes:
    """The times on a mesh, cached because a search asks for the same meshes repeatedly."""
    return CommunicationTimes(axes, cluster, rates)


def speed_of(link: Link) -> float:
    """Bytes per second of a link. Raises PlanError if its speed is unknown."""
    if link.bytes_per_s is None:
        raise PlanError(
            explain(
                f"the speed of {link.name} is unknown, and this plan sends over it",
                given=link.source,
                do=(
                    "profile this machine, or give the speed: --link intra_host=100GB/s or"
                    " inter_host=25GB/s"
                ),
            )
        )
    return link.bytes_per_s


def _latency(link: Link, default_s: float) -> float:
    return default_s if link.latency_s is None else link.latency_s
