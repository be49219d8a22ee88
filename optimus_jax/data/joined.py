"""Joins several token arrays into one without copying, for token files mapped into memory."""

import bisect
import itertools
from collections.abc import Sequence
from typing import Any, overload

import numpy as np

_COPIED_TOKENS = 1 << 24
"""Longest slice across parts, in tokens, that is copied to one array; longer ones stay joined."""


class JoinedTokens:
    """Arrays [N_i] of one dtype, seen as one array [sum of N_i].

    Supports len(), indexing, and slicing with step 1. A slice is a plain array if it is short or
    lies in one part; otherwise it is a JoinedTokens too.
    """

    def __init__(self, parts: Sequence[Any]) -> None:
        self._parts: list[np.ndarray] = [part for part in parts if len(part)]
        self._ends = list(itertools.accumulate(map(len, self._parts)))
        self.dtype = self._parts[0].dtype
        assert all(part.dtype == self.dtype for part in self._parts), "parts of several dtypes"

    def __len__(self) -> int:
        return self._ends[-1]

    @property
    def nbytes(self) -> int:
        return len(self) * self.dtype.itemsize

    @overload
    def __getitem__(self, where: int) -> np.integer: ...
    @overload
    def __getitem__(self, where: slice) -> "np.ndarray | JoinedTokens": ...

    def __getitem__(self, where: int | slice) -> "np.integer | np.ndarray | JoinedTokens":
        if not isinstance(where, slice):
            index = range(len(self))[where]
            part = bisect.bisect_right(self._ends, index)
            return self._parts[part][index - self._ends[part]]
        start, stop, step = where.indices(len(self))
        assert step == 1, "tokens are taken in order"
        found = []
        for part in range(bisect.bisect_right(self._ends, start), len(self._parts)):
            begin = self._ends[part] - len(self._parts[part])
            if begin >= stop:
                break
            found.append(self._parts[part][max(0, start - begin) : stop - begin])
        if not found:
            return np.empty(0, self.dtype)
        if len(found) == 1:
            return found[0]
        return np.concatenate(found) if stop - start <= _COPIED_TOKENS else JoinedTokens(found)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.concatenate(self._parts).astype(dtype or self.dtype, copy=False)
