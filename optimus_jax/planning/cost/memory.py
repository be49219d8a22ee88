"""Estimate the bytes that a plan needs on each device, without compiling.

States are exact (planning/cost/sizes.py), and so is what backward keeps (models/activations.py,
planning/cost/activation_buffers.py). On top of these comes what XLA holds when most is alive. That
may be in one of several places of the step:

* *head*: forward is done and the loss of a chunk of tokens is computed. The zeros that gradients
  are summed in are there already, because XLA makes them early, and if layers are computed again,
  the last one has begun;
* *layer*: backward is at a layer and works on activations, their gradients and that layer's
  gradient;
* *embedding*: backward is at the embedding, whose gradient is as large as its table, as is the
  head's;
* *update*: the optimizer turns the gradient into new parameters, which stages 1 and 2 of ZeRO
  gather.

How much each holds was read off the buffers of some fifty plans compiled for H100s that are not
there (benchmarks/planner_memory.py keeps the estimate beside their totals). On a CPU buffers differ
in detail. The compiled program's own figure is checked against the device afterwards
(planning/ahead_of_time/compile_check.py).
"""

from dataclasses import dataclass
from functools import lru_cache

from optimus_jax.config import AttentionKernel, ModelConfig, RematPolicy
from optimus_jax.models.activations import saved_bytes, saved_once_bytes
from optimus_jax.models.flops import block_size, computed_pairs, mlp_matrices
from optimus_jax.plan import Plan
from optimus_jax.planning.cost.activation_buffers import buffer_slots
from optimus_jax.planning.cost.sizes import sizes_of

F32 = 4
FORWARD_SCORES: dict[RematPolicy, float] = {"none": 1.0, "selective": 2.0, "dots": 1.6, "full": 1.6}
"""Of XLA's attention scores of one layer, in float32, that forward has at once. Under remat most of
it are the constants that masked scores are replaced by (1) and the masks (1/4), which XLA takes out
of the loop over layers."""
BACKWARD_SCORES: dict[RematPolicy, float] = {
    "none": 0.75,
    "selective": 1.5,
    "dots": 1.5,
    "full": 1.5,
}
"""The same in backward: weights that were kept, a block at a time (none), or the scores again (1)
and their weights in 16 bits (1/2)."""
HIDING_SCORES: dict[RematPolicy, float] = {"none": 0.75, "selective": 3.0, "dots": 2.5, "full": 2.5}
"""The same where collectives in a layer are to be hidden: blocks are then begun early, and the
gradients of most scores (1) exist beside them; and where layers are not taken apart, the constants
(1/2 to 1)."""
WORKING_STREAMS = 6
"""Values of the residual stream's size that work on a layer has at once: norms in float32, sums,
and what neighbours send."""
STREAMS_AGAIN = 3
"""Those that a layer which is computed again makes beside attention's values: its middle, and what
its norms begin and end with."""
LEAVES_FETCHED = 2
"""Whose moments a device holds at once where they lie on the host: one's on their way out, the next
one's on their way in (training/offload.py)."""
LAYERS_RESIDENT = 2
"""Whose inputs it holds where those lie there: one that is used, and one on its way."""
UPDATE_COPIES = 2.5
"""Of a device's share of the layers, while new parameters are gathered: parameters and moments of
the larger matrices, before they are put in place."""


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """Peak bytes on the most loaded device."""

    params: int
    moments: int
    gradients: int
    """Sums over microbatches, what one microbatch adds to them, and what the update makes of
    them."""
    activations: int
    """Saved activations or activation buffers, and working memory."""
    logits: int
    """What the head needs, its matrix as it is used and that matrix's gradient included."""
    host: int = 0
    """In the host's memory, for this device; not part of the total."""

    @property
    def states(self) -> int:
        """Bytes that persist between steps."""
        return self.params + self.moments

    @property
    def total(self) -> int:
        """Peak device memory in total."""
        return self.states + self.gradients + self.activations + self.logits


def estimate_memory(
    model: ModelConfig, plan: Plan, *, seq_len: int, global_batch: int
) -> MemoryEstimate:
    """The memory of a training step of `plan` per device."""
    parts = _Parts(model, plan, seq_len, global_batch)
    step_points = parts.without_stages() if plan.pipeline is None else parts.through_stages()
    gradients, activations, logits = max([*step_points, *parts.update()], key=sum)
    moments = 2 * parts.parameters(split=plan.zero >= 1) * plan.moment_bytes // F32
    return MemoryEstimate(
        params=parts.parameters(split=plan.zero >= 3),
        moments=0 if plan.offloads_moments else moments,
        gradients=int(gradients),
        activations=int(activations),
        logits=int(logits),
        host=int(parts.kept_on_host) + (moments if plan.offloads_moments else 0),
    )


