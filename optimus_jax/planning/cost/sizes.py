"""How large a device's part of a model's parameters is under a plan, in closed form.

What `models.shapes.planned_shapes` finds by tracing, from the sizes alone: a planner asks tens of
thousands of times. A test holds one to the other, leaf by leaf. All counts are of elements, on one
device; a leaf *whole* is whole along fsdp, *split* is fsdp's share of it (mesh/zero.py).
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from optimus_jax.config import ModelConfig
from optimus_jax.config.axes import AxisSizes
from optimus_jax.mesh.axes import (
    EMBED,
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    MLP,
    NORM,
    PAIR,
    POSITIONS,
    VOCAB,
)
from optimus_jax.mesh.rules import Rules, active_rules, padded_vocab
from optimus_jax.mesh.zero import LeafLayout
from optimus_jax.models.families import family_of

Leaf = tuple[tuple[int, ...], tuple[str, ...]]
"""Shape and logical axes of a parameter."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """A device's parameters and the ways that its work is split."""

    layer_whole: int
    """One layer."""
    layer_split: int
    outer_whole: int
    """Everything outside the layers."""
    outer_split: int
    table_whole: int
    """The embedding's table, or the head's."""
    largest_whole: int
    """The largest matrix of one layer."""
    largest_split: int
    heads_ways: int
    """Devices that share attention's heads."""
    mlp_ways: int
    """Devices that share the feed-forward's hidden width."""


@lru_cache(maxsize=1 << 12)
def sizes_of(model: ModelConfig, rules: Rules, axes: AxisSizes) -> Sizes:
    """The sizes under these rules on a mesh of these sizes."""
    active = active_rules(rules, axes, model)

    def elements(leaves: Iterable[Leaf], *, split: bool) -> list[int]:
        layouts = [
            (math.prod(shape), LeafLayout(names, active, 3).axes(split=split))
            for shape, names in leaves
        ]
        return [
            size // math.prod(axes[axis] for dim in dims for axis in dim) for size, dims in layouts
        ]

    def ways(logical: str) -> int:
        return math.prod(axes[axis] for axis in active.get(logical, ()))

    layer, outer = (
        layer_leaves(model),
        outer_leaves(model, padded_vocab(model.vocab_size, rules, axes)),
    )
    return Sizes(
        layer_whole=sum(elements(layer, split=False)),
        layer_split=sum(elements(layer, split=True)),
        outer_whole=sum(elements(outer, split=False)),
        outer_split=sum(elements(outer, split=True)),
        table_whole=elements(outer, split=False)[0],
        largest_whole=max(elements(layer, split=False)),
        largest_split=max(elements(layer, split=True)),
        heads_ways=ways(HEADS),
        mlp_ways=ways(MLP),
    )


def layer_leaves(model: ModelConfig) -> list[Leaf]:
    """One layer's parameters (models/attention.py, models/mlp.py)."""
    family, width = family_of(model.family), model.embed_dim
    heads, kv_heads = (model.num_heads, model.head_dim), (2, model.num_kv_heads, model.head_dim)
    hidden, hidden_names = (
        ((2, model.mlp_dim), (PAIR, MLP))
        if family.activation == "swiglu"
        else ((model.mlp_dim,), (MLP,))
    )
    leaves = [
        ((width, *heads), (EMBED, HEADS, HEAD_DIM)),
        ((width, *kv_heads), (EMBED, PAIR, KV_HEADS, HEAD_DIM)),
        ((width, *heads), (EMBED, HEADS, HEAD_DIM)),
        ((width, *hidden), (EMBED, *hidden_names)),
        ((width, model.mlp_dim), (EMBED, MLP)),
        *_norm(model) * 2,
    ]
    if family.biases:
        leaves += [
            (heads, (HEADS, HEAD_DIM)),
            (kv_heads, (PAIR, KV_HEADS, HEAD_DIM)),
            ((width,), (NORM,)),
            (hidden, hidden_names),
            ((width,), (NORM,)),
        ]
    return leaves


def outer_leaves(model: ModelConfig, vocab_rows: int) -> list[Leaf]:
    """The parameters outside the layers, a table first (models/transformer.py)."""
    table = ((vocab_rows, model.embed_dim), (VOCAB, EMBED))
    positions = (
        [((model.max_length, model.embed_dim), (POSITIONS, EMBED))]
        if family_of(model.family).positions == "learned"
        else []
    )
    return [table, *([] if model.tied else [table]), *positions, *_norm(model)]


def _norm(model: ModelConfig) -> list[Leaf]:
    return [((model.embed_dim,), (NORM,))] * (2 if family_of(model.family).norm == "layer" else 1)
