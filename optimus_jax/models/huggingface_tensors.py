"""Which of Hugging Face's tensors hold a model's leaves, and where in them.

Both sides hold the same matrices. Ours have one leaf for matrices that are used together (key and
value, gate and up), and the layers are stacked. Theirs have other names and one tensor per layer;
GPT-2 has queries, keys and values in one tensor.

Names of tensors are without the family's prefix throughout, and `out` is the dimension of a
matrix that is that of its results. A tensor may be an array or anything that can be sliced like
one, such as a tensor in a file, of which only the slices that a caller wants are read.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from types import EllipsisType
from typing import Any, Protocol, Self, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from optimus_jax.config import ModelConfig
from optimus_jax.mesh.axes import VOCAB
from optimus_jax.mesh.boxes import Box
from optimus_jax.mesh.leaf import Leaf, leaf_path
from optimus_jax.models.encoder_decoder import layers_with
from optimus_jax.models.huggingface_formats import format_of
from optimus_jax.models.shapes import ModelShapes, model_shapes

TILE = 64
"""Columns that are transposed at a time."""


class TensorLike(Protocol):
    """What an array and a tensor in a file have in common. `np.asarray` gives its values."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its sizes."""
        ...

    @property
    def dtype(self) -> np.dtype:
        """The dtype of its elements."""
        ...

    @property
    def T(self) -> Self:
        """Its dimensions in reverse order."""
        ...

    def reshape(self, shape: tuple[int, ...], /) -> Self:
        """Its dimensions split into several."""
        ...

    def __getitem__(self, index: tuple[slice, ...], /) -> Self: ...


Tensor = TypeVar("Tensor", bound=TensorLike)


class TensorTarget(TensorLike, Protocol):
    """An array, or a tensor in a file that is being written."""

    def __setitem__(self, index: EllipsisType, values: Any, /) -> None: ...


@dataclass(frozen=True)
class LeafPart:
    """The part of a leaf (of one layer of a stack) that one tensor holds."""

    tensor: str
    """The tensor's name, with `{}` for the number of the layer."""
    out: slice
    """Its range along `out` of the tensor."""
    rows: slice
    """Its range along the leaf's `out_start`."""


