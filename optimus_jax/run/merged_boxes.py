"""Merges a checkpoint's adapters into slices of the matrices beside which they stand, on the host.

It is the arithmetic of models/merging.py for a part of a leaf. Adapters are small and held whole.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from optimus_jax.config import ModelConfig
from optimus_jax.config.tuning import Projection
from optimus_jax.mesh.axes import LAYERS
from optimus_jax.mesh.boxes import Box
from optimus_jax.models.adapters import ROW_PARALLEL
from optimus_jax.models.merging import Place, adapter_name, places_of


@dataclass(frozen=True, eq=False)
class AdaptersOnHost:
    """The adapters of a model."""

    model: ModelConfig
    leaves: Mapping[str, np.ndarray]
    """By path, such as `layers/attention/query_adapter/a`: all layers, float32."""

    def merged(self, path: str, box: Box, values: np.ndarray) -> np.ndarray:
        """A part of a leaf of the model without adapters that computes the same, in float32; or
        `values` as they are, if no adapter concerns the leaf.

        Args:
          path: the leaf's, such as `layers/attention/query`.
          box: the part.
          values: the part, as it is stored.
        """
        for projection, place in self._places.get(path.removesuffix("_bias"), ()):
            is_bias = path.endswith("_bias")
            if is_bias and (self.model.tuning.method == "lora" or projection in ROW_PARALLEL):
                continue
            values = values.astype(np.float32)
            dim = 1 if is_bias else 2
            own, index = list(box), [slice(None)] * values.ndim
            if place.part is not None:
                here = own.pop(dim)
                if not here.start <= place.part < here.stop:
                    continue
                index[dim] = place.part - here.start
            self._add(projection, place, tuple(own), is_bias, values[tuple(index)])
        return values

    def _add(
        self, projection: Projection, place: Place, box: Box, is_bias: bool, part: np.ndarray
    ) -> None:
        """Merge one adapter into a part of its matrix or bias, in place.

        Args:
          box: the part, of the projection's own dimensions.
        """
        prefix = f"{LAYERS}/{place.block}/{adapter_name(projection)}/"
        if self.model.tuning.method == "ia3":
            scale = self.leaves[f"{prefix}scale"]
            layers, *rest = box if is_bias else (box[0], *box[2:])
            factor = scale[(layers, *rest)]
            part *= factor if is_bias else factor[:, None]
            return
        narrow, wide = self.leaves[f"{prefix}a"], self.leaves[f"{prefix}b"]
        if projection in ROW_PARALLEL:
            narrow, wide = wide, narrow
        layers, rows, *columns = box
        narrow, wide = narrow[layers, rows], wide[(layers, slice(None), *columns)]
        product = np.einsum("sdr,sr...->sd...", narrow, wide, optimize=True)
        part += product * np.float32(self.model.tuning.scale)

    @cached_property
    def _places(self) -> dict[str, list[tuple[Projection, Place]]]:
        """The adapters that concern each leaf, by its path."""
        found: dict[str, list[tuple[Projection, Place]]] = {}
        for projection, place in places_of(self.model).items():
            path = f"{LAYERS}/{place.block}/{place.leaf}"
            found.setdefault(path, []).append((projection, place))
        return found
