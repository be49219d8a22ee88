"""How large a device's part of a model's parameters is under a plan, and what the end of a step
exchanges of them.

The leaves are those of the abstract model, traced once; a plan only says into how many parts each
dimension is split. All counts are of elements, on one device; a leaf *whole* is whole along fsdp,
*split* is fsdp's share of it (mesh/zero.py).
"""

import itertools
import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from optimus_jax.config import ModelConfig
from optimus_jax.config.axes import FSDP, MESH_AXES, PIPE, AxisSizes
from optimus_jax.mesh.axes import BATCH, EMBED, NORM, VOCAB
from optimus_jax.mesh.leaf import Leaf
from optimus_jax.mesh.rules import Rules, active_rules, padded_vocab
from optimus_jax.mesh.zero import LeafLayout
from optimus_jax.models.program_reader import CollectiveKind, collectives_of, traced_on_device
from optimus_jax.models.shapes import model_shapes
from optimus_jax.plan import Plan
from optimus_jax.planning.cost.implementation_profile import ImplementationProfile

Shape = tuple[int, ...]
WAYS = 2
"""Devices along each axis of the mesh on which the end of a step is traced."""


class LeafCount(NamedTuple):
    """Elements of one parameter on a device."""

    leaf: Leaf
    whole: int
    split: int


@dataclass(frozen=True, kw_only=True)
class DeviceParams:
    """Numbers of parameters on one device."""

    layer: tuple[LeafCount, ...]
    """Those of one layer."""
    outer: tuple[LeafCount, ...]
    """Those outside the layers."""
    table_whole: int
    """Elements of the embedding's table, or of the head's."""

    @property
    def layer_whole(self) -> int:
        """Parameters of one layer."""
        return sum(leaf.whole for leaf in self.layer)

    @property
    def layer_split(self) -> int:
        """fsdp's share of them."""
        return sum(leaf.split for leaf in self.layer)

    @property
    def outer_whole(self) -> int:
        """Parameters outside the layers."""
        return sum(leaf.whole for leaf in self.outer)

    @property
    def outer_split(self) -> int:
        """fsdp's share of them."""
        return sum(leaf.split for leaf in self.outer)

    @property
    def largest_whole(self) -> int:
        """Parameters of the largest matrix of one layer."""
        return max(leaf.whole for leaf in self.layer)

    @property
    def largest_split(self) -> int:
        """fsdp's share of them."""
        return max(leaf.split for leaf in self.layer)


@lru_cache(maxsize=1 << 12)
def params_on_device(model: ModelConfig, rules: Rules, axes: AxisSizes) -> DeviceParams:
    """The parameters under these rules on a mesh with these axis sizes."""
    active = active_rules(rules, axes, model)
    rows = padded_vocab(model.vocab_size, rules, axes)

    def count(leaf: Leaf, shape: Shape) -> LeafCount:
        size = math.prod(
            rows if name == VOCAB else dim for dim, name in zip(shape, leaf.dims, strict=True)
        )
        layout = LeafLayout(leaf, active, 3)
        whole, split = (
            size // math.prod(axes[axis] for dims in layout.axes(split=split) for axis in dims)
            for split in (False, True)
        )
        return LeafCount(leaf, whole, split)

    layer, outer = leaves_of(model)
    counts = tuple(itertools.starmap(count, outer))
    return DeviceParams(
        layer=tuple(itertools.starmap(count, layer)),
        outer=counts,
        table_whole=max(count.whole for count in counts if _is_vocabulary(count.leaf)),
    )


@lru_cache(maxsize=64)
def leaves_of(
    model: ModelConfig,
) -> tuple[tuple[tuple[Leaf, Shape], ...], tuple[tuple[Leaf, Shape], ...]]:
    """The parameters of one layer, and those outside the layers; without padding rows."""
    shapes = model_shapes(model, model.vocab_size)
    layer, outer = [], []
    for leaf, array in zip(
        jax.tree.leaves(shapes.leaves), jax.tree.leaves(shapes.params), strict=True
    ):
        if leaf.is_in_layers:
            layer.append((leaf.last(array.ndim - 1), array.shape[1:]))
        else:
            outer.append((leaf, array.shape))
    return tuple(layer), tuple(outer)


def _is_vocabulary(leaf: Leaf) -> bool:
    """Whether it is a table over the vocabulary: the embedding, or the head's matrix."""
    return leaf.is_matrix and VOCAB in leaf.dims


def layers_on_device(model: ModelConfig, plan: Plan) -> int:
    """Layers of the fullest device, with the empty slots of uneven stages."""
    if plan.pipeline is None:
        return model.num_layers
    return max(plan.pipeline.layers_per_stage) * plan.pipeline.repeats