@dataclass(frozen=True)
class LeafSource:
    """Where the values of one leaf are in Hugging Face's tensors."""

    leaf: Leaf
    array: jax.ShapeDtypeStruct
    """The whole leaf: stacked and padded."""
    slots: tuple[int, ...]
    """The layer of each slot of a stack, -1 if empty."""
    config: ModelConfig
    layers: range
    """The layers that have the leaf (`layers_with`)."""
    out_dim: int
    """`HuggingFaceFormat.out_dim`."""
    parts: tuple[LeafPart, ...] = ()

    def cast(self, dtype: jnp.dtype) -> "LeafSource":
        """The same leaf in another dtype."""
        return replace(self, array=jax.ShapeDtypeStruct(self.array.shape, dtype))

    @property
    def tensor_names(self) -> list[str]:
        """Names of the tensors that hold its layers."""
        layers = [each for each in self.slots if each in self.layers]
        return [
            tensor_name(part.tensor, layer, self.config)
            for part in self.parts
            for layer in (layers if self.leaf.is_in_layers else [0])
        ]

    @property
    def shape(self) -> tuple[int, ...]:
        """One layer's part, or a leaf outside the layers, without padding."""
        shape = self.array.shape[1:] if self.leaf.is_in_layers else self.array.shape
        return (self.config.vocab_size, *shape[1:]) if self._dims[0] == VOCAB else shape

    @property
    def out_start(self) -> int:
        """The first of the dimensions of `shape` that make up `out`. They are all those after it,
        or, if it is dimension 0 of a matrix, that one alone.
        """
        if self.leaf.role == "table":
            return self.out_dim % 2
        return 1 if self.leaf.role == "matrix" else 0

    @property
    def out_size(self) -> int:
        """Size of `out` of what the leaf holds for one layer."""
        if self.leaf.is_matrix and self.out_start == 0:
            return self.shape[0]
        return prod(self.shape[self.out_start :])

    def tensor_shape(self, out_size: int) -> tuple[int, ...]:
        """Shape of a tensor that holds `out_size` rows or columns of the leaf."""
        if not self.leaf.is_matrix:
            return (out_size,)
        in_size = prod(self.shape) // self.out_size
        return (out_size, in_size) if self.out_dim == 0 else (in_size, out_size)

    def block(
        self, tensors: Mapping[str, TensorLike], index: tuple[slice, ...] | None = None
    ) -> np.ndarray:
        """A slice of the leaf, in the leaf's dtype. Nothing else of the tensors is read, and one
        layer's part of one of them at a time.

        Args:
          tensors: the model's tensors, as `huggingface_checks.model_tensors` gives them.
          index: a slice with step 1 for each dimension of the leaf; None: the whole leaf.
        Returns:
          The values, zero in rows of padding and in empty slots.
        """
        bounds = _bounds(self.array.shape, index)
        block = np.zeros([bound.stop - bound.start for bound in bounds], self.array.dtype)
        if not self.leaf.is_in_layers:
            self._fill(block, tensors, 0, bounds)
            return block
        for part, layer in zip(block, self.slots[bounds[0]], strict=True):
            if layer in self.layers:
                self._fill(part, tensors, layer, bounds[1:])
        return block

    def write(
        self,
        values: np.ndarray,
        tensors: Mapping[str, TensorTarget],
        index: tuple[slice, ...] | None = None,
    ) -> None:
        """Write a slice of the leaf into the model's tensors, without padding and empty slots.

        Args:
          values: of the slice, in its shape.
          index: as for `block`.
        """
        bounds = _bounds(self.array.shape, index)
        if not self.leaf.is_in_layers:
            self._spread(values, tensors, 0, bounds)
            return
        for part, layer in zip(values, self.slots[bounds[0]], strict=True):
            if layer in self.layers:
                self._spread(part, tensors, layer, bounds[1:])

    @property
    def file_order(self) -> tuple[int, ...]:
        """The leaf's dimensions in the order of the file, outermost first, layers before all: the
        earlier a dimension is split, the longer are the runs of bytes that are read.
        """
        stacked = int(self.leaf.is_in_layers)
        dims = [*range(stacked, len(self.array.shape))]
        split = (self.out_start or 1) if self._is_transposed else 0
        return (*range(stacked), *dims[split:], *dims[:split])

    @property
    def _dims(self) -> tuple[str, ...]:
        return self.leaf.dims[1:] if self.leaf.is_in_layers else self.leaf.dims

    @property
    def _is_transposed(self) -> bool:
        """Whether `out` comes first in one of the two and last in the other."""
        return self.leaf.is_matrix and self.out_start != self.out_dim % 2

    def _box(self, part: LeafPart) -> tuple[slice, ...]:
        """What a part covers of `shape`."""
        box = [slice(0, size) for size in self.shape]
        box[self.out_start] = part.rows
        return tuple(box)

    def _in_theirs(self, tensor: Tensor, part: LeafPart) -> Tensor:
        """A part, in the tensor's orientation."""
        is_last = self.leaf.is_matrix and self.out_dim != 0
        return tensor[(slice(None), part.out) if is_last else (part.out,)]

    def _in_ours(self, tensor: Tensor, part: LeafPart) -> Tensor:
        """A part, with the leaf's dimensions."""
        part_in_theirs = self._in_theirs(tensor, part)
        return (part_in_theirs.T if self._is_transposed else part_in_theirs).reshape(
            tuple(bound.stop - bound.start for bound in self._box(part))
        )

    def _fill(
        self,
        block: np.ndarray,
        tensors: Mapping[str, TensorLike],
        layer: int,
        bounds: Box,
    ) -> None:
        """Fill a block with the values that are within bounds; those of padding stay."""
        for part, in_part, in_bounds in self._parts_within(bounds):
            name = tensor_name(part.tensor, layer, self.config)
            tensor = self._in_ours(tensors[name], part)
            copy_cast(np.asarray(tensor[in_part]), block[in_bounds])

    def _spread(
        self,
        values: np.ndarray,
        tensors: Mapping[str, TensorTarget],
        layer: int,
        bounds: Box,
    ) -> None:
        """The inverse of `_fill`: write the values that are within bounds."""
        for part, in_part, in_bounds in self._parts_within(bounds):
            name = tensor_name(part.tensor, layer, self.config)
            tensor = self._in_ours(tensors[name], part)
            tensor[in_part][...] = values[in_bounds]

    def _parts_within(self, bounds: Box) -> Iterator[tuple[LeafPart, Box, Box]]:
        """What bounds cover of each part: in the part, and from the corner of the bounds."""
        for part in self.parts:
            box = self._box(part)
            both = [
                slice(max(one.start, other.start), min(one.stop, other.stop))
                for one, other in zip(box, bounds, strict=True)
            ]
            if all(each.start < each.stop for each in both):
                yield part, _relative(both, box), _relative(both, bounds)


