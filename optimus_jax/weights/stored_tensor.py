"""A tensor in a file, of which any slice is read without the rest.

It is sliced, split and transposed like an array, which reads nothing; `np.asarray` reads. Elements
are read with `pread` and not through a memory map, which would kill the process if the file became
shorter, and which no error could report.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, Self

import numpy as np

from optimus_jax.weights.file_bytes import open_file, read_into

GAP_BYTES = 4096
"""Smaller gaps between wanted bytes are read along: a page costs less than a system call."""
BUFFER_BYTES = 4 << 20
"""Memory for bytes that are read before they are put in place."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file, or a view of one. No two of its elements share bytes."""

    path: Path
    dtype: np.dtype
    """Little-endian."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """Bytes from an element to the next one along each dimension, none of them negative."""
    offset: int
    """Byte of the file at which the first element begins."""

    @classmethod
    def contiguous(cls, path: Path, dtype: np.dtype, shape: tuple[int, ...], offset: int) -> Self:
        """A tensor whose elements follow each other in the order of its dimensions."""
        return cls(path, dtype, shape, _row_major(shape, dtype.itemsize), offset)

    @property
    def T(self) -> Self:
        """Its dimensions in reverse order."""
        return replace(self, shape=self.shape[::-1], strides=self.strides[::-1])

    def reshape(self, shape: tuple[int, ...], /) -> Self:
        """Its dimensions split into several. Two of them can be merged if the elements are in order
        without gaps."""
        if self.strides == tuple(_row_major(self.shape, self.dtype.itemsize)):
            assert prod(shape) == prod(self.shape), (self.shape, shape)
            return replace(self, shape=shape, strides=tuple(_row_major(shape, self.dtype.itemsize)))
        strides, sizes = [], list(shape)
        for size, stride in zip(self.shape, self.strides, strict=True):
            inner = []
            while sizes and prod(inner) < size:
                inner.append(sizes.pop(0))
            assert prod(inner) == size, (self.shape, shape)
            strides += _row_major(inner, stride)
        assert all(size == 1 for size in sizes), (self.shape, shape)
        return replace(self, shape=shape, strides=(*strides, *[self.dtype.itemsize] * len(sizes)))

    def __getitem__(self, index: tuple[slice, ...], /) -> Self:
        """A view of a part. The slices have step 1; dimensions without one are whole."""
        assert len(index) <= len(self.shape), index
        shape, offset = list(self.shape), self.offset
        for dim, part in enumerate(index):
            start, stop, step = part.indices(self.shape[dim])
            assert step == 1, index
            shape[dim] = max(0, stop - start)
            offset += start * self.strides[dim]
        return replace(self, shape=tuple(shape), offset=offset)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """The elements, read from the file and laid out as they are there.

        Raises CheckpointError if that fails.
        """
        # In the order of the file, outermost first. A dimension of size 1 has any stride.
        dims = range(len(self.shape))
        order = sorted(dims, key=lambda dim: (self.shape[dim] != 1, -self.strides[dim]))
        in_file = np.empty([self.shape[dim] for dim in order], self.dtype)
        if in_file.size:
            wide = [dim for dim in order if self.shape[dim] != 1]
            target = in_file.reshape([self.shape[dim] for dim in wide])
            with open_file(self.path) as descriptor:
                strides = [self.strides[dim] for dim in wide]
                _Reader(self.path, descriptor).fill(target, strides, self.offset)
        values = in_file.transpose(np.argsort(order))
        return values if dtype is None else values.astype(dtype, copy=False)


@dataclass(frozen=True)
class _Reader:
    path: Path
    descriptor: int

    def fill(self, target: np.ndarray, strides: Sequence[int], offset: int) -> None:
        """Read the elements of an array, whose dimensions are in the order of the file.

        Args:
          strides: of the file, in bytes.
          offset: of the first element.
        """
        size = span(target.shape, strides, target.itemsize)
        if size == target.nbytes and target.flags.c_contiguous:
            read_into(self.path, self.descriptor, offset, target.reshape(-1).view(np.uint8))
            return
        gaps = [
            stride - span(target.shape[dim:], strides[dim:], target.itemsize)
            for dim, stride in enumerate(strides, 1)
        ]
        rows = max(1, BUFFER_BYTES // strides[0]) if max(gaps) < GAP_BYTES else 1
        if size <= BUFFER_BYTES and max(gaps) < GAP_BYTES:
            buffer = np.empty(size, np.uint8)
            read_into(self.path, self.descriptor, offset, buffer)
            target[...] = np.ndarray(target.shape, target.dtype, buffer, strides=strides)
            return
        for start in range(0, len(target), rows):
            part, place = target[start : start + rows], offset + start * strides[0]
            if rows == 1:
                self.fill(part[0, ...], strides[1:], place)
            else:
                self.fill(part, strides, place)


def span(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> int:
    """Bytes from the first to the end of the last element of an array that is not empty."""
    return itemsize + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def is_overlapping(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> bool:
    """Whether elements of an array might share bytes."""
    ordered = sorted(
        (stride, size) for size, stride in zip(shape, strides, strict=True) if size != 1
    )
    end = itemsize
    for stride, size in ordered:
        if stride < end:
            return True
        end += (size - 1) * stride
    return False


def _row_major(shape: Sequence[int], itemsize: int) -> tuple[int, ...]:
    return tuple(itemsize * prod(shape[dim + 1 :]) for dim in range(len(shape)))
