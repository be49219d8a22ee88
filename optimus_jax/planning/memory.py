"""Bytes that a plan needs on each device, estimated before anything is compiled.

States are exact (their shapes are known); activations and logits are closed forms per remat policy
for this project's own decoder, and labelled an estimate. The compiled program's own figure is
checked against the device afterwards.

Without stages a device holds what all of its layers keep of one microbatch. With stages it holds
rings (pipeline/buffers.py) through all ticks, and in each tick what one stage needs or what the head
needs, whichever is more, because they run one after the other.
"""

import math
from dataclasses import dataclass

import jax

from optimus_jax.config import ModelConfig
from optimus_jax.mesh.axes import HEADS, LAYERS, MLP, VOCAB
from optimus_jax.mesh.sharding import layouts_of
from optimus_jax.mesh.zero import LeafLayout
from optimus_jax.models.families import family_of
from optimus_jax.models.shapes import Params, planned_shapes
from optimus_jax.pipeline.buffers import Buffers
from optimus_jax.plan import Pipelining, Plan

F32 = 4
CAUSAL_SHARE = 0.6
"""Of the square of attention weights that causal blocks keep (models/kernels.py)."""
WORKING_LAYERS = 2
"""Backward works on about this many layers' worth of activations and their gradients at once."""
WORKING_LAYERS_RECOMPUTED = 3
"""The same where it first computes a layer again."""


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """Bytes on the most loaded device."""

    params: int
    moments: int
    gradients: int
    """Sums over microbatches, and what one microbatch adds to them."""
    activations: int
    logits: int
    """What the head needs, its own matrix and gradient included; with stages, what it needs beyond a stage's backward."""

    @property
    def states(self) -> int:
        """What stays from step to step."""
        return self.params + self.moments

    @property
    def total(self) -> int:
        """All of it."""
        return self.states + self.gradients + self.activations + self.logits


def estimate_memory(model: ModelConfig, plan: Plan, *, seq_len: int, global_batch: int) -> MemoryEstimate:
    """What a training step of `plan` needs on each device."""
    sizes = _Sizes(model, plan, seq_len=seq_len, global_batch=global_batch)
    in_a_step = _one_after_the_other(sizes) if plan.pipeline is None else _through_stages(sizes, plan.pipeline)
    return MemoryEstimate(
        params=sizes.layers(split=plan.zero >= 3) + sizes.outer(split=plan.zero >= 3),
        moments=2 * (sizes.layers(split=plan.zero >= 1) + sizes.outer(split=plan.zero >= 1)), **in_a_step)


class _Sizes:
    """Bytes of a device's arrays."""

    def __init__(self, model: ModelConfig, plan: Plan, *, seq_len: int, global_batch: int):
        self.model, self.plan = model, plan
        self._shapes = planned_shapes(model, plan)
        self._layouts = layouts_of(self._shapes.names, plan, model)
        self._rules = plan.active_rules(model)
        self.width = F32 if plan.precision == "f32" else 2
        self.tokens = global_batch * seq_len // plan.batch_ways() // plan.microbatches
        self.hidden = self.tokens * model.embed_dim * self.width
        """The residual stream of a microbatch."""
        kept, worked_on = _bytes_per_token(model, plan, seq_len=seq_len, width=self.width, heads_ways=self._ways(HEADS), mlp_ways=self._ways(MLP))
        self.kept = self.tokens * kept
        """What backward keeps of a layer."""
        working_layers = WORKING_LAYERS_RECOMPUTED if plan.remat in ("dots", "full") else WORKING_LAYERS
        self.working = working_layers * self.tokens * worked_on + self.gathers * self._layer_matrices
        """What it needs besides while it is at a layer."""
        self.table = self._shapes.vocab_rows // self._ways(VOCAB) * model.embed_dim
        """Elements of the head's matrix, whole along fsdp."""

    def layers(self, *, split: bool) -> int:
        """The stack in float32, empty slots included; `split` says whether fsdp splits it."""
        return self._float32(self._shapes.params[LAYERS], self._layouts[LAYERS], split)

    def outer(self, *, split: bool) -> int:
        """The same for all parameters outside the stack."""
        return self._float32(self._shapes.params, self._layouts, split) - self.layers(split=split)

    def outer_in_use(self) -> int:
        """Matrices outside the stack as they are used, where that is a copy."""
        return self.outer(split=False) // F32 * self.width if self.gathers or self.width < F32 else 0

    def head(self) -> int:
        """A chunk's logits, their exponentials and gradient; the gradient of the head's matrix, summed and transposed."""
        chunk = min(self.plan.loss_chunk_tokens, self.tokens)
        return 3 * chunk * self._shapes.vocab_rows // self._ways(VOCAB) * F32 + 2 * self.table * F32

    def _float32(self, shapes: Params, layouts: Params, split: bool) -> int:
        def leaf_bytes(shape: jax.ShapeDtypeStruct, layout: LeafLayout) -> int:
            ways = math.prod(self.plan.axes[axis] for axes in layout.axes(split=split) for axis in axes)
            return shape.size * F32 // ways

        return sum(jax.tree.leaves(jax.tree.map(leaf_bytes, shapes, layouts)))

    def _ways(self, logical: str) -> int:
        return math.prod(self.plan.axes[axis] for axis in self._rules.get(logical, ()))

    @property
    def gathers(self) -> bool:
        """Whether matrices are made whole for every use."""
        return self.plan.zero >= 3 and self.plan.axes.fsdp > 1

    @property
    def _layer_matrices(self) -> int:
        """One layer's matrices, whole along fsdp."""
        model = self.model
        matrices = 3 if family_of(model.family).activation == "swiglu" else 2
        attention = model.embed_dim * model.head_dim * 2 * (model.num_heads + model.num_kv_heads)
        return (attention + matrices * model.embed_dim * model.mlp_dim) * self.width // self._ways(HEADS)


