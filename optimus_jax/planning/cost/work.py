"""Work: what a device computes, counted before any rate is known.

The time of a matmul of [m, k] and [k, n] on a device with C cores, in tiles of 128 x 128, is taken
as

    2 m k n / rate * (1 + wave * C / tiles) * (1 + inner / k)

since the last wave of tiles leaves cores idle, and since a tile with a short inner dimension spends
its time on its beginning and end. That is linear in what `Work` holds: all matmuls of a layer are
four sums, and their time is a few multiplications under any rates.
"""

import math
from typing import NamedTuple

TILE = 128
"""Side of a matmul's tile on a GPU's tensor cores."""
SPLIT_INNER = 4096
"""A longer inner dimension is divided among cores where tiles are few."""


class Work(NamedTuple):
    """What one device computes."""

    flops: float = 0.0
    """Of matmuls."""
    wave: float = 0.0
    """Sum of FLOPs / tiles."""
    short: float = 0.0
    """Sum of FLOPs / inner dimension."""
    short_wave: float = 0.0
    """Sum of FLOPs / (tiles * inner dimension)."""
    fused_flops: float = 0.0
    """Of fused attention kernels."""
    num_bytes: float = 0.0
    """Read and written by everything else."""
    kernels: float = 0.0
    """Launched."""

    def __add__(self, other: "Work") -> "Work":  # type: ignore[override]  # of work, not of tuples
        return Work(*[a + b for a, b in zip(self, other, strict=True)])

    def times(self, number: float) -> "Work":
        """So often."""
        return Work(*[each * number for each in self])


def matmul(rows: float, inner: float, columns: float, count: float = 1.0) -> Work:
    """`count` products of [rows, inner] and [inner, columns]; those of one batched product share
    the cores.
    """
    flops = 2.0 * rows * inner * columns * count
    tiles = (
        math.ceil(rows / TILE) * math.ceil(columns / TILE) * count * max(1.0, inner / SPLIT_INNER)
    )
    return Work(flops, flops / tiles, flops / inner, flops / (tiles * inner))
