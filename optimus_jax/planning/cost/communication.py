"""The communication of a step, by mesh axis.

A *communication op* is one collective or send of the step's program (mesh/collectives.py,
mesh/zero.py, pipeline/executor.py), with its count per *part* of the step: one layer's forward or
backward of one microbatch, one embedding, one microbatch's head, one broadcast from a stage to all,
one tick, or the whole step.
"""

from collections.abc import Iterable
from functools import lru_cache
from typing import Literal, NamedTuple

from optimus_jax.config import ModelConfig, Overlap, RematPolicy, Scatter
from optimus_jax.config.axes import FSDP, PIPE, TENSOR
from optimus_jax.mesh.axes import EMBED, HEADS, LENGTH, MLP, VOCAB
from optimus_jax.models.program_reader import CollectiveKind, ProgramPart
from optimus_jax.plan import Plan
from optimus_jax.planning.cost.head_program import (
    HeadProgram,
    HeadSizes,
    head_program,
    head_sizes,
    vocab_split,
)
from optimus_jax.planning.cost.implementation_profile import ImplementationProfile
from optimus_jax.planning.cost.layer_shape import LayerShape
from optimus_jax.planning.cost.parameters import (
    layers_on_device,
    outer_matrices,
    step_exchanges,
)
from optimus_jax.planning.cost.workload import Workload

LayerPart = Literal["layer forward", "layer backward"]
StepPart = LayerPart | Literal["embed", "head", "broadcast", "tick", "outer", "layer sums", "step"]
LAYER_PARTS: tuple[LayerPart, LayerPart] = ("layer forward", "layer backward")
OUTSIDE_LAYERS: tuple[StepPart, ...] = ("embed", "head", "broadcast")
"""The parts of embedding and head."""
OUTER: Literal["outer"] = "outer"
"""The part of the step for matrices of embedding and head, which are exchanged over fsdp."""
LAYER_SUMS: Literal["layer sums"] = "layer sums"
"""That for sums over replicas that run layer by layer, beside backward."""
STEP: Literal["step"] = "step"
"""That for what a step has once, at its end."""

ZERO_STAGE_OF: dict[CollectiveKind, int] = {"reduce-scatter": 2, "all-gather": 3}
"""ZeRO stage from which a layer scatters its gradients, and gathers its matrices."""
IN_LAYERS = (HEADS, MLP, EMBED)
"""Logical axes over which a layer has collectives."""
VOCABULARY = "vocabulary"
"""The term for communication of embedding and head; other terms are named by their first axis."""
F32_BYTES = 4


def exchanged_bytes(plan: Plan) -> int:
    """Bytes of an element of a layer's gradient that is exchanged to be scattered: of the products
    that give it (mesh/formats.py).
    """
    return 2 if plan.precision == "bf16" else F32_BYTES


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
    """Whether it may overlap with compute where no compiler says how (planning/cost/overlap.py)."""

    @property
    def term(self) -> str:
        """The term of the prediction to which it contributes."""
        return VOCABULARY if self.part in OUTSIDE_LAYERS else self.axes[0]


def layer_ops(
    model: ModelConfig, plan: Plan, layer: LayerShape, implementation: ImplementationProfile
) -> tuple[CommunicationOp, ...]:
    """The collectives of one layer of a microbatch; `layer` is one device's part of it."""
    rules, pipeline = plan.active_rules(model), plan.pipeline
    recomputes = pipeline is not None and not pipeline.keep_residuals
    split = tuple((logical, rules.get(logical, ())) for logical in IN_LAYERS)
    loops = _LoopShape(
        plan.overlap,
        pipeline.most_layers if pipeline else model.num_layers,
        pipeline is None,
        plan.scatter,
        exchanged_bytes(plan),
    )
    return _in_layer(layer, plan.remat, plan.zero, recomputes, split, implementation, loops)


class _LoopShape(NamedTuple):
    """How layers run in loops."""

    overlap: Overlap
    num_layers: int
    """Of a loop."""
    hands_over: bool
    """As of `run_stack`."""
    scatter: Scatter
    gradient_bytes: int
    """Bytes of an element of a gradient that is exchanged."""

    def gathers(self, part: StepPart) -> float:
        """Gathers of a layer's matrices: one more in a loop that gathers ahead, in forward of a
        layer that nothing follows, and in backward of one that was not handed over.
        """
        is_more = self.overlap != "none" and (part == LAYER_PARTS[0] or not self.hands_over)
        return 1 + is_more / self.num_layers