def _one_after_the_other(sizes: _Sizes) -> dict[str, int]:
    """Gradients, activations and logits of a step without stages."""
    plan = sizes.plan
    gradient = sizes.layers(split=plan.zero >= 2) + sizes.outer(split=plan.zero >= 2)
    return {"gradients": gradient * (2 if plan.microbatches > 1 else 1),
            "activations": sizes.model.num_layers * sizes.kept + sizes.working + 4 * sizes.hidden,
            "logits": sizes.head() + (sizes.table * sizes.width if sizes.gathers else 0)}


def _through_stages(sizes: _Sizes, pipeline: Pipelining) -> dict[str, int]:
    """The same with stages. A *visit* is a device's work on one microbatch: all of its layers, or one repeat's."""
    plan, schedule = sizes.plan, sizes.plan.schedule()
    buffers = Buffers.of(schedule, keep_residuals=pipeline.keep_residuals)
    residuals = max(pipeline.layers_per_stage) * sizes.kept
    # Each ring with its spare slot, and what goes to and comes from the neighbours.
    rings = (buffers.num_inputs + 1 + buffers.num_cotangents + 1 + 2) * sizes.hidden
    if pipeline.keep_residuals:
        rings += (buffers.num_residuals + 1) * residuals
    gradient = sizes.layers(split=plan.zero >= 2)
    visit_gradient = gradient // pipeline.repeats
    visit = residuals + sizes.working
    if pipeline.repeats > 1:
        visit += sizes.layers(split=plan.zero >= 3) // pipeline.repeats  # taken out of the stack
    if max(pipeline.layers_per_stage) > 1 and any(p.num_ticks == 1 and p.backward and not p.forward for p in schedule.phases()):
        # To XLA one tick is no loop, and the zeros that its scans over layers begin with are there through all other ticks.
        visit += visit_gradient + (0 if pipeline.keep_residuals else residuals)
    return {"gradients": gradient + sizes.outer(split=False) + visit_gradient,
            "activations": rings + visit,
            "logits": sizes.outer_in_use() + max(0, sizes.head() - visit - visit_gradient)}


def _bytes_per_token(model: ModelConfig, plan: Plan, *, seq_len: int, width: int, heads_ways: int, mlp_ways: int) -> tuple[int, int]:
    """For each token of one layer: what backward keeps, and what it works on, the arguments of its parts (models/transformer.py, Block)."""
    heads, kv_heads = model.num_heads // heads_ways, max(1, model.num_kv_heads // heads_ways)
    stream = model.embed_dim * width
    query, key_value = heads * model.head_dim * width, 2 * kv_heads * model.head_dim * width
    hidden = model.mlp_dim // mlp_ways * width * (2 if family_of(model.family).activation == "swiglu" else 1)
    keeps_scores = plan.attention == "xla" and plan.remat == "none"
    scores = int(heads * seq_len * width * CAUSAL_SHARE) if keeps_scores else 0
    # Attention's result is there twice, as its kernel and, transposed, as the next matmul has it.
    parts = 2 * stream + 3 * query + key_value + scores + hidden
    match plan.remat:
        case "full":
            return stream, parts
        case "dots":
            return 2 * stream + query + key_value + hidden, parts
    return parts, parts