@lru_cache(maxsize=1 << 12)
def _stored(
    model: ModelConfig, rules: Rules, axes: AxisSizes, head_shared: bool
) -> tuple[tuple[LeafCount, ...], tuple[LeafCount, ...]]:
    """The leaves of a layer, and those outside the layers on the device with the most."""
    if head_shared or axes.pipe == 1:
        params = params_on_device(model, rules, axes)
        return params.layer, params.outer
    own = tuple(
        (name, tuple(axis for axis in split if name != VOCAB or axis != PIPE))
        for name, split in rules
    )
    params = params_on_device(model, own, axes)
    # The first stage has the embedding, and the last one the head.
    tables = [count for count in params.outer if _is_vocabulary(count.leaf)]
    others = [count for count in params.outer if count not in tables]
    return params.layer, (*others, tables[0])


def step_exchanges(
    model: ModelConfig, rules: Rules, axes: AxisSizes, zero: int, num_layers: int, head_shared: bool
) -> dict[tuple[CollectiveKind, tuple[str, ...]], float]:
    """Elements of gradients and new parameters that the end of a step exchanges, by kind and mesh
    axes: whole results (all-gather) or arguments (others).

    Args:
      num_layers: layers of the device.
      head_shared: whether all pipeline stages share embedding and head.
    """
    active = active_rules(rules, axes, model)
    layer, outer = _stored(model, rules, axes, head_shared)
    elements: dict[tuple[CollectiveKind, tuple[str, ...]], float] = {}
    for leaves, times in ((layer, num_layers), (outer, 1)):
        for count in leaves:
            layout = LeafLayout(count.leaf, active, zero)
            is_split = layout.fsdp_dim is not None
            for kind, over, of_split in _at_the_end(layout.summed_axes, is_split, zero):
                size = times * (count.split if of_split else count.whole)
                elements[kind, over] = elements.get((kind, over), 0) + size
    return elements


def updated_params(model: ModelConfig, plan: Plan, implementation: ImplementationProfile) -> float:
    """Parameters that the optimizer updates on one device."""
    counts = _counts(model, plan.rules, plan.axes, implementation.head_shared)
    layer, outer = counts[plan.zero >= 1]
    return layers_on_device(model, plan) * layer + outer


def outer_matrices(model: ModelConfig, rules: Rules, axes: AxisSizes, head_shared: bool) -> float:
    """Elements, whole along fsdp, of those parameters outside the layers that fsdp splits."""
    (_, whole), (_, split) = _counts(model, rules, axes, head_shared)
    return (whole - split) * axes.fsdp / (axes.fsdp - 1) if axes.fsdp > 1 else 0


@lru_cache(maxsize=1 << 12)
def _counts(
    model: ModelConfig, rules: Rules, axes: AxisSizes, head_shared: bool
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Parameters of a layer, and those outside the layers on the device with the most: whole along
    fsdp, and split.
    """
    layer, outer = _stored(model, rules, axes, head_shared)
    return (
        (sum(leaf.whole for leaf in layer), sum(leaf.whole for leaf in outer)),
        (sum(leaf.split for leaf in layer), sum(leaf.split for leaf in outer)),
    )


@lru_cache(maxsize=1 << 10)
def _at_the_end(
    summed_axes: tuple[str, ...], is_split: bool, zero: int
) -> tuple[tuple[CollectiveKind, tuple[str, ...], bool], ...]:
    """What the end of a step does with a leaf, read from its program: kind, mesh axes, and whether
    the message is fsdp's share of the leaf.

    Args:
      summed_axes: mesh axes whose devices hold different parts of its gradient.
      is_split: whether fsdp splits it.
    """
    leaf = Leaf((EMBED,), "matrix") if is_split else Leaf((NORM,), "scale")
    rules = {BATCH: summed_axes} | ({EMBED: (FSDP,)} if is_split else {})
    layout = LeafLayout(leaf, rules, zero)

    def end(gradient: jax.Array, param: jax.Array) -> tuple[jax.Array, jax.Array]:
        gradient = layout.reduced(layout.used(gradient))
        new = layout.gather_updated(layout.updated_part(param))
        return gradient, new

    def array(*, split: bool) -> Any:
        """A leaf with WAYS elements along each dimension of a device's part, whole along fsdp."""
        ways = [len([axis for axis in axes if axis != FSDP]) for axes in layout.axes(split=split)]
        return jax.ShapeDtypeStruct([WAYS ** (1 + number) for number in ways], jnp.float32)

    traced = traced_on_device(
        end,
        dict.fromkeys(MESH_AXES, WAYS),
        (layout.spec(split=zero >= 2), layout.param_spec),
        *(array(split=zero >= 2), array(split=zero >= 3)),
    )
    whole_bytes = 4 * WAYS ** len(leaf.dims)
    return tuple(
        (kind, axes, num_bytes < whole_bytes)
        for (kind, axes), messages in collectives_of(traced).items()
        for num_bytes, _ in messages
    )
