"""Estimate the bytes that a plan needs on each device, without compiling.

Parameters and moments are exact (planning/cost/parameters.py), and so are the activations saved for
backward (models/layer_program.py, planning/cost/activation_buffers.py). XLA's temporary buffers
come on top, and the batch stays throughout. Memory may peak at one of several points of the step:

* *begin*: what a step holds whole was gathered, and is being copied to the order of layers (ZeRO 1
  and 2 without microbatches);
* *head*: forward is done and the loss of a chunk of tokens is computed. The zeros to which
  gradients are added exist already, because XLA allocates them early. If layers are recomputed, the
  recomputation of the last layer has begun;
* *layer*: backward is at a layer and holds activations, their gradients and that layer's gradient;
* *embedding*: backward is at the embedding. Its gradient is as large as its table, and so is the
  head's;
* *update*: the optimizer fetches offloaded moments.

At ZeRO stages 1 and 2 all points hold the whole parameters in the format of the matmuls.

The memory at each point was read off the buffers of some fifty plans compiled ahead of time for
H100s (benchmarks/planner_memory.py compares the estimate with their totals). On a CPU buffers
differ in detail. Before a plan runs, the compiled program's own figure is checked against the
device (planning/ahead_of_time/compile_check.py).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from optimus_jax.config import Config, ModelConfig, RematPolicy
from optimus_jax.mesh.axes import HEADS
from optimus_jax.mesh.zero import split_from
from optimus_jax.models.blockwise_attention import block_size
from optimus_jax.models.families import table_width
from optimus_jax.models.layer_program import EMBED, is_of_heads, matrix_products, scores
from optimus_jax.plan import Plan
from optimus_jax.planning.cost.activation_buffers import buffer_slots
from optimus_jax.planning.cost.communication import stage_parts
from optimus_jax.planning.cost.head_program import head_program, head_sizes
from optimus_jax.planning.cost.implementation_profile import OURS
from optimus_jax.planning.cost.layer_shape import LayerShape, row_shape
from optimus_jax.planning.cost.parameters import LeafCount, params_on_device
from optimus_jax.planning.cost.workload import Workload

F32 = 4
FORWARD_SCORES: dict[RematPolicy, float] = {"none": 1.0, "selective": 2.0, "dots": 1.6, "full": 1.6}
"""Peak memory of XLA attention in forward, as a multiple of one layer's float32 scores. Under remat
it includes the constants that replace masked scores (1) and the masks (1/4), which XLA hoists out
of the loop over layers."""
BACKWARD_SCORES: dict[RematPolicy, float] = {
    "none": 0.75,
    "selective": 1.5,
    "dots": 1.5,
    "full": 1.5,
}
"""The same in backward: without remat, saved weights, one block at a time; otherwise recomputed
scores (1) and their weights in 16 bits (1/2)."""
HIDING_SCORES: dict[RematPolicy, float] = {"none": 0.75, "selective": 3.0, "dots": 2.5, "full": 2.5}
"""The same in backward if collectives in a layer overlap with compute. Blocks then begin early, so
the gradients of most scores (1) exist at the same time, and under selective remat also the
constants (1/2 to 1)."""
GATHERED_STREAMS = 2
"""Arrays of all tokens that exist at once if devices share the tokens of the stream: the input of a
block, and its partial output."""
WORKING_STREAMS = 6
"""Arrays of the residual stream's size that exist at once while a layer is computed: norms in
float32, sums, and activations received from neighbours."""
STREAMS_AGAIN = 3
"""Further such arrays if a layer is recomputed: the stream between its two blocks, and the inputs
and outputs of its norms."""
LEAVES_FETCHED = 2
"""Leaves whose moments are on a device at once if moments are offloaded: one is copied out while
the next is copied in (training/offload.py)."""
LAYERS_RESIDENT = 2
"""Layers whose inputs are on a device at once if they are offloaded: one in use, and one being
copied."""


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """Peak bytes on the most loaded device."""

    params: int
    moments: int
    gradients: int
    """Sums over microbatches, one microbatch's gradients, and parameters that a step holds whole
    (ZeRO 1 and 2)."""
    activations: int
    """Saved activations or activation buffers, and working memory."""
    logits: int
    """Memory of the head: logits, its matrix as cast for use, and that matrix's gradient."""
    batch: int
    """The arrays of the device's examples: small for text, not for images and sound."""
    host: int = 0
    """Bytes in host memory for this device. Not part of the total."""

    @property
    def states(self) -> int:
        """Bytes that persist between steps."""
        return self.params + self.moments

    @property
    def total(self) -> int:
        """Peak device memory in bytes."""
        return self.states + self.gradients + self.activations + self.logits + self.batch


