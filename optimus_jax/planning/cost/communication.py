"""The communication of a step, by mesh axis, and its time.

A *communication op* is one collective or send of the step's program (mesh/collectives.py,
mesh/zero.py, pipeline/executor.py), with its count per *part* of the step: one layer's forward or
backward of one microbatch, one microbatch's head, one tick, or the whole step.
"""

import math
from functools import lru_cache
from typing import Literal, NamedTuple

from optimus_jax.config import ModelConfig, RematPolicy
from optimus_jax.config.axes import FSDP, PIPE, AxisSizes
from optimus_jax.errors import PlanError, explain
from optimus_jax.mesh.axes import EMBED, HEADS, LENGTH, MLP, VOCAB
from optimus_jax.models.program_reader import Collective, CollectiveKind
from optimus_jax.plan import Plan
from optimus_jax.planning.cost.head_program import head_program, head_sizes, vocab_axes
from optimus_jax.planning.cost.implementation_profile import ImplementationProfile
from optimus_jax.planning.cost.layer_shape import LayerShape
from optimus_jax.planning.cost.parameters import outer_matrices, step_exchanges
from optimus_jax.planning.cost.rates import Rates
from optimus_jax.planning.profiles.cluster import Cluster
from optimus_jax.planning.profiles.links import Link

StepPart = Literal["layer forward", "layer backward", "head", "tick", "step"]

ZERO_STAGE_OF: dict[CollectiveKind, int] = {"reduce-scatter": 2, "all-gather": 3}
"""ZeRO stage from which a layer scatters its gradients, and gathers its matrices."""
IN_LAYERS = (HEADS, MLP, EMBED)
"""Logical axes over which a layer has collectives."""
VOCABULARY = "vocabulary"
"""The term for communication of embedding and head; other terms are named by their first axis."""
F32_BYTES = 4


class CommunicationOp(NamedTuple):
    """A collective or send, with its count in a part of the step."""

    kind: CollectiveKind | Literal["send"]
    axes: tuple[str, ...]
    """Mesh axes that it spans."""
    part: StepPart
    """Part of the step."""
    num_bytes: float
    """The message on one device, on average: the whole result (all-reduce, all-gather) or argument
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
    found = _in_head(model, plan, layer, style) + _in_step(model, plan, layer, style)
    twice = plan.pipeline is not None and not plan.pipeline.keep_residuals
    split = tuple((logical, rules.get(logical, ())) for logical in IN_LAYERS)
    found += _in_layer(layer, plan.remat, plan.zero, twice, split, style)
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


@lru_cache(maxsize=1 << 14)
def _in_layer(
    layer: LayerShape,
    remat: RematPolicy,
    zero: int,
    twice: bool,
    split: tuple[tuple[str, tuple[str, ...]], ...],
    style: ImplementationProfile,
) -> list[CommunicationOp]:
    """The collectives of a layer's program that a plan has.

    Args:
      twice: whether backward recomputes the whole stage.
      split: the mesh axes of logical axes.
    """
    rules, programs = dict(split), layer.programs
    program = programs.under(remat)
    forward, backward = program.forward.collectives, program.backward.collectives
    if style.repeats_last and remat == "full":
        backward = programs.under("none").backward.collectives + forward
    if twice:
        backward = forward + backward
    parts: tuple[tuple[StepPart, tuple[Collective, ...]], ...] = (
        ("layer forward", forward),
        ("layer backward", backward),
    )
    found: dict[tuple, list[float]] = {}
    for part, collectives in parts:
        for each in collectives:
            [over] = each.over
            of_storage = over == FSDP
            axes = rules.get(EMBED if of_storage else over, ())
            # fsdp's axis also splits the batch, so it is there at every ZeRO stage.
            if axes and not (of_storage and zero < ZERO_STAGE_OF[each.kind]):
                messages = found.setdefault((each.kind, axes, part, of_storage), [])
                messages.append(each.num_bytes.of(layer.sizes))
    ops = []
    for (kind, axes, part, of_storage), messages in found.items():
        count = 1 if of_storage and style.fsdp_combines else len(messages)
        hides = of_storage and style.fsdp_hides
        ops.append(CommunicationOp(kind, axes, part, sum(messages) / count, count, hides))
    return ops


def _in_head(
    model: ModelConfig, plan: Plan, layer: LayerShape, style: ImplementationProfile
) -> list[CommunicationOp]:
    """Communication of embedding and head.

    With pipeline stages, also moves activations from the embedding to the first stage and from the
    last stage to the head.
    """
    found, vocab = [], vocab_axes(model, plan, style)
    if vocab:
        sizes = head_sizes(model, plan, layer.stream_tokens, style)
        length = plan.active_rules(model).get(LENGTH, ())
        axes_of = {LENGTH: length, VOCAB: tuple(axis for axis in vocab if axis not in length)}
        program = head_program(model, plan.precision, layer.programs.length_ways)
        for each in program.collectives:
            axes = tuple(axis for over in each.over for axis in axes_of[over])
            if axes:
                found.append(CommunicationOp(each.kind, axes, "head", each.num_bytes.of(sizes), 1))
    if plan.pipeline is not None and style.head_shared:
        found.append(CommunicationOp("all-reduce", (PIPE,), "head", layer.stream_bytes, 2))
    return found


def _in_step(
    model: ModelConfig, plan: Plan, layer: LayerShape, style: ImplementationProfile
) -> list[CommunicationOp]:
    """Gradient reductions between replicas, and ZeRO's gathers and scatters.

    XLA combines those of one kind.
    """
    found = [
        CommunicationOp(
            kind,
            axes,
            "step",
            elements * (style.gradient_bytes if kind == "all-reduce" else F32_BYTES),
            1,
        )
        for (kind, axes), elements in step_exchanges(model, plan, style).items()
    ]
    if plan.zero >= 2:
        # Matrices outside the layers move once per microbatch, or once per step with pipeline
        # stages.
        times = 1 if plan.pipeline is not None else plan.microbatches
        outer = outer_matrices(model, plan, style)
        found.append(CommunicationOp("reduce-scatter", (FSDP,), "step", outer * F32_BYTES, times))
        if plan.zero == 3:
            found.append(CommunicationOp("all-gather", (FSDP,), "step", outer * layer.width, times))
    return found


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