def head_ops(
    workload: Workload, plan: Plan, layer: LayerShape, implementation: ImplementationProfile
) -> list[CommunicationOp]:
    """The collectives of an embedding, of a microbatch's head and loss, and of a broadcast to all
    stages: of the last one's output, or of the first one's input gradient.
    """
    model, found = workload.model, []
    vocab = vocab_split(model, plan, implementation).axes
    length = plan.active_rules(model).get(LENGTH, ())
    if vocab:
        program = head_program(workload, plan.precision, splits_length=layer.splits_length)
        found += _in_head(program, head_sizes(model, plan, layer, implementation), vocab, length)
    if plan.pipeline is not None and implementation.head_shared:
        parts, num_bytes = stage_parts(plan, layer, implementation), layer.stream_bytes
        found.append(CommunicationOp("all-reduce", (PIPE,), "broadcast", num_bytes / parts, 1))
        if parts > 1:
            found.append(CommunicationOp("all-gather", (TENSOR,), "broadcast", num_bytes, 1))
    return found


def tick_ops(
    plan: Plan, layer: LayerShape, implementation: ImplementationProfile
) -> list[CommunicationOp]:
    """The send of a tick, if there are pipeline stages, and the gather of what was sent in parts:
    of inputs and cotangents, and of inputs again if backward recomputes the stage.
    """
    pipeline = plan.pipeline
    if pipeline is None:
        return []
    slack = pipeline.send_slack if implementation.lockstep else not implementation.waits_for_sends
    parts, num_bytes = stage_parts(plan, layer, implementation), layer.stream_bytes
    ops = [CommunicationOp("send", (PIPE,), "tick", num_bytes / parts, 1, slack)]
    if parts > 1:
        gathers = 1.0 if pipeline.keep_residuals else 1.5
        ops.append(CommunicationOp("all-gather", (TENSOR,), "tick", num_bytes, gathers))
    return ops


def stage_parts(plan: Plan, layer: LayerShape, implementation: ImplementationProfile) -> int:
    """Parts into which devices along tensor divide a value that goes from stage to stage
    (pipeline/stage_parts.py). 1 if they hold different tokens anyway.
    """
    return 1 if layer.splits_length or not implementation.sends_parts else plan.axes.tensor


@lru_cache(maxsize=1 << 14)
def _in_layer(
    layer: LayerShape,
    remat: RematPolicy,
    zero: int,
    recomputes: bool,
    split: tuple[tuple[str, tuple[str, ...]], ...],
    implementation: ImplementationProfile,
    loops: _LoopShape,
) -> tuple[CommunicationOp, ...]:
    """The collectives of a layer's program that a plan has.

    Args:
      recomputes: whether backward recomputes the whole stage.
      split: the mesh axes of logical axes.
    """
    rules, programs = dict(split), layer.programs
    program = programs.under(remat)
    forward, backward = program.forward.collectives, program.backward.collectives
    if implementation.repeats_last and remat in ("dots", "full"):
        backward += tuple(each for each in forward if each.over != (FSDP,))[-1:]
    if recomputes:
        backward = forward + backward
    messages = []
    for part, collectives in zip(LAYER_PARTS, (forward, backward), strict=True):
        for each in collectives:
            [over] = each.over
            of_storage = over == FSDP
            axes = rules.get(EMBED if of_storage else over, ())
            # fsdp's axis also splits the batch, so it is there at every ZeRO stage.
            if axes and not (of_storage and zero < ZERO_STAGE_OF[each.kind]):
                hides = of_storage and implementation.fsdp_hides
                num_bytes = each.num_bytes.of(layer.sizes)
                messages.append(((each.kind, axes, part, hides), num_bytes, each.runs))
    ops = tuple(_in_loops(op, loops) if op.axes == (FSDP,) else op for op in _joined(messages))
    if implementation.fsdp_combines:
        ops = tuple(
            op._replace(num_bytes=op.num_bytes * op.count, count=1) if op.axes == (FSDP,) else op
            for op in ops
        )
    return ops


def _in_loops(op: CommunicationOp, loops: _LoopShape) -> CommunicationOp:
    """An exchange of a layer's matrices or their gradients, as the plan's loops have it."""
    if op.kind == "all-gather":
        return op._replace(count=op.count * loops.gathers(op.part))
    if loops.scatter == "exchange":
        size = op.num_bytes / F32_BYTES * loops.gradient_bytes
        return op._replace(kind="all-to-all", num_bytes=size)
    return op