def leaf_sources(shapes: ModelShapes) -> dict[str, LeafSource]:
    """Where every leaf's values are, by the leaf's path, such as `layers/attention/query`."""
    return {path: source for group in _groups(shapes) for path, source in group.sources.items()}


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor of a model, by name."""
    return {
        tensor_name(name, layer, config): group.tensor_shape
        for group in _groups(model_shapes(config, config.vocab_size))
        for name in group.tensors
        for layer in group.layers
    }


def tensor_name(name: str, layer: int, config: ModelConfig) -> str:
    """The tensor of a layer.

    Args:
      name: as in `HuggingFaceFormat.tensors`, with `{}` for the layer's number in its stack, and
        `{side}` for whose stack that is, encoder or decoder.
    """
    first = config.encoder_layers
    side, number = ("encoder", layer) if layer < first else ("decoder", layer - first)
    return name.format(number, side=side)


@dataclass(frozen=True)
class _Group:
    """Tensors and leaves that hold the same matrix: either side, concatenated along `out`."""

    sources: Mapping[str, LeafSource]
    """The leaves, by path."""
    tensors: tuple[str, ...]
    """Names of the tensors, with `{}` for the number of the layer."""
    tensor_shape: tuple[int, ...]
    """The shape of each tensor."""

    @property
    def layers(self) -> Sequence[int]:
        """The layers that have them; 0 outside the layers."""
        first = next(iter(self.sources.values()))
        return first.layers if first.leaf.is_in_layers else (0,)


def _groups(shapes: ModelShapes) -> Iterator[_Group]:
    """All groups of a model. Leaves that it does not have are passed over."""
    hf_format = format_of(shapes.config)
    leaves, arrays = (
        {leaf_path(path): leaf for path, leaf in jax.tree.leaves_with_path(tree)}
        for tree in (shapes.leaves, shapes.params)
    )
    for ours, theirs in hf_format.tensors.items():
        if ours.split()[0] not in leaves:
            continue
        sources = {
            path: LeafSource(
                leaves[path],
                arrays[path],
                shapes.slots,
                shapes.config,
                layers_with(path, shapes.config),
                hf_format.out_dim,
            )
            for path in ours.split()
        }
        tensors, first = theirs.split(), next(iter(sources.values()))
        size = sum(source.out_size for source in sources.values()) // len(tensors)
        ranges = {
            name: slice(place * size, (place + 1) * size) for place, name in enumerate(tensors)
        }
        start = 0
        for path, source in sources.items():
            sources[path] = replace(source, parts=tuple(_parts(source, start, ranges)))
            start += source.out_size
        yield _Group(sources, tuple(tensors), first.tensor_shape(size))


def _parts(source: LeafSource, start: int, ranges: Mapping[str, slice]) -> Iterator[LeafPart]:
    """The parts of a leaf whose range along `out` of a group's matrix begins at `start`.

    Args:
      ranges: the tensors' ranges along it.
    """
    row_size = source.out_size // source.shape[source.out_start]
    for name, tensor in ranges.items():
        first, last = max(start, tensor.start), min(start + source.out_size, tensor.stop)
        if first < last:
            assert (first - start) % row_size == (last - start) % row_size == 0, name
            yield LeafPart(
                name,
                slice(first - tensor.start, last - tensor.start),
                slice((first - start) // row_size, (last - start) // row_size),
            )


def copy_cast(values: np.ndarray, target: np.ndarray) -> None:
    """Copy values into an array of another dtype.

    If they are transposed in memory, a few columns at a time, cast before they are transposed: more
    than twice as fast, because less of the cache is in use.
    """
    if values.ndim < 2 or values.strides[0] >= values.strides[-1]:
        target[...] = values
        return
    last = values.shape[-1]
    dim, step = (-1, TILE) if last >= TILE or values.ndim == 2 else (-2, max(1, TILE // last))
    values, target = np.moveaxis(values, dim, 0), np.moveaxis(target, dim, 0)
    for start in range(0, len(values), step):
        target[start : start + step] = values[start : start + step].astype(target.dtype)


def _bounds(shape: tuple[int, ...], index: tuple[slice, ...] | None) -> tuple[slice, ...]:
    """An index with numbers for all ends. Each slice has step 1."""
    index = (slice(None),) * len(shape) if index is None else index
    ranges = [part.indices(size) for part, size in zip(index, shape, strict=True)]
    assert all(step == 1 for _, _, step in ranges), index
    return tuple(slice(start, max(start, stop)) for start, stop, _ in ranges)


def _relative(index: Sequence[slice], box: Sequence[slice]) -> tuple[slice, ...]:
    """An index, counted from the corner of a box."""
    return tuple(
        slice(part.start - side.start, part.stop - side.start)
        for part, side in zip(index, box, strict=True)
    )
