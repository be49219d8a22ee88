"""A model's leaves in a checkpoint, read slice by slice as numbers, however they are stored."""

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import lcm
from typing import Any

import jax
import numpy as np

from optimus_jax.checkpoint.slices import StoredLeaf
from optimus_jax.mesh.boxes import Box, split
from optimus_jax.mesh.leaf import Leaf, leaf_path
from optimus_jax.mesh.quantised import code_leaves, decoded, quantised_format
from optimus_jax.models.shapes import ModelShapes


@dataclass
class StoredCodes:
    """A matrix that is stored in codes. Several threads may read at the same time."""

    leaf: Leaf
    """The matrix's row of the leaf table."""
    parts: Mapping[str, StoredLeaf]
    """Its codes and scales, by name."""
    _scales: dict[str, np.ndarray] = field(default_factory=dict)
    _lock: Any = field(default_factory=threading.Lock)

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the matrix."""
        *outer, last = self.parts["codes"].shape
        return (*outer, last * self._per_code)

    @property
    def num_bytes(self) -> int:
        """Bytes of its codes and scales, before compression."""
        return sum(part.num_bytes for part in self.parts.values())

    def boxes(self, dims: Sequence[int], most_bytes: int) -> Iterator[Box]:
        """As those of a StoredLeaf. None cuts a chunk of the disk, or what shares a scale."""
        chunk = (*self.parts["codes"].chunk[:-1], self.parts["codes"].chunk[-1] * self._per_code)
        grid = [lcm(*sizes) for sizes in zip(chunk, *map(self._step, self._whole), strict=True)]
        whole = tuple(slice(0, size) for size in self.shape)
        return split(whole, dims, most_bytes // np.dtype(np.float32).itemsize, grid)

    def read(self, box: Box) -> np.ndarray:
        """The values of a part, float32, of one of the `boxes`.

        Raises DamagedError or UnreachableError.
        """
        with self._lock:
            for name in self.parts.keys() - {"codes"} - self._scales.keys():
                part = self.parts[name]  # few bytes, for all boxes
                self._scales[name] = part.read(tuple(slice(0, size) for size in part.shape))
        codes = {"codes": self.parts["codes"].read(self._within("codes", box))}
        codes |= {name: each[self._within(name, box)] for name, each in self._scales.items()}
        return decoded(codes, self.leaf, np.float32)

    def check(self) -> None:
        """As that of a StoredLeaf."""
        for part in self.parts.values():
            part.check()

    @property
    def _per_code(self) -> int:
        """Values for each element of the codes."""
        return self._rows["codes"].values

    @property
    def _rows(self) -> dict[str, Leaf]:
        return code_leaves(self.leaf, quantised_format(self.parts))

    @property
    def _whole(self) -> list[str]:
        """The parts that have all dimensions of the matrix."""
        return [name for name, part in self.parts.items() if len(part.shape) == len(self.shape)]

    def _step(self, name: str) -> tuple[int, ...]:
        """Elements of the matrix for each element of a part, along each dimension."""
        sizes = zip(self.shape, self.parts[name].shape, strict=True)
        return tuple(whole // size for whole, size in sizes)

    def _within(self, name: str, box: Box) -> Box:
        """What belongs to a box, of a part."""
        if name in self._whole:
            return tuple(
                slice(each.start // step, each.stop // step)
                for each, step in zip(box, self._step(name), strict=True)
            )
        dims = self._rows[name].dims
        return tuple(each for each, dim in zip(box, self.leaf.dims, strict=True) if dim in dims)


def matrices_of(
    leaves: Mapping[str, StoredLeaf], shapes: ModelShapes
) -> dict[str, StoredLeaf | StoredCodes]:
    """Stored leaves, with those that are parts of a matrix's codes as one.

    Args:
      leaves: by the path in a model, such as `layers/mlp/up/codes`.
      shapes: the model.
    """
    found: dict[str, StoredLeaf | StoredCodes] = dict(leaves)
    for path, leaf in jax.tree.leaves_with_path(shapes.base.leaves):
        name = leaf_path(path)
        if f"{name}/codes" in leaves:
            names = [each for each in leaves if each.startswith(f"{name}/")]
            parts = {each.removeprefix(f"{name}/"): leaves[each] for each in names}
            found = {each: found[each] for each in found if each not in names}
            found[name] = StoredCodes(leaf, parts)
    return found
