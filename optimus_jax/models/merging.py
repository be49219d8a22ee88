"""Merges adapters into the matrices beside which they stand."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from optimus_jax.config import ModelConfig
from optimus_jax.config.tuning import Projection
from optimus_jax.mesh.axes import LAYERS
from optimus_jax.mesh.boxes import Box
from optimus_jax.mesh.leaf import leaf_path
from optimus_jax.models.adapters import ROW_PARALLEL
from optimus_jax.models.base_formats import stored_alike
from optimus_jax.models.families import features_of
from optimus_jax.models.shapes import ModelShapes, Params


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


def is_of_adapter(path: str) -> bool:
    """Whether a path of a leaf, such as `layers/attention/query_adapter/a`, is that of one of an
    adapter's.
    """
    return any(adapter_name(projection) in path.split("/") for projection in PLACES)


def without_adapters(params: Params) -> Params:
    """The parameters, or whatever else is named like them, without those of adapters."""
    own = {adapter_name(projection) for projection in PLACES}
    return {
        name: without_adapters(part) if isinstance(part, dict) else part
        for name, part in params.items()
        if name not in own
    }


def merged(params: Params, shapes: ModelShapes) -> Params:
    """The float32 parameters of `shapes.base` that compute the same as these of `shapes`.

    Sums are float32, whatever the format of the frozen matrices. Results differ by rounding from
    those with adapters.
    """
    merging = Merging(
        shapes.config,
        {
            name: leaf.astype(jnp.float32)
            for path, leaf in jax.tree.leaves_with_path(params)
            if is_of_adapter(name := leaf_path(path))
        },
    )

    def whole(path: Any, leaf: Array) -> Array:
        name = leaf_path(path)
        return merging.part(name, tuple(map(slice, leaf.shape)), leaf)

    return jax.tree.map_with_path(whole, stored_alike(without_adapters(params), shapes.base))


AnyArray = TypeVar("AnyArray", np.ndarray, Array)


@dataclass(frozen=True, eq=False)
class Merging:
    """Merges a model's adapters into parts of its leaves: arrays of JAX or of numpy."""

    model: ModelConfig
    adapters: Mapping[str, Any]
    """Leaves of adapters by path, such as `layers/attention/query_adapter/a`: all layers, float32.
    There may be other leaves among them."""

    def changes(self, path: str) -> bool:
        """Whether adapters concern a leaf of the model without them."""
        return path.removesuffix("_bias") in self._places

    def part(self, path: str, box: Box, values: AnyArray) -> AnyArray:
        """A part of a leaf of the model without adapters that computes the same.

        Args:
          path: the leaf's, such as `layers/attention/query`.
          box: the part, whose slices have a start and step 1.
          values: the part of the leaf beside the adapters, float32; an array of numpy is changed.
        """
        is_bias, dim = path.endswith("_bias"), 1 if path.endswith("_bias") else 2
        for projection, place in self._places.get(path.removesuffix("_bias"), ()):
            if place.part is None:
                values = self._one(projection, box, is_bias, values)
                continue
            own = (*box[:dim], *box[dim + 1 :])
            xp, numbers = values.__array_namespace__(), range(*box[dim].indices(2))
            before = (slice(None),) * dim
            parts = [
                self._one(projection, own, is_bias, part) if number == place.part else part
                for index, number in enumerate(numbers)
                for part in [values[(*before, index)]]
            ]
            if xp is not np:  # whose parts are views, changed in place
                values = xp.stack(parts, dim)
        return values

    def _one(self, projection: Projection, box: Box, is_bias: bool, values: AnyArray) -> AnyArray:
        """A part of one projection's matrix [S, D, ...], or of its bias [S, ...]."""
        prefix = f"{LAYERS}/{PLACES[projection].block}/{adapter_name(projection)}/"
        layers, *rest = box
        if self.model.tuning.method == "ia3":
            if is_bias and projection in ROW_PARALLEL:
                return values
            factor = self.adapters[f"{prefix}scale"][(layers, *(rest if is_bias else rest[1:]))]
            values *= factor if is_bias else factor[:, None]
            return values
        if is_bias:
            return values
        narrow, wide = self.adapters[f"{prefix}a"], self.adapters[f"{prefix}b"]
        if projection in ROW_PARALLEL:
            narrow, wide = wide, narrow
        xp = values.__array_namespace__()
        exact = {} if xp is np else {"precision": lax.Precision.HIGHEST}
        factors = narrow[layers, rest[0]], wide[(layers, slice(None), *rest[1:])]
        product = xp.einsum("sdr,sr...->sd...", *factors, **exact)
        product *= np.float32(self.model.tuning.scale)
        values += product  # in place: a matrix of one layer may take hundreds of MB
        return values

    @cached_property
    def _places(self) -> dict[str, list[tuple[Projection, Place]]]:
        """The adapters that concern each leaf, by its path."""
        found: dict[str, list[tuple[Projection, Place]]] = {}
        for projection, place in places_of(self.model).items():
            path = f"{LAYERS}/{place.block}/{place.leaf}"
            found.setdefault(path, []).append((projection, place))
        return found
