"""What goes over the wire in a step, by mesh axis, and how long it takes.

An *exchange* is one collective or send of the step's program (mesh/collectives.py, mesh/zero.py,
pipeline/executor.py), with how often it occurs in its *part* of the step: in one layer's forward or
backward of one microbatch, in one microbatch's head, in one tick, or once in the step.
"""

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Literal, NamedTuple

from optimus_jax.config import ModelConfig
from optimus_jax.config.axes import DATA, FSDP, PIPE, TENSOR, AxisSizes
from optimus_jax.errors import PlanError, explain
from optimus_jax.mesh.axes import HEADS, MLP, VOCAB
from optimus_jax.plan import Plan
from optimus_jax.planning.cost.implementation_profile import ImplementationProfile
from optimus_jax.planning.cost.operators import LayerShape
from optimus_jax.planning.cost.rates import Rates
from optimus_jax.planning.profiles.cluster import Cluster
from optimus_jax.planning.profiles.links import Link

Kind = Literal["all-reduce", "all-gather", "reduce-scatter", "send"]
Part = Literal["layer forward", "layer backward", "head", "tick", "step"]

VOCABULARY = "vocabulary"
"""The term of what embedding and head exchange; other exchanges are called by their first axis."""
F32_BYTES = 4


class Exchange(NamedTuple):
    """One kind of message between devices."""

    kind: Kind
    axes: tuple[str, ...]
    """Mesh axes along which it goes."""
    part: Part
    """Where in the step."""
    num_bytes: float
    """The message on one device: the whole result (all-reduce, all-gather) or argument
    (reduce-scatter), or what is sent."""
    count: float
    """In that part."""
    hides: bool = False
    """Whether it may run beside compute."""

    @property
    def term(self) -> str:
        """The term of a prediction that it belongs to."""
        return VOCABULARY if self.part == "head" else self.axes[0]


def exchanges(
    model: ModelConfig, plan: Plan, layer: LayerShape, style: ImplementationProfile
) -> list[Exchange]:
    """All that a step of `plan` exchanges; `layer` is what a device sees of a layer."""
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
            Exchange(
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
) -> list[Exchange]:
    """After each of the blocks whose matrices are split: forward its result, backward the gradient
    of its argument.
    """
    again = 0
    if plan.remat in ("dots", "full") or (
        plan.pipeline is not None and not plan.pipeline.keep_residuals
    ):
        again = sum(1 for logical in blocks if logical == HEADS or style.repeats_last)
    num_bytes = _summed_bytes(plan, layer)
    return [
        Exchange("all-reduce", (TENSOR,), "layer forward", num_bytes, len(blocks)),
        Exchange("all-reduce", (TENSOR,), "layer backward", num_bytes, len(blocks) + again),
    ]


def _summed_bytes(plan: Plan, layer: LayerShape) -> float:
    """Of a residual stream of which each device has a part of the sum."""
    # mesh/formats.py
    return layer.stream_bytes * (F32_BYTES / layer.width if plan.precision == "f16" else 1)


def _over_fsdp(plan: Plan, layer: LayerShape, style: ImplementationProfile) -> list[Exchange]:
    """Gathers of a layer's matrices, cast, and scatters of their gradient, in float32."""
    weights, hides = layer.attention_weights + layer.mlp_weights, style.fsdp_hides
    scatter = Exchange("reduce-scatter", (FSDP,), "layer backward", weights * F32_BYTES, 1, hides)
    if plan.zero == 2:
        return [scatter]
    # Backward gathers for the parts of a layer that it computes again, and before if it computes
    # the stage again.
    again = 2 if plan.pipeline is not None and not plan.pipeline.keep_residuals else 1
    return [
        Exchange("all-gather", (FSDP,), "layer forward", weights * layer.width, 1, hides),
        Exchange("all-gather", (FSDP,), "layer backward", weights * layer.width, again, hides),
        scatter,
    ]


def _in_head(
    plan: Plan, vocab: tuple[str, ...], layer: LayerShape, style: ImplementationProfile
) -> list[Exchange]:
    """Embedded tokens, the gradient of the last hidden state, and the loss's sums; with stages,
    what the last has and the first gets.
    """
    found = []
    if vocab:
        # embedded tokens, of which the other devices have zeros, and a gradient
        both = (layer.stream_bytes + _summed_bytes(plan, layer)) / 2
        found += [
            Exchange("all-reduce", vocab, "head", both, 2),
            Exchange("all-reduce", vocab, "head", layer.tokens * 3 * F32_BYTES, 1),
        ]
    if plan.pipeline is not None and style.head_shared:
        found.append(Exchange("all-reduce", (PIPE,), "head", layer.stream_bytes, 2))
    return found


