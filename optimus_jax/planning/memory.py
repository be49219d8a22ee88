"""Bytes that a plan needs on each device, estimated before anything is compiled.

States are exact (their shapes are known); activations and logits are closed forms per remat policy
for this project's own decoder, and labelled an estimate. The compiled program's own figure is
checked against the device afterwards.
"""

import math
from dataclasses import dataclass

import jax

from optimus_jax.config import ModelConfig
from optimus_jax.mesh.axes import HEADS, MLP, VOCAB
from optimus_jax.mesh.sharding import layouts_of
from optimus_jax.mesh.zero import LeafLayout
from optimus_jax.models.families import family_of
from optimus_jax.models.shapes import planned_shapes
from optimus_jax.plan import Plan

F32 = 4
CAUSAL_SHARE = 0.6
"""Of the square of attention weights that causal blocks keep (models/kernels.py)."""
WORKING_LAYERS = 3
"""Backward works on about this many layers' worth of activations and their gradients at once."""


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """Bytes on the most loaded device."""

    params: int
    moments: int
    gradients: int
    activations: int
    logits: int

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
    shapes = planned_shapes(model, plan)
    rules = plan.active_rules(model)
    layouts = layouts_of(shapes.names, plan, model)

    def split_bytes(*, over_fsdp: bool) -> int:
        def leaf_bytes(shape: jax.ShapeDtypeStruct, layout: LeafLayout) -> int:
            ways = math.prod(plan.axes[axis] for axes in layout.axes(split=over_fsdp) for axis in axes)
            return shape.size * F32 // ways

        return sum(jax.tree.leaves(jax.tree.map(leaf_bytes, shapes.params, layouts)))

    def ways(logical: str) -> int:
        return math.prod(plan.axes[axis] for axis in rules.get(logical, ()))

    width = F32 if plan.precision == "f32" else 2
    tokens = global_batch * seq_len // plan.batch_ways() // plan.microbatches
    layer = _activation_bytes_per_token(model, plan, seq_len=seq_len, width=width, heads_ways=ways(HEADS), mlp_ways=ways(MLP))
    residual = model.embed_dim * width
    kept = layer if plan.remat != "full" else residual
    gathered = plan.zero >= 3 and plan.axes.fsdp > 1
    matrix = shapes.vocab_rows // ways(VOCAB) * model.embed_dim
    return MemoryEstimate(
        params=split_bytes(over_fsdp=plan.zero >= 3),
        moments=2 * split_bytes(over_fsdp=plan.zero >= 1),
        gradients=split_bytes(over_fsdp=plan.zero >= 2) * (2 if plan.microbatches > 1 else 1),
        activations=tokens * (model.num_layers * kept + WORKING_LAYERS * layer + 4 * residual)
        + gathered * _layer_matrix_bytes(model, ways(HEADS), width),
        # A chunk's logits, their exponentials and gradient; the head's gradient, summed and transposed; the gathered head.
        logits=3 * min(plan.loss_chunk_tokens, tokens) * shapes.vocab_rows // ways(VOCAB) * F32
        + matrix * (2 * F32 + gathered * width))


def _activation_bytes_per_token(model: ModelConfig, plan: Plan, *, seq_len: int, width: int, heads_ways: int, mlp_ways: int) -> int:
    """What backward keeps of one layer for each token: the arguments of its parts (models/transformer.py, Block)."""
    heads, kv_heads = model.num_heads // heads_ways, max(1, model.num_kv_heads // heads_ways)
    projected = (3 * heads + 2 * kv_heads) * model.head_dim * width
    keeps_scores = plan.attention == "xla" and plan.remat in ("none", "dots")
    scores = heads * seq_len * width * CAUSAL_SHARE if keeps_scores else 0
    hidden = model.mlp_dim // mlp_ways * width * (2 if family_of(model.family).activation == "swiglu" else 1)
    return int(2 * model.embed_dim * width + projected + scores + hidden)


def _layer_matrix_bytes(model: ModelConfig, tensor_ways: int, width: int) -> int:
    """One layer's matrices, whole along fsdp."""
    matrices = 3 if family_of(model.family).activation == "swiglu" else 2
    attention = model.embed_dim * model.head_dim * 2 * (model.num_heads + model.num_kv_heads)
    return (attention + matrices * model.embed_dim * model.mlp_dim) * width // tensor_ways