def _joined(
    messages: Iterable[tuple[tuple[CollectiveKind, tuple[str, ...], StepPart, bool], float, float]],
) -> tuple[CommunicationOp, ...]:
    """One op for all messages alike in (kind, axes, part, hides), of bytes and how often they are
    sent.
    """
    found: dict[tuple, tuple[float, float]] = {}
    for key, num_bytes, runs in messages:
        total, count = found.get(key, (0.0, 0.0))
        found[key] = (total + num_bytes * runs, count + runs)
    return tuple(
        CommunicationOp(kind, axes, part, total / count, count, hides)
        for (kind, axes, part, hides), (total, count) in found.items()
    )


@lru_cache(maxsize=1 << 14)
def _in_head(
    program: HeadProgram, sizes: HeadSizes, vocab: tuple[str, ...], length: tuple[str, ...]
) -> tuple[CommunicationOp, ...]:
    """The collectives of embedding and head in a plan whose mesh axes `vocab` split the vocabulary,
    and `length` the tokens of the stream.
    """
    axes_of = {LENGTH: length, VOCAB: tuple(axis for axis in vocab if axis not in length)}
    parts: tuple[tuple[StepPart, ProgramPart], ...] = (
        ("embed", program.embed),
        ("head", program.rest),
    )
    messages = []
    for part, of_part in parts:
        for each in of_part.collectives:
            axes = tuple(axis for over in each.over for axis in axes_of[over])
            if axes:
                key = (each.kind, axes, part, False)
                messages.append((key, each.num_bytes.of(sizes), each.runs))
    return _joined(messages)


def step_ops(
    model: ModelConfig, plan: Plan, width: int, implementation: ImplementationProfile
) -> list[CommunicationOp]:
    """What a step has once: gradient reductions between replicas, gathers of what it holds, and
    ZeRO's gathers and scatters of what is outside the layers.

    XLA combines those of one kind. Sums over replicas that run layer by layer, beside backward of
    others, count here too.

    Args:
      width: bytes of an activation.
    """
    rules, axes, head_shared = plan.rules, plan.axes, implementation.head_shared
    num_layers = layers_on_device(model, plan)
    # What is held is gathered in the format of the matmuls.
    itemsize = {"all-reduce": implementation.gradient_bytes, "all-gather": width}
    found = []
    for (kind, over), (layer, outer) in step_exchanges(
        model, rules, axes, plan.zero, head_shared
    ).items():
        size = itemsize.get(kind, F32_BYTES)
        at_end = outer
        # Over fsdp too, only vectors are summed then: they wait for the end of the step.
        by_layer = plan.zero == 0 or (plan.zero >= 2 and FSDP not in over)
        if plan.sums_by_layer and kind == "all-reduce" and by_layer:
            # Behind scatters, sums begin an iteration later, and the first one is of zeros.
            times = num_layers + (plan.zero >= 2)
            found.append(CommunicationOp(kind, over, LAYER_SUMS, layer * size, times, True))
        else:
            at_end += num_layers * layer
        found.append(CommunicationOp(kind, over, STEP, at_end * size, 1))
    if plan.zero >= 2:
        # Once per microbatch, or once per step with pipeline stages.
        times = 1 if plan.pipeline is not None else plan.microbatches
        outer = outer_matrices(model, rules, axes, head_shared)
        scattered = F32_BYTES * sum(each.whole for each in outer if each.leaf.trained)
        # What is stored in bf16 is gathered as it is (mesh/zero.py).
        gathered = sum(each.whole * min(width, each.itemsize) for each in outer)
        if scattered:
            kind: CollectiveKind = "reduce-scatter" if plan.scatter == "sum" else "all-to-all"
            # Stages add gradients up in float32 before they are scattered.
            size = F32_BYTES if plan.pipeline is not None else exchanged_bytes(plan)
            scattered = scattered / F32_BYTES * (F32_BYTES if plan.scatter == "sum" else size)
            found.append(CommunicationOp(kind, (FSDP,), OUTER, scattered, times))
        if plan.zero == 3:
            found.append(CommunicationOp("all-gather", (FSDP,), OUTER, gathered, times))
    return found
