"""The communication of a step, by mesh axis, and its time.

A *communication op* is one collective or send of the step's program (mesh/collectives.py,
mesh/zero.py, pipeline/executor.py), with its count per *part* of the step: one layer's forward or
backward of one microbatch, one microbatch's head, one tick, or the whole step.
"""

import math
from collections.abc import Iterable
from functools import lru_cache
from typing import Literal, NamedTuple

from optimus_jax.config import ModelConfig, RematPolicy
from optimus_jax.config.axes import FSDP, PIPE, AxisSizes
from optimus_jax.errors import PlanError, explain
from optimus_jax.mesh.axes import EMBED, HEADS, LENGTH, MLP, VOCAB
from optimus_jax.mesh.rules import Rules
from optimus_jax.models.program_reader import CollectiveKind, TracedCollective
from optimus_jax.plan import Plan
from optimus_jax.planning.cost.head_program import (
    HeadProgram,
    HeadSizes,
    head_program,
    head_sizes,
    vocab_axes,
)
from optimus_jax.planning.cost.implementation_profile import ImplementationProfile
from optimus_jax.planning.cost.layer_shape import LayerShape
from optimus_jax.planning.cost.parameters import (
    layers_on_device,
    outer_matrices,
    step_exchanges,
)
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
    model: ModelConfig, plan: Plan, layer: LayerShape, implementation: ImplementationProfile
) -> list[CommunicationOp]:
    """All communication of a step of `plan`; `layer` is one device's part of a layer."""
    rules, pipeline = plan.active_rules(model), plan.pipeline
    twice = pipeline is not None and not pipeline.keep_residuals
    split = tuple((logical, rules.get(logical, ())) for logical in IN_LAYERS)
    found = [*_in_layer(layer, plan.remat, plan.zero, twice, split, implementation)]
    vocab, length = vocab_axes(model, plan, implementation), rules.get(LENGTH, ())
    if vocab:
        program = head_program(model, plan.precision, layer.programs.length_ways)
        found += _in_head(
            program, head_sizes(model, plan, layer.stream_tokens, implementation), vocab, length
        )
    # Matrices outside the layers move once per microbatch, or once per step with pipeline stages.
    times = 1 if pipeline is not None else plan.microbatches
    found += _in_step(
        model,
        plan.rules,
        plan.axes,
        plan.zero,
        layers_on_device(model, plan),
        times,
        layer.width,
        implementation,
    )
    if pipeline is not None:
        slack = pipeline.send_slack or not implementation.lockstep
        found.append(CommunicationOp("send", (PIPE,), "tick", layer.stream_bytes, 1, slack))
        if implementation.head_shared:
            # From the embedding to the first stage, and from the last stage to the head.
            found.append(CommunicationOp("all-reduce", (PIPE,), "head", layer.stream_bytes, 2))
    return found


@lru_cache(maxsize=1 << 14)
def _in_layer(
    layer: LayerShape,
    remat: RematPolicy,
    zero: int,
    twice: bool,
    split: tuple[tuple[str, tuple[str, ...]], ...],
    implementation: ImplementationProfile,
) -> tuple[CommunicationOp, ...]:
    """The collectives of a layer's program that a plan has.

    Args:
      twice: whether backward recomputes the whole stage.
      split: the mesh axes of logical axes.
    """
    rules, programs = dict(split), layer.programs
    program = programs.under(remat)
    forward, backward = program.forward.collectives, program.backward.collectives
    if implementation.repeats_last and remat in ("dots", "full"):
        backward += tuple(each for each in forward if each.over != (FSDP,))[-1:]
    if twice:
        backward = forward + backward
    parts: tuple[tuple[StepPart, tuple[TracedCollective, ...]], ...] = (
        ("layer forward", forward),
        ("layer backward", backward),
    )
    messages = []
    for part, collectives in parts:
        for each in collectives:
            [over] = each.over
            of_storage = over == FSDP
            axes = rules.get(EMBED if of_storage else over, ())
            # fsdp's axis also splits the batch, so it is there at every ZeRO stage.
            if axes and not (of_storage and zero < ZERO_STAGE_OF[each.kind]):
                hides = of_storage and implementation.fsdp_hides
                messages.append((each.kind, axes, part, hides, each.num_bytes.of(layer.sizes)))
    ops = _joined(messages)
    if implementation.fsdp_combines:
        ops = tuple(
            op._replace(num_bytes=op.num_bytes * op.count, count=1) if op.axes == (FSDP,) else op
            for op in ops
        )
    return ops


def _joined(
    messages: Iterable[tuple[CollectiveKind, tuple[str, ...], StepPart, bool, float]],
) -> tuple[CommunicationOp, ...]:
    """One op for all messages (kind, axes, part, hides, bytes) that are alike but for their
    bytes.
    """
    found: dict[tuple, list[float]] = {}
    for *key, num_bytes in messages:
        found.setdefault(tuple(key), []).append(num_bytes)
    return tuple(
        CommunicationOp(kind, axes, part, sum(sizes) / len(sizes), len(sizes), hides)
        for (kind, axes, part, hides), sizes in found.items()
    )


@lru_cache(maxsize=1 << 14)
def _in_head(
    program: HeadProgram, sizes: HeadSizes, vocab: tuple[str, ...], length: tuple[str, ...]
) -> tuple[CommunicationOp, ...]:
    """The collectives of embedding and head in a plan whose mesh axes `vocab` split the vocabulary,
    and `length` the tokens of the stream.
    """
    axes_of = {LENGTH: length, VOCAB: tuple(axis for axis in vocab if axis not in length)}
    messages = []
    for each in program.collectives:
        axes = tuple(axis for over in each.over for axis in axes_of[over])
        if axes:
            messages.append((each.kind, axes, "head", False, each.num_bytes.of(sizes)))
    return _joined(messages)


@lru_cache(maxsize=1 << 14)
def _in_step(
    model: ModelConfig,
    rules: Rules,
    axes: AxisSizes,
    zero: int,
    num_layers: int,
    times: int,
    width: int,
    implementation: ImplementationProfile,
) -> tuple[CommunicationOp, ...]:
    """Gradient reductions between replicas, and ZeRO's gathers and scatters.

    XLA combines those of one kind.

    Args:
      num_layers: layers of the device.
      times: how often matrices outside the layers are gathered.
      width: bytes of an activation.
    """
    exchanged = step_exchanges(model, rules, axes, zero, num_layers, implementation.head_shared)
    found = [
        CommunicationOp(
            kind,
            over,
            "step",
            elements * (implementation.gradient_bytes if kind == "all-reduce" else F32_BYTES),
            1,
        )
        for (kind, over), elements in exchanged.items()
    ]
    if zero >= 2:
        outer = outer_matrices(model, rules, axes, implementation.head_shared)
        found.append(CommunicationOp("reduce-scatter", (FSDP,), "step", outer * F32_BYTES, times))
        if zero == 3:
            found.append(CommunicationOp("all-gather", (FSDP,), "step", outer * width, times))
    return tuple(found)


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
