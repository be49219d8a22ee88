"""How large a device's part of a model's parameters is under a plan, and what a step exchanges of
them once.

The leaves are those of the abstract model, traced once; a plan only says into how many parts each
dimension is split. All counts are of elements, on one device; a leaf *whole* is whole along fsdp,
*split* is fsdp's share of it (mesh/zero.py).
"""

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from optimus_jax.config import ModelConfig
from optimus_jax.config.axes import FSDP, MESH_AXES, PIPE, AxisSizes
from optimus_jax.mesh.axes import BATCH, EMBED, GENERATOR_LAYERS, NORM, VOCAB
from optimus_jax.mesh.leaf import Leaf
from optimus_jax.mesh.rules import Rules, active_rules, padded_vocab
from optimus_jax.mesh.zero import LeafLayout
from optimus_jax.models.program_reader import CollectiveKind, collectives_of, traced_on_device
from optimus_jax.models.shapes import model_shapes
from optimus_jax.plan import Plan
from optimus_jax.planning.cost.implementation_profile import ImplementationProfile

Shape = tuple[int, ...]
WAYS = 2
"""Devices along each axis of the mesh on which what a step has once is traced."""


class LeafAxes(NamedTuple):
    """The mesh axes that concern one parameter."""

    whole: tuple[str, ...]
    """Those that split it, without fsdp."""
    split: tuple[str, ...]
    """Those that split it, with fsdp if that does."""
    summed: tuple[str, ...]
    """Those whose devices hold different parts of its gradient."""


class LeafCount(NamedTuple):
    """Elements of one parameter on a device."""

    leaf: Leaf
    axes: LeafAxes
    whole: int
    split: int
    itemsize: int
    """Bytes of an element of the parameter."""


@dataclass(frozen=True, kw_only=True)
class DeviceParams:
    """Numbers of parameters on one device."""

    layer: tuple[LeafCount, ...]
    """Those of one layer."""
    outer: tuple[LeafCount, ...]
    """Those outside the layers."""
    table_whole: int
    """Elements of the embedding's table, or of the head's."""
    table_itemsize: int
    """Bytes of one of them."""

    @cached_property
    def trained(self) -> "DeviceParams":
        """Those that are trained."""
        if all(leaf.leaf.trained for leaf in (*self.layer, *self.outer)):
            return self
        layer, outer = (
            tuple(leaf for leaf in leaves if leaf.leaf.trained)
            for leaves in (self.layer, self.outer)
        )
        tables = [leaf.whole for leaf in outer if _is_vocabulary(leaf.leaf)]
        return replace(self, layer=layer, outer=outer, table_whole=max(tables, default=0))

    @cached_property
    def layer_whole(self) -> int:
        """Parameters of one layer."""
        return sum(leaf.whole for leaf in self.layer)

    @cached_property
    def layer_split(self) -> int:
        """fsdp's share of them."""
        return sum(leaf.split for leaf in self.layer)

    @cached_property
    def outer_whole(self) -> int:
        """Parameters outside the layers."""
        return sum(leaf.whole for leaf in self.outer)

    @cached_property
    def outer_split(self) -> int:
        """fsdp's share of them."""
        return sum(leaf.split for leaf in self.outer)

    @cached_property
    def largest_whole(self) -> int:
        """Parameters of the largest matrix of one layer."""
        return max([leaf.whole for leaf in self.layer], default=0)

    @cached_property
    def largest_split(self) -> int:
        """fsdp's share of them."""
        return max([leaf.split for leaf in self.layer], default=0)


@lru_cache(maxsize=1 << 12)
def params_on_device(model: ModelConfig, rules: Rules, axes: AxisSizes) -> DeviceParams:
    """The parameters under these rules on a mesh with these axis sizes."""
    active = tuple(active_rules(rules, axes, model).items())
    rows = padded_vocab(model.vocab_size, rules, axes)

    def count(leaf: Leaf, shape: Shape, itemsize: int) -> LeafCount:
        size = math.prod(
            [rows if name == VOCAB else dim for dim, name in zip(shape, leaf.dims, strict=True)]
        )
        own = _leaf_axes(leaf, active)
        whole, split = (
            size // math.prod([axes[axis] for axis in over]) for over in (own.whole, own.split)
        )
        return LeafCount(leaf, own, whole, split, itemsize)

    layer, outer = leaves_of(model)
    counts = tuple(itertools.starmap(count, outer))
    return DeviceParams(
        layer=tuple(itertools.starmap(count, layer)),
        outer=counts,
        table_whole=max(count.whole for count in counts if _is_vocabulary(count.leaf)),
        table_itemsize=max(count.itemsize for count in counts if _is_vocabulary(count.leaf)),
    )


@lru_cache(maxsize=1 << 10)
def _leaf_axes(leaf: Leaf, active: Rules) -> LeafAxes:
    layout = LeafLayout(leaf, dict(active), 3)
    whole, split = (
        tuple(axis for over in layout.axes(split=split) for axis in over) for split in (False, True)
    )
    return LeafAxes(whole, split, layout.summed_axes)