def estimate_memory(workload: Workload, plan: Plan) -> MemoryEstimate:
    """Estimate the peak memory of a training step of `plan` on the most loaded device."""
    parts, num_moments = _Parts(workload, plan), workload.num_moments
    in_loops = parts.without_stages() if plan.pipeline is None else parts.through_stages()
    step_points = [
        (gradients + parts.held, activations, head) for gradients, activations, head in in_loops
    ]
    step_points = _beside_generator(step_points, workload, plan)
    gradients, activations, logits = max([*step_points, *parts.update()], key=sum)
    moments = num_moments * parts.trained(split=plan.zero >= 1) * plan.moment_bytes // F32
    return MemoryEstimate(
        params=parts.stored(),
        moments=0 if plan.offloads_moments else moments,
        gradients=int(gradients),
        activations=int(activations),
        logits=int(logits),
        batch=workload.global_batch * workload.example_bytes // plan.batch_ways(),
        host=int(parts.saved_on_host) + (moments if plan.offloads_moments else 0),
    )


def memory_of_run(config: Config, plan: Plan) -> MemoryEstimate:
    """`estimate_memory` of a run with this config."""
    return estimate_memory(Workload.of(config), plan)


StepPoint = tuple[float, float, float]
"""Bytes of (gradients, activations, head) at one point of the step."""


def _beside_generator(
    step_points: list[StepPoint], workload: Workload, plan: Plan
) -> list[StepPoint]:
    """The points of a step, and before them those of a generator, whose gradients stay."""
    sizes, own = workload.model.generator, workload.generator
    if sizes is None or own is None:
        return step_points
    generator = _Parts(own, plan.of_generator(sizes))
    # Elsewhere they are among the sums of gradients outside the layers.
    is_apart = plan.pipeline is None and plan.microbatches == 1
    stays = generator.trained(split=plan.zero >= 2) if is_apart else 0
    points = [(gradients + stays, activation, head) for gradients, activation, head in step_points]
    before = [
        (gradients + generator.held, activation, head)
        for gradients, activation, head in generator.without_stages()
    ]
    return [*points, *before]


