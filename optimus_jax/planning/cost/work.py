"""Work: what a device computes, counted independently of its rates.

The time of a matmul of [m, k] and [k, n] on a device with C cores, in tiles of 128 x 128, is
modelled as

    2 m k n / rate * (1 + wave * C / tiles) * (1 + inner / k)

because the last wave of tiles leaves cores idle, and because a tile with a short inner dimension
spends much of its time on its prologue and epilogue. This is linear in the fields of `Work`, so all
matmuls of a layer reduce to four sums, from which any rates give their time in a few
multiplications.
"""

import math
from typing import NamedTuple

TILE = 128
"""Side of a matmul's tile on a GPU's tensor cores."""
SPLIT_INNER = 4096
"""An inner dimension longer than this is divided among cores (split-K) when there are few tiles."""


class Work(NamedTuple):
    """What one device computes."""

    flops: float = 0.0
    """FLOPs of matmuls."""
    wave: float = 0.0
    """Sum over matmuls of FLOPs / tiles."""
    short: float = 0.0
    """Sum over matmuls of FLOPs / inner dimension."""
    short_wave: float = 0.0
    """Sum over matmuls of FLOPs / (tiles * inner dimension)."""
    fused_flops: float = 0.0
    """FLOPs of fused attention kernels."""
    num_bytes: float = 0.0
    """Bytes read and written by everything else."""
    kernels: float = 0.0
    """Number of kernels launched."""

    def __add__(self, other: "Work") -> "Work":  # type: ignore[override]  # of work, not of tuples
        return Work(*[a + b for a, b in zip(self, other, strict=True)])

    def times(self, number: float) -> "Work":
        """This work, `number` times."""
        return Work(*[each * number for each in self])


def matmul(rows: float, inner: float, columns: float, count: float = 1.0) -> Work:
    """The work of `count` matmuls of [rows, inner] and [inner, columns].

    They are one batched matmul, whose tiles share the cores.
    """
    flops = 2.0 * rows * inner * columns * count
    tiles = (
        math.ceil(rows / TILE) * math.ceil(columns / TILE) * count * max(1.0, inner / SPLIT_INNER)
    )
    return Work(flops, flops / tiles, flops / inner, flops / (tiles * inner))
