"""A tensor in a file that is being written, into which any slice is written without the rest."""

import os
from math import prod
from types import EllipsisType
from typing import Any

import numpy as np

from optimus_jax.errors import CheckpointError, explain
from optimus_jax.models.huggingface_tensors import copy_cast
from optimus_jax.weights.stored_tensor import StoredTensor, span

EXPONENTS = {"float16": np.uint16(0x7C00), "bfloat16": np.uint16(0x7F80)}
"""Bits of the exponent, all of which are ones in what is not finite."""


class NewTensor(StoredTensor):
    """A tensor in a file that has its full size already, or a view of one.

    Keeps no state, so that threads can write different slices at the same time.
    """

    def __setitem__(self, index: EllipsisType, values: Any, /) -> None:
        """Write all elements, cast to the tensor's dtype and laid out as in the file.

        Raises:
          CheckpointError: a finite number is too large for the dtype.
          OSError: the file cannot be written.
        """
        if not values.size:
            return
        dims = range(len(self.shape))
        order = sorted(dims, key=lambda dim: (self.shape[dim] != 1, -self.strides[dim]))
        in_file = np.empty([self.shape[dim] for dim in order], self.dtype)
        with np.errstate(over="ignore"):  # checked below
            copy_cast(values.transpose(order), in_file)
        if values.dtype != self.dtype and not _is_finite(in_file):
            largest = np.abs(values[np.isfinite(values)]).max(initial=0)
            raise CheckpointError(
                explain(
                    f"a parameter is too large for {self.dtype}",
                    given=f"{largest:g}, in {self.path.name}",
                    do="choose --dtype f32",
                )
            )
        strides = [self.strides[dim] for dim in order]
        outer = _num_outer_dims(in_file.shape, strides, in_file.itemsize)
        rows = in_file.reshape(-1, prod(in_file.shape[outer:])).view(np.uint8)
        descriptor = os.open(self.path, os.O_WRONLY)
        try:
            for row, place in zip(rows, np.ndindex(in_file.shape[:outer]), strict=True):
                step = sum(at * stride for at, stride in zip(place, strides[:outer], strict=True))
                _write_all(descriptor, row, self.offset + step)
        finally:
            os.close(descriptor)


def _num_outer_dims(shape: tuple[int, ...], strides: list[int], itemsize: int) -> int:
    """The number of outer dimensions between whose elements the file has other bytes."""
    outer = len(shape)
    while outer and (
        shape[outer - 1] == 1
        or strides[outer - 1] == span(shape[outer:], strides[outer:], itemsize)
    ):
        outer -= 1
    return outer


def _is_finite(values: np.ndarray) -> bool:
    """Whether no element of 16 bits is infinite or NaN; wider ones hold any parameter."""
    exponent = EXPONENTS.get(values.dtype.name)
    return exponent is None or bool(np.all((values.view(np.uint16) & exponent) != exponent))


def _write_all(descriptor: int, values: np.ndarray, offset: int) -> None:
    """Write bytes at an offset, in as many calls as the system needs."""
    done = 0
    while done < values.size:
        done += os.pwrite(descriptor, values[done:].data, offset + done)
