"""How large a device's part of a model's parameters is under a plan.

The leaves are those of the abstract model, traced once; a plan only says into how many parts each
dimension is split. All counts are of elements, on one device; a leaf *whole* is whole along fsdp,
*split* is fsdp's share of it (mesh/zero.py).
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

import jax

from optimus_jax.config import ModelConfig
from optimus_jax.config.axes import AxisSizes
from optimus_jax.mesh.axes import HEADS, LAYERS, MLP, VOCAB
from optimus_jax.mesh.rules import Rules, active_rules, padded_vocab
from optimus_jax.mesh.zero import LeafLayout
from optimus_jax.models.shapes import VOCABULARY_LEAVES, model_shapes

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

    rows = padded_vocab(model.vocab_size, rules, axes)
    in_layer, outside = leaves_of(model)
    padded = {
        name: (
            tuple(rows if dim == VOCAB else size for size, dim in zip(shape, dims, strict=True)),
            dims,
        )
        for name, (shape, dims) in outside.items()
    }
    layer, outer, table = in_layer.values(), padded.values(), [padded[VOCABULARY_LEAVES[0]]]
    return Sizes(
        layer_whole=sum(elements(layer, split=False)),
        layer_split=sum(elements(layer, split=True)),
        outer_whole=sum(elements(outer, split=False)),
        outer_split=sum(elements(outer, split=True)),
        table_whole=elements(table, split=False)[0],
        largest_whole=max(elements(layer, split=False)),
        largest_split=max(elements(layer, split=True)),
        heads_ways=ways(HEADS),
        mlp_ways=ways(MLP),
    )


@lru_cache(maxsize=64)
def leaves_of(model: ModelConfig) -> tuple[dict[str, Leaf], dict[str, Leaf]]:
    """The parameters of one layer, and those outside the layers, by path; without padding rows."""
    shapes = model_shapes(model, model.vocab_size)
    names = jax.tree.leaves(shapes.names, is_leaf=lambda node: isinstance(node, tuple))
    paths = jax.tree.leaves_with_path(shapes.params)
    layer, outer = {}, {}
    for (path, leaf), axes in zip(paths, names, strict=True):
        name = "/".join(str(key.key) for key in path)
        if axes[0] == LAYERS:
            layer[name] = (leaf.shape[1:], axes[1:])
        else:
            outer[name] = (leaf.shape, axes)
    return layer, outer