def _in_step(
    model: ModelConfig,
    plan: Plan,
    vocab: tuple[str, ...],
    layer: LayerShape,
    style: ImplementationProfile,
) -> list[Exchange]:
    """Gradients between replicas, and what ZeRO puts together again."""
    axes, outer = plan.axes, _outer_params(model, plan, vocab, style)
    params = layer_params(model, plan, layer) + outer
    if plan.zero == 0:
        replicas = tuple(axis for axis in (DATA, FSDP) if axes[axis] > 1)
        return (
            [Exchange("all-reduce", replicas, "step", params * style.gradient_bytes, 1)]
            if replicas
            else []
        )
    found = (
        [Exchange("all-reduce", (DATA,), "step", params / axes.fsdp * style.gradient_bytes, 1)]
        if axes.data > 1
        else []
    )
    if plan.zero <= 2:
        found.append(Exchange("all-gather", (FSDP,), "step", params * F32_BYTES, 1))
    if plan.zero == 1:
        return [*found, Exchange("reduce-scatter", (FSDP,), "step", params * F32_BYTES, 1)]
    # Matrices outside the layers: in every microbatch, with stages once.
    times = 1 if plan.pipeline is not None else plan.microbatches
    found.append(Exchange("reduce-scatter", (FSDP,), "step", outer * F32_BYTES, times))
    if plan.zero == 3:
        found.append(Exchange("all-gather", (FSDP,), "step", outer * layer.width, times))
    return found


def layer_params(model: ModelConfig, plan: Plan, layer: LayerShape) -> float:
    """Elements of the layers' matrices on one device, whole along fsdp; empty slots of unequal
    stages included.
    """
    num_layers = (
        model.num_layers
        if plan.pipeline is None
        else max(plan.pipeline.layers_per_stage) * plan.pipeline.repeats
    )
    return num_layers * (layer.attention_weights + layer.mlp_weights)


def outer_params(model: ModelConfig, plan: Plan, style: ImplementationProfile) -> float:
    """The same outside the layers, on the device that has most."""
    return _outer_params(model, plan, _vocab_axes(plan.active_rules(model), style), style)


def _outer_params(
    model: ModelConfig, plan: Plan, vocab: tuple[str, ...], style: ImplementationProfile
) -> float:
    tables = 1 if model.tied or (plan.pipeline is not None and not style.head_shared) else 2
    return (
        tables * model.vocab_size / math.prod([plan.axes[axis] for axis in vocab]) * model.embed_dim
    )


def _vocab_axes(
    rules: Mapping[str, tuple[str, ...]], style: ImplementationProfile
) -> tuple[str, ...]:
    axes = rules.get(VOCAB, ())
    return axes if style.head_shared else tuple(axis for axis in axes if axis != PIPE)


class _Way(NamedTuple):
    """Between the devices along some mesh axes."""

    size: int
    """Devices."""
    s_per_byte: float
    """Of the slowest link of a ring."""
    latency_s: float
    """Of once around."""
    tree_latency_s: float = 0.0
    """The same where hosts are joined by trees, as small all-reduces are."""


class Wires:
    """How long exchanges take on one mesh.

    A collective is a ring through all of its devices: every link carries the same bytes, so the
    slowest counts, and as many rings cross from host to host as devices on a host take part. Every
    step of a ring costs a latency.
    """

    def __init__(self, axes: AxisSizes, cluster: Cluster, rates: Rates):
        self._axes, self._cluster, self._rates = axes, cluster, rates
        self._ways: dict[tuple[tuple[str, ...], bool], _Way] = {}

    def time(self, exchange: Exchange) -> float:
        """Seconds of one exchange by itself.

        Raises PlanError if the speed of a link that it crosses is unknown.
        """
        is_send = exchange.kind == "send"
        way = self._ways.get((exchange.axes, is_send))
        if way is None:
            way = self._ways[exchange.axes, is_send] = (
                self._send(exchange.axes) if is_send else self._ring(exchange.axes)
            )
        if is_send:
            return exchange.num_bytes * way.s_per_byte + way.latency_s
        around_s = (way.size - 1) / way.size * exchange.num_bytes * way.s_per_byte
        ring_s = (
            2.0 * (around_s + way.tree_latency_s)
            if exchange.kind == "all-reduce"
            else around_s + way.latency_s
        )
        return ring_s + self._rates.arrival_s if way.size > 1 else ring_s

    def _ring(self, names: tuple[str, ...]) -> _Way:
        cluster, rates, size = (
            self._cluster,
            self._rates,
            math.prod([self._axes[name] for name in names]),
        )
        if size == 1:
            return _Way(1, 0.0, 0.0, 0.0)
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
        return _Way(size, 1 / speed, latency_s, tree_latency_s)

    def _send(self, names: tuple[str, ...]) -> _Way:
        cluster, rates = self._cluster, self._rates
        if cluster.hosts_crossed(self._axes, names) == 1:
            return _Way(
                2,
                1 / (speed_of(cluster.intra_host) * rates.send_share),
                _latency(cluster.intra_host, rates.latency_s),
            )
        assert cluster.inter_host is not None, "several hosts have an inter-host link"
        return _Way(
            2,
            1 / (speed_of(cluster.inter_host) * rates.inter_host_share),
            _latency(cluster.inter_host, rates.inter_host_latency_s),
        )


@lru_cache(maxsize=1 << 12)
def wires(axes: AxisSizes, cluster: Cluster, rates: Rates) -> Wires:
    """The wires of a mesh; a search asks for the same ones again and again."""
    return Wires(axes, cluster, rates)


def speed_of(link: Link) -> float:
    """Bytes per second. Raises PlanError if they are not known."""
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
