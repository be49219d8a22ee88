"""Compute the size of a device's part of a model's parameters under a plan, in closed form.

`models.shapes.planned_shapes` finds the same by tracing, but a planner asks tens of thousands of
times. A test compares the two leaf by leaf. All counts are elements on one device. A *whole* count
is not divided along fsdp; a *split* count is (mesh/zero.py).
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
"""Shape and logical axes of one parameter."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Numbers of parameters on one device, and the number of devices that share its work."""

    layer_whole: int
    """Parameters of one layer."""
    layer_split: int
    outer_whole: int
    """Parameters outside the layers."""
    outer_split: int
    table_whole: int
    """Parameters of the embedding's table, or of the head's."""
    largest_whole: int
    """Parameters of the largest matrix of one layer."""
    largest_split: int
    heads_ways: int
    """Number of devices among which attention heads are split."""
    mlp_ways: int
    """Number of devices among which the feed-forward's hidden width is split."""


@lru_cache(maxsize=1 << 12)
def sizes_of(model: ModelConfig, rules: Rules, axes: AxisSizes) -> Sizes:
    """The sizes under these rules on a mesh with these axis sizes."""
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
    """The parameters of one layer (models/attention.py, models/mlp.py)."""
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
    """The parameters outside the layers, the embedding table first (models/transformer.py)."""
    table = ((vocab_rows, model.embed_dim), (VOCAB, EMBED))
    positions = (
        [((model.max_length, model.embed_dim), (POSITIONS, EMBED))]
        if family_of(model.family).positions == "learned"
        else []
    )
    return [table, *([] if model.tied else [table]), *positions, *_norm(model)]


def _norm(model: ModelConfig) -> list[Leaf]:
    return [((model.embed_dim,), (NORM,))] * (2 if family_of(model.family).norm == "layer" else 1)
