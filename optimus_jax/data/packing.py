"""Packs whole pieces into examples: first fit, in the order of the pieces."""

from dataclasses import dataclass

import numpy as np

OPEN_EXAMPLES = 256
"""Most examples that are open at a time; the one with the least room closes for a new one."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Packing:
    """Which pieces each example holds."""

    pieces: np.ndarray
    """Numbers of the pieces, example by example: int64 [P]."""
    starts: np.ndarray
    """Where each example begins in `pieces`, and the end: int64 [num_examples + 1]."""

    @property
    def num_examples(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, example: int) -> np.ndarray:
        """The numbers of an example's pieces, ascending."""
        return self.pieces[self.starts[example] : self.starts[example + 1]]


def pack(sizes: np.ndarray, capacity: int) -> Packing:
    """Put each piece into the first open example that has room for it.

    Depends on the sizes and their order alone. Examples are numbered in the order of their first
    pieces.

    Args:
      sizes: int [P], each from 1 to `capacity`.
      capacity: size of an example.
    """
    assert not len(sizes) or (sizes.min() >= 1 and sizes.max() <= capacity), "a piece has no place"
    room = np.zeros(OPEN_EXAMPLES, np.int64)
    """Room of the open examples; 0 for places where none is open."""
    number = np.zeros(OPEN_EXAMPLES, np.int64)
    found = np.empty(len(sizes), np.int64)
    num_examples = 0
    for piece, size in enumerate(sizes.tolist()):
        place = int(np.argmax(room >= size))
        if room[place] < size:
            place = int(np.argmin(room))
            room[place], number[place] = capacity, num_examples
            num_examples += 1
        room[place] -= size
        found[piece] = number[place]
    counts = np.bincount(found, minlength=num_examples) if num_examples else np.zeros(0, np.int64)
    return Packing(
        pieces=np.argsort(found, kind="stable"), starts=np.concatenate([[0], np.cumsum(counts)])
    )