@lru_cache(maxsize=64)
def leaves_of(
    model: ModelConfig,
) -> tuple[tuple[tuple[Leaf, Shape, int], ...], tuple[tuple[Leaf, Shape, int], ...]]:
    """The parameters of one layer, and those outside the layers, with the bytes of an element;
    without padding rows.
    """
    shapes = model_shapes(model, model.vocab_size)
    layer, outer = [], []
    for leaf, array in zip(
        jax.tree.leaves(shapes.leaves), jax.tree.leaves(shapes.params), strict=True
    ):
        if leaf.is_in_layers:
            layer.append((leaf.last(array.ndim - 1), array.shape[1:], array.dtype.itemsize))
        else:
            outer.append((leaf, array.shape, array.dtype.itemsize))
    return tuple(layer), tuple(outer)


def _is_vocabulary(leaf: Leaf) -> bool:
    """Whether it is a table over the vocabulary: the embedding, or the head's matrix."""
    return leaf.is_matrix and VOCAB in leaf.dims


def layers_on_device(model: ModelConfig, plan: Plan) -> int:
    """Layers of the fullest device, with the empty slots of uneven stages."""
    if plan.pipeline is None:
        return model.num_layers
    return plan.pipeline.most_layers * plan.pipeline.repeats


@lru_cache(maxsize=1 << 12)
def _stored(model: ModelConfig, rules: Rules, axes: AxisSizes, head_shared: bool) -> DeviceParams:
    """The parameters on the device with the most."""
    if head_shared or axes.pipe == 1:
        return params_on_device(model, rules, axes)
    own = tuple(
        (name, tuple(axis for axis in split if name != VOCAB or axis != PIPE))
        for name, split in rules
    )
    params = params_on_device(model, own, axes)
    # The first stage has the embedding, and the last one the head.
    tables = [count for count in params.outer if _is_vocabulary(count.leaf)]
    others = [count for count in params.outer if count not in tables]
    return replace(params, outer=(*others, tables[0]))


@lru_cache(maxsize=1 << 12)
def step_exchanges(
    model: ModelConfig, rules: Rules, axes: AxisSizes, zero: int, head_shared: bool
) -> Mapping[tuple[CollectiveKind, tuple[str, ...]], tuple[int, int]]:
    """Elements of gradients, and of parameters that it holds, that a step exchanges once, of one
    layer and of all that is outside the layers, by kind and mesh axes: whole results (all-gather)
    or arguments (others).

    Args:
      head_shared: whether all pipeline stages share embedding and head.
    """
    elements: dict[tuple[CollectiveKind, tuple[str, ...]], list[int]] = {}
    stored = _stored(model, rules, axes, head_shared).trained
    for where, counts in enumerate((stored.layer, stored.outer)):
        for count in counts:
            is_split = count.axes.split != count.axes.whole
            for kind, over, of_split in _once(count.axes.summed, is_split, zero):
                found = elements.setdefault((kind, over), [0, 0])
                found[where] += count.split if of_split else count.whole
    return {key: (layer, outer) for key, (layer, outer) in elements.items()}


def updated_params(model: ModelConfig, plan: Plan, implementation: ImplementationProfile) -> int:
    """Parameters that the optimizer updates on one device."""
    stored, num_layers = (
        _stored(model, plan.rules, plan.axes, implementation.head_shared).trained,
        layers_on_device(model, plan),
    )
    if plan.zero >= 1:
        return num_layers * stored.layer_split + stored.outer_split
    return num_layers * stored.layer_whole + stored.outer_whole


def outer_matrices(
    model: ModelConfig, rules: Rules, axes: AxisSizes, head_shared: bool
) -> tuple[LeafCount, ...]:
    """The parameters outside all layers that fsdp splits."""
    stored = _stored(model, rules, axes, head_shared)
    return tuple(
        leaf
        for leaf in stored.outer
        if leaf.axes.split != leaf.axes.whole and leaf.leaf.dims[0] != GENERATOR_LAYERS
    )


@lru_cache(maxsize=1 << 10)
def _once(
    summed_axes: tuple[str, ...], is_split: bool, zero: int
) -> tuple[tuple[CollectiveKind, tuple[str, ...], bool], ...]:
    """What a step does with a leaf once, read from its program: kind, mesh axes, and whether the
    message is fsdp's share of the leaf.

    Args:
      summed_axes: mesh axes whose devices hold different parts of its gradient.
      is_split: whether fsdp splits it.
    """
    leaf = Leaf((EMBED,), "matrix", "mlp") if is_split else Leaf((NORM,), "scale", "norm")
    rules = {BATCH: summed_axes} | ({EMBED: (FSDP,)} if is_split else {})
    layout = LeafLayout(leaf, rules, zero)

    def once(gradient: jax.Array, param: jax.Array) -> tuple[jax.Array, jax.Array]:
        gradient = layout.reduced(layout.used(gradient))
        return gradient, layout.held(param, jnp.float32)

    def array(*, split: bool) -> Any:
        """A leaf with WAYS elements along each dimension of a device's part, whole along fsdp."""
        ways = [len([axis for axis in axes if axis != FSDP]) for axes in layout.axes(split=split)]
        return jax.ShapeDtypeStruct([WAYS ** (1 + number) for number in ways], jnp.float32)

    traced = traced_on_device(
        once,
        dict.fromkeys(MESH_AXES, WAYS),
        (layout.spec(split=zero >= 2), layout.param_spec),
        *(array(split=zero >= 2), array(split=zero >= 1)),
    )
    whole_bytes = 4 * WAYS ** len(leaf.dims)
    return tuple(
        (kind, axes, num_bytes < whole_bytes)
        for (kind, axes), messages in collectives_of(traced).items()
        for num_bytes, _ in messages
    )
