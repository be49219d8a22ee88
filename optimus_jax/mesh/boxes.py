"""Boxes: parts of an array, with a range for each dimension."""

from collections.abc import Iterator, Sequence
from math import prod

Box = tuple[slice, ...]
"""A range with step 1 for each dimension, with numbers for both ends."""


def sizes(box: Box) -> tuple[int, ...]:
    """The shape of a box."""
    return tuple(each.stop - each.start for each in box)


def split(
    box: Box, dims: Sequence[int], most: int, grid: Sequence[int] | None = None
) -> Iterator[Box]:
    """A box in parts of at most `most` elements, split along as few of `dims`, in that sequence, as
    possible.

    Args:
      grid: chunks that no cut goes through, by their size along each dimension; parts are then as
        large as these demand.
    """
    num_elements = prod(sizes(box))
    if num_elements <= most or not dims:
        yield box
        return
    dim, *later = dims
    whole = box[dim]
    chunk = 1 if grid is None else grid[dim]
    step = max(1, most * (whole.stop - whole.start) // num_elements // chunk) * chunk
    for start in range(whole.start, whole.stop, step):
        part = slice(start, min(start + step, whole.stop))
        yield from split((*box[:dim], part, *box[dim + 1 :]), later, most, grid)