StepPoint = tuple[float, float, float]
"""Bytes of (gradients, activations, head) at one point of the step."""


class _Parts:
    """Byte counts on one device, combined for each point of the step."""

    def __init__(self, model: ModelConfig, plan: Plan, seq_len: int, global_batch: int):
        self.plan, pipeline = plan, plan.pipeline
        width = F32 if plan.precision == "f32" else 2
        self.sizes = sizes = sizes_of(model, plan.rules, plan.axes)
        token = _token(
            model, plan.remat, plan.attention, width, seq_len, sizes.heads_ways, sizes.mlp_ways
        )
        tokens = max(1, global_batch * seq_len // plan.batch_ways() // plan.microbatches)
        self.repeats = pipeline.repeats if pipeline else 1
        self.visited = max(pipeline.layers_per_stage) if pipeline else model.num_layers
        """Layers that a microbatch visits in a row."""
        self.stream = tokens * token.stream
        resident = min(self.visited, LAYERS_RESIDENT) if plan.offloads_activations else self.visited
        self.kept = tokens * (resident * token.kept + token.kept_once)
        """By a visit, for its backward."""
        self.kept_on_host = tokens * self.visited * token.kept if plan.offloads_activations else 0.0
        self.reordered = tokens * self.visited * token.reordered
        self.scatters, again = plan.zero >= 2 and plan.axes.fsdp > 1, plan.remat in ("dots", "full")
        hides = self.scatters or (plan.remat == "selective" and sizes.heads_ways > 1)
        self.forward, self.backward = (
            tokens * token.forward,
            tokens * (token.backward_hiding if hides else token.backward),
        )
        self.again = tokens * token.backward_hiding if self.scatters and again else 0.0
        """By the last layer, which backward computes again beside the head."""
        waiting = 2 if again else 1
        # Scattered gradients of a layer are whole before; of the layer before too, where its
        # scatter goes on under the next one's work.
        self.backward += (
            waiting * F32 * sizes.layer_whole if self.scatters else width * sizes.largest_whole
        )
        self.table, self.table_used = F32 * sizes.table_whole, width * sizes.table_whole
        self.outer_used = (
            width * sizes.outer_whole
            if width < F32 or (plan.zero >= 3 and plan.axes.fsdp > 1)
            else 0
        )
        num_chunks = -(-tokens // plan.loss_chunk_tokens)
        self.logits = F32 * -(-tokens // num_chunks) * sizes.table_whole // model.embed_dim
        # The gradient of a single chunk's logits waits, in 16 bits, until there is room for what it
        # gives.
        self.head_left = (
            min(self.table, self.logits * width // F32) if num_chunks == 1 else self.table
        )

    def layers(self, *, split: bool) -> int:
        """The device's layers in float32, empty slots included."""
        return (
            F32
            * self.visited
            * self.repeats
            * (self.sizes.layer_split if split else self.sizes.layer_whole)
        )

    def outer(self, *, split: bool) -> int:
        """The parameters outside the layers in float32."""
        return F32 * (self.sizes.outer_split if split else self.sizes.outer_whole)

    def parameters(self, *, split: bool) -> int:
        """All of them."""
        return self.layers(split=split) + self.outer(split=split)

    def without_stages(self) -> list[StepPoint]:
        """Memory at each point of a step without pipeline stages."""
        split = self.plan.zero >= 2
        total = self.parameters(split=split) if self.plan.microbatches > 1 else 0
        gradient = self.layers(split=split) + total
        head = self.table + self.logits + self.table_used
        return [
            (gradient, self.kept + max(self.reordered, self.forward), head),
            # with these logits' gradient in 16 bits
            (gradient, self.kept + self.again, head + self.logits / 2),
            (gradient, self.kept + self.backward, self.head_left),
            # two tables' gradients, one of them in two orders
            (max(gradient - total, total), 4 * self.stream, 3 * self.table),
        ]

    def through_stages(self) -> list[StepPoint]:
        """Memory in ticks of a step with pipeline stages; activation buffers exist in all ticks."""
        pipeline, slots_per_buffer = self.plan.pipeline, buffer_slots(self.plan)
        assert pipeline is not None
        split = self.plan.zero >= 2
        # with spare ones, and what goes to and comes from neighbours
        slots = (slots_per_buffer.inputs + 1 + slots_per_buffer.cotangents + 1 + 2) * self.stream
        if pipeline.keep_residuals:
            slots += (slots_per_buffer.residuals + 1) * self.kept
        gradient, visit_gradient = (
            self.layers(split=split) + self.outer(split=False),
            self.layers(split=split) / self.repeats,
        )
        visit = self.kept
        if self.repeats > 1:
            visit += self.layers(split=self.plan.zero >= 3) / self.repeats  # taken out of the stack
        step_points, zeros = [], 0
        if slots_per_buffer.ends_in_single_tick:
            # XLA makes no loop of one tick, and the zeros that its scans begin with are then there
            # all the time.
            zeros = self.table
            visit += 0 if pipeline.keep_residuals else self.kept
            # Nor is its gradient added in place: the largest matrix's sum has a new place.
            largest = (
                F32
                * self.visited
                * (self.sizes.largest_split if split else self.sizes.largest_whole)
            )
            step_points = [(gradient + visit_gradient + largest, 4 * self.stream, zeros)]
        return [
            *step_points,
            (
                gradient + visit_gradient,
                slots + visit + self.backward,
                self.outer_used + zeros + self.head_left,
            ),
            (gradient, slots + 4 * self.stream, self.outer_used + self.table + self.logits),
        ]

    def update(self) -> list[StepPoint]:
        """New parameters, gathered while shares of the rest are still there, tables one at a time;
        and moments that are fetched.
        """
        step_points: list[StepPoint] = []
        fetched = self._fetched() if self.plan.offloads_moments else 0
        if fetched:
            step_points.append((self.parameters(split=self.plan.zero >= 1) + fetched, 0, 0))
        if self.plan.zero in (1, 2) and self.plan.axes.fsdp > 1:
            layers = self.layers(split=False) + UPDATE_COPIES * self.layers(split=True)
            step_points.append(
                (layers + self.table * (1 + 1 / self.plan.axes.fsdp) + fetched, 0, 0)
            )
        return step_points

    def _fetched(self) -> int:
        """Moments that come from the host leaf by leaf: those of the largest, a stack of matrices
        or a table.
        """
        split = self.plan.zero >= 1
        matrices = (
            self.visited
            * self.repeats
            * (self.sizes.largest_split if split else self.sizes.largest_whole)
        )
        table = (
            min(self.sizes.table_whole, self.sizes.outer_split) if split else self.sizes.table_whole
        )
        return LEAVES_FETCHED * 2 * self.plan.moment_bytes * max(matrices, table)


@dataclass(frozen=True)
class _Token:
    """Bytes of one token in one layer."""

    kept: float
    """By forward, for backward."""
    kept_once: float
    """The same for all layers together."""
    stream: int
    """The residual stream."""
    reordered: int
    """Attention's results in the order that backward wants, made for all layers before it
    begins."""
    forward: float
    """Worked on in forward."""
    backward: float
    """Worked on in backward."""
    backward_hiding: float
    """The same, with collectives to hide."""


@lru_cache(maxsize=1 << 14)
def _token(
    model: ModelConfig,
    remat: RematPolicy,
    kernel: AttentionKernel,
    width: int,
    seq_len: int,
    heads_ways: int,
    mlp_ways: int,
) -> _Token:
    split = {"kernel": kernel, "seq_len": seq_len, "itemsize": width}
    heads, kv_heads = model.num_heads // heads_ways, max(1, model.num_kv_heads // heads_ways)
    query, key_value = (count * model.head_dim * width for count in (heads, 2 * kv_heads))
    stream = model.embed_dim * width
    hidden = mlp_matrices(model) * model.mlp_dim // mlp_ways * width
    fused = kernel == "cudnn"
    seen = 0 if fused else computed_pairs(seq_len, kernel) / seq_len
    scores = F32 * heads * seen
    # Each block of queries is given its own copy of the keys and values that it looks at.
    copies = key_value * seen / block_size(seq_len) if remat != "none" else 0
    common = WORKING_STREAMS * stream + hidden + copies
    made_again = (
        saved_bytes(model, "none", heads_ways=heads_ways, mlp_ways=mlp_ways, **split).attention
        + STREAMS_AGAIN * stream
        if fused and remat == "full"
        else 0
    )
    return _Token(
        kept=saved_bytes(model, remat, heads_ways=heads_ways, mlp_ways=mlp_ways, **split).total,
        kept_once=saved_once_bytes(model, remat, respect_documents=True, **split),
        stream=stream,
        reordered=0 if fused or remat in ("dots", "full") else query,
        forward=FORWARD_SCORES[remat] * scores + common,
        backward=BACKWARD_SCORES[remat] * scores + hidden + common + made_again,
        backward_hiding=HIDING_SCORES[remat] * scores + hidden + common,
    )
