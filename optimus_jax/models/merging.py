"""Merges adapters into the matrices beside which they stand."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from optimus_jax.config import ModelConfig
from optimus_jax.config.tuning import Projection
from optimus_jax.mesh.axes import LAYERS
from optimus_jax.models.adapters import ROW_PARALLEL
from optimus_jax.models.families import features_of
from optimus_jax.models.shapes import Params


class Place(NamedTuple):
    """Where the matrix of a projection is among the parameters of a layer."""

    block: str
    leaf: str
    part: int | None = None
    """Its place along dimension 1 of the leaf, if that holds two matrices."""


PLACES: dict[Projection, Place] = {
    "query": Place("attention", "query"),
    "key": Place("attention", "key_value", 0),
    "value": Place("attention", "key_value", 1),
    "out": Place("attention", "out"),
    "gate": Place("mlp", "up", 0),
    "up": Place("mlp", "up", 1),
    "down": Place("mlp", "down"),
}


def all_places(model: ModelConfig) -> dict[Projection, Place]:
    """The projections of a model's layers."""
    places = dict(PLACES)
    if not features_of(model).gated:
        del places["gate"]
        places["up"] = Place("mlp", "up")
    return places


def places_of(model: ModelConfig) -> dict[Projection, Place]:
    """The projections of a model's layers that have adapters."""
    return {name: place for name, place in all_places(model).items() if model.tuning.adapts(name)}


def same_adapters(one: ModelConfig, other: ModelConfig) -> bool:
    """Whether two models, which differ in `tuning` alone, have adapters that compute the same."""
    ours, theirs = one.tuning, other.tuning
    if ours.method != theirs.method or places_of(one).keys() != places_of(other).keys():
        return False
    return ours.method != "lora" or (
        ours.rank == theirs.rank and math.isclose(ours.scale, theirs.scale)
    )


def adapter_name(projection: Projection) -> str:
    """The name of an adapter among the parameters of its block."""
    return f"{projection}_adapter"


def merged(params: Params, model: ModelConfig) -> Params:
    """The float32 parameters of `model.base` that compute the same as these of `model`.

    Sums are float32, whatever the format of the frozen matrices. Results differ by rounding from
    those with adapters.
    """
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params)
    blocks = dict(params[LAYERS])
    for projection, (block, leaf, part) in places_of(model).items():
        leaves = dict(blocks[block])
        adapter = leaves.pop(adapter_name(projection))
        if model.tuning.method == "lora":
            product = low_rank_product(projection, adapter) * model.tuning.scale
            whole = leaves[leaf]
            leaves[leaf] = whole + product if part is None else whole.at[:, :, part].add(product)
        else:
            scale, bias = adapter["scale"], leaves.get(f"{leaf}_bias")
            leaves[leaf] = _scaled(leaves[leaf], scale[:, None], part, 2)
            if bias is not None and projection not in ROW_PARALLEL:
                leaves[f"{leaf}_bias"] = _scaled(bias, scale, part, 1)
        blocks[block] = leaves
    return {**params, LAYERS: blocks}


def low_rank_product(projection: Projection, adapter: Params) -> Array:
    """B A of all layers, [S, D, ...] as the projection's matrix has them."""
    narrow, wide = adapter["a"], adapter["b"]
    if projection in ROW_PARALLEL:
        narrow, wide = wide, narrow
    return jnp.einsum("sdr,sr...->sd...", narrow, wide, precision=lax.Precision.HIGHEST)


def _scaled(leaf: Array, scale: Array, part: int | None, dim: int) -> Array:
    """A leaf, or its part along `dim`, times a factor."""
    if part is None:
        return leaf * scale
    index = (slice(None),) * dim + (part,)
    return leaf.at[index].multiply(scale)