class _Parts:
    """Byte counts on one device, which are combined for each point of the step."""

    def __init__(self, workload: Workload, plan: Plan):
        model, pipeline = workload.model, plan.pipeline
        self.plan, self.num_moments = plan, workload.num_moments
        width = F32 if plan.precision == "f32" else 2
        whole = params_on_device(model, plan.rules, plan.axes)
        self.whole, self.params = whole, (params := whole.trained)
        """All parameters, and those that are trained."""
        layer = row_shape(workload, plan)
        in_branches = bool(model.encoder_layers) and pipeline is not None
        token = _token(model, layer, plan.remat, in_branches=in_branches)
        kept = _token(model, layer, "none", in_branches=in_branches)
        tokens_of_step = workload.global_batch * workload.seq_len
        tokens = max(1, tokens_of_step // plan.batch_ways() // plan.microbatches)
        scored = max(1, tokens * (workload.seq_len - model.frames) // workload.seq_len)
        """Tokens whose logits are computed: those of text."""
        self.repeats = pipeline.repeats if pipeline else 1
        self.visited = pipeline.most_layers if pipeline else model.num_layers
        """Layers that a microbatch passes in one visit to a stage."""
        self.stream = tokens * token.stream
        streams = 1 + workload.num_references
        self.value = streams * self.stream / stage_parts(plan, layer, OURS)
        """Bytes of a device's part of a stage value, which has a stream for each pass."""
        # Only without stages do layers that are not trained run by themselves (Decoder.run_layers).
        self.apart = 0 if pipeline else model.tuning.freeze_layers
        saving = self.visited - (0 if model.tuning.trains("embedding") else self.apart)
        """Layers of a visit that backward reaches."""
        resident = min(saving, LAYERS_RESIDENT) if plan.offloads_activations else saving
        keeps = min(plan.kept_layers, resident)
        self.saved = tokens * (
            (resident - keeps) * token.saved + keeps * kept.saved + token.saved_once
        )
        """Bytes that one visit saves for its backward."""
        self.embedding_saved = 0.0
        """Bytes that the embedding saves for its backward: those of frames of sound."""
        if model.frames:
            program = head_program(workload, plan.precision, splits_length=layer.splits_length)
            rows = layer.with_rows(tokens / workload.seq_len)
            sizes = head_sizes(model, plan, rows, OURS)
            self.embedding_saved = sum(amount.of(sizes) for amount in program.saved)
        if pipeline is None:
            self.saved += self.embedding_saved
        self.saved_on_host = tokens * saving * token.saved if plan.offloads_activations else 0.0
        self.reordered = tokens * saving * token.reordered
        overlaps, again = plan.zero >= 2 and plan.axes.fsdp > 1, plan.remat in ("dots", "full")
        # Adapters are too small to change what XLA overlaps.
        self.scatters = overlaps and any(
            leaf.axes.split != leaf.axes.whole and leaf.leaf.group != "adapter"
            for leaf in params.layer
        )
        hides = overlaps or (plan.remat == "selective" and HEADS in plan.active_rules(model))
        self.forward, self.backward = (
            tokens * token.forward,
            tokens * (token.backward_hiding if hides else token.backward),
        )
        gathers = plan.zero >= 3 and plan.axes.fsdp > 1
        self.again = tokens * token.backward_hiding if self.scatters and gathers and again else 0.0
        """Bytes of the last layer's recomputation, which overlaps with the head if its matrices are
        gathered beside that."""
        loops = plan.overlap != "none"
        waiting = 2 if again and not loops else 1
        # A layer's gradient is whole until it is scattered. With recomputation two layers'
        # gradients are whole at once, since one's scatter overlaps with the next one's compute. In
        # loops of their own the second one waits in the format of the matmuls.
        self.backward += (
            waiting * F32 * params.layer_whole if self.scatters else width * params.largest_whole
        )
        if gathers:
            # What a trained matrix needs when it is gathered is less than its gradient takes.
            frozen = width * (whole.layer_whole - params.layer_whole)
            self.forward, self.backward = self.forward + frozen, self.backward + frozen
        self.ahead = width * whole.layer_whole if loops and gathers else 0
        """Bytes of the matrices of one more layer, which are gathered ahead."""
        if loops:
            self.forward += self.ahead
            self.backward += self.ahead + width * params.layer_whole
        self.table = F32 * params.table_whole
        used_as_stored = width <= whole.table_itemsize < F32 and not gathers
        table_held = any(self._is_held(leaf) for leaf in whole.outer)
        self.table_used = 0 if used_as_stored or table_held else width * whole.table_whole
        used = [leaf for leaf in whole.outer if gathers or width < leaf.itemsize]
        self.outer_used = width * sum([leaf.whole for leaf in used if not self._is_held(leaf)])
        of_layers, of_outer = (
            width * sum([leaf.whole for leaf in leaves if self._is_held(leaf)])
            for leaves in (whole.layer, whole.outer)
        )
        self.held_layers = self.visited * self.repeats * of_layers
        self.held = self.held_layers + of_outer
        """Bytes of the parameters that the step holds whole."""
        num_chunks = -(-scored // plan.loss_chunk_tokens)
        self.logits = F32 * -(-scored // num_chunks) * whole.table_whole // table_width(model)
        # With a single chunk, the gradient of its logits is held in the compute format until there
        # is room for the head's gradient.
        self.head_left = (
            min(self.table, self.logits * width // F32) if num_chunks == 1 else self.table
        )

    def layers(self, *, split: bool) -> int:
        """Bytes of what is trained in the device's layers in float32, including empty slots."""
        return (
            F32
            * self.visited
            * self.repeats
            * (self.params.layer_split if split else self.params.layer_whole)
        )

    def outer(self, *, split: bool) -> int:
        """Bytes of what is trained outside the layers in float32."""
        return F32 * (self.params.outer_split if split else self.params.outer_whole)

    def trained(self, *, split: bool) -> int:
        """Bytes of all trained parameters on the device in float32."""
        return self.layers(split=split) + self.outer(split=split)

    def _is_held(self, leaf: LeafCount) -> bool:
        """Whether a step holds the leaf whole, and stores a shard (mesh/zero.py)."""
        is_split = leaf.axes.split != leaf.axes.whole
        return is_split and split_from(leaf.leaf) <= self.plan.zero < 3

    def _stored_bytes(self, leaves: Iterable[LeafCount]) -> int:
        """Bytes of leaves as they are stored between steps."""
        zero = self.plan.zero
        return sum(
            [
                each.itemsize * (each.split if zero >= split_from(each.leaf) else each.whole)
                for each in leaves
            ]
        )

    def used_layers(self) -> int:
        """Bytes of the parameters of the device's layers as its loops read them."""
        read = [leaf for leaf in self.whole.layer if not self._is_held(leaf)]
        return self.held_layers + self.visited * self.repeats * self._stored_bytes(read)

    def stored(self) -> int:
        """Bytes of all parameters on the device as they are stored."""
        layers = self.visited * self.repeats * self._stored_bytes(self.whole.layer)
        return layers + self._stored_bytes(self.whole.outer)

    def without_stages(self) -> list[StepPoint]:
        """Memory at each point of a step without pipeline stages."""
        split = self.plan.zero >= 2
        total = self.trained(split=split) if self.plan.microbatches > 1 else 0
        gradient = self.layers(split=split) + total + self._trained_copy()
        head = self.table + self.logits + self.table_used + self.ahead
        # Gathered stacks are transposed while the first layer's results are about to be saved.
        begins: list[StepPoint] = []
        if self.plan.zero in (1, 2) and not total:
            zeros = gradient if split else 0
            begins.append((zeros + self.held_layers, self.saved + self.forward, 0.0))
        return [
            *begins,
            (gradient, self.saved + max(self.reordered, self.forward), head),
            # with these logits' gradient in 16 bits, half of their float32 size
            (gradient, self.saved + self.again, head + self.logits / 2),
            (gradient, self.saved + self.backward, self.head_left),
            # the gradients of two tables, one of them in two memory layouts
            (max(gradient - total, total), 4 * self.stream, 3 * self.table),
        ]

    def _trained_copy(self) -> float:
        """Bytes of the trained layers' parameters, which are copied from stacks that hold others
        too.
        """
        if not self.apart:
            return 0.0
        copied = (self.visited - self.apart) / self.visited
        return copied * self.used_layers()

    def through_stages(self) -> list[StepPoint]:
        """Memory at each point of a step with pipeline stages. Activation buffers exist in all
        ticks.
        """
        pipeline, slots_per_buffer = self.plan.pipeline, buffer_slots(self.plan)
        assert pipeline is not None
        split = self.plan.zero >= 2
        # including a spare slot per buffer, and what is sent to and received from neighbours
        slots = (slots_per_buffer.inputs + 1 + slots_per_buffer.cotangents + 1 + 2) * self.value
        if pipeline.keep_residuals:
            slots += (slots_per_buffer.residuals + 1) * self.saved
        gradient, visit_gradient = (
            self.layers(split=split) + self.outer(split=False),
            self.layers(split=split) / self.repeats,
        )
        visit = self.saved
        if self.repeats > 1:
            visit += self.used_layers() / self.repeats  # of the stack
        step_points, zeros = [], 0
        if slots_per_buffer.ends_in_single_tick:
            # XLA does not compile a single tick to a loop, so the zeros that its scans start from
            # exist throughout the step.
            zeros = self.table
            visit += 0 if pipeline.keep_residuals else self.saved
            # Nor is its gradient added in place: the largest matrix's sum gets a new buffer.
            largest = (
                F32
                * self.visited
                * (self.params.largest_split if split else self.params.largest_whole)
            )
            step_points = [(gradient + visit_gradient + largest, 4 * self.stream, zeros)]
        return [
            *step_points,
            (
                gradient + visit_gradient,
                slots + visit + self.backward,
                self.outer_used + zeros + self.head_left,
            ),
            (
                gradient,
                slots + 4 * self.stream + self.embedding_saved,
                self.outer_used + self.table + self.logits,
            ),
        ]

    def update(self) -> list[StepPoint]:
        """Memory while the optimizer updates parameters: offloaded moments are fetched."""
        if not self.plan.offloads_moments:
            return []
        return [(self.trained(split=self.plan.zero >= 1) + self._fetched(), 0, 0)]

    def _fetched(self) -> int:
        """Bytes of moments that are on the device at once while they are fetched from the host.

        They are fetched leaf by leaf; the largest leaf is a stack of matrices or a table.
        """
        split = self.plan.zero >= 1
        matrices = (
            self.visited
            * self.repeats
            * (self.params.largest_split if split else self.params.largest_whole)
        )
        table = (
            min(self.params.table_whole, self.params.outer_split)
            if split
            else self.params.table_whole
        )
        return LEAVES_FETCHED * self.num_moments * self.plan.moment_bytes * max(matrices, table)


@dataclass(frozen=True)
class _Token:
    """Bytes per token in one layer."""

    saved: float
    """Saved by forward for backward."""
    saved_once: float
    """Saved once for all layers together."""
    stream: float
    """The residual stream."""
    reordered: float
    """Attention outputs copied to the memory layout that backward needs, for all layers, before
    backward begins."""
    forward: float
    """Temporary memory in forward."""
    backward: float
    """Temporary memory in backward."""
    backward_hiding: float
    """Temporary memory in backward if collectives overlap with compute."""


@lru_cache(maxsize=1 << 14)
def _token(
    model: ModelConfig, layer: LayerShape, remat: RematPolicy, *, in_branches: bool
) -> _Token:
    """Of a layer for one sequence.

    Args:
      in_branches: whether a layer is a branch of the program, which saves what either side does.
    """
    sizes, width, seq_len = layer.sizes, layer.width, layer.programs.seq_len
    plain, program = layer.programs.under("none"), layer.programs.under(remat)
    forward = plain.forward
    stream, query = layer.stream_bytes / seq_len, width * sizes.heads * sizes.head_dim
    hidden, projected = (
        width
        * sum(
            product.columns.of(sizes)
            for product in matrix_products(forward, of_feed_forward=of_feed_forward)
            if EMBED not in product.columns.factors
        )
        for of_feed_forward in (True, False)
    )
    seen = scores(plain.largest_forward, sizes) / seq_len
    # Each block of queries gets its own copy of the keys and values that it attends to.
    copies = 0.0
    if seen and remat != "none":
        copies = (projected - query) * seen / sizes.heads / block_size(seq_len)
    common = WORKING_STREAMS * stream + hidden + copies
    if layer.programs.length_ways > 1:
        common += GATHERED_STREAMS * width * sizes.embed
    made_again = 0.0
    if forward.fused and remat == "full":
        saved = sum(amount.of(sizes) for amount in plain.saved if is_of_heads(amount))
        made_again = saved / seq_len + STREAMS_AGAIN * stream
    sides = layer.programs.of_sides(remat) if in_branches else (program,)
    return _Token(
        saved=sum(side.saved_bytes(sizes) for side in sides) / seq_len,
        saved_once=program.saved_once_bytes(model, sizes) / seq_len,
        stream=stream,
        reordered=0 if forward.fused or remat in ("dots", "full") else query,
        forward=FORWARD_SCORES[remat] * F32 * seen + common,
        backward=BACKWARD_SCORES[remat] * F32 * seen + hidden + common + made_again,
        backward_hiding=HIDING_SCORES[remat] * F32 * seen + hidden + common,
    )
