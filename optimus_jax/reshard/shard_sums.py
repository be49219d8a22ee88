"""Checksums of a state in its current layout, computed for every replica of every shard.

The sums equal those of checkpoints (reshard/checksum.py, of the stored form): an element counts by
its layer, not its slot, and zero padding does not count, so the sums are the same under every
layout. Each device sums its own shards, so replicas are compared too, and a corrupt copy is
attributed to its device.
"""

import math
from collections.abc import Iterable, Mapping
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from optimus_jax.mesh.zero import vary
from optimus_jax.reshard.checksum import _scramble as scramble
from optimus_jax.reshard.exchange import BlockLayout, Index
from optimus_jax.reshard.piece_programs import ROW
from optimus_jax.reshard.reshard import Layout, as_row

CHUNK_ELEMENTS = 1 << 16
"""Elements summed at a time, so that they and their sums fit into a core's cache."""
MAX_CHUNKS = 1 << 12


class ReplicasDifferError(Exception):
    """Two replicas of a shard differ."""


class ShardSums:
    """Computes checksums of states in a given layout.

    Args:
      layout: the layout of the states.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout, self._row = layout, Mesh(np.array(layout.devices), (ROW,))

    def compile(self) -> None:
        """Compile all programs; leaves with equal shard shapes and dtypes share one."""
        for path in self._layout.named:
            self._program(path)
            _numbers(self._block_layout(path), self._row)

    def of(self, leaves: Mapping[str, Array], paths: Iterable[str]) -> dict[str, int]:
        """The checksums of some leaves by path; the same on every process.

        Raises:
          ReplicasDifferError: two replicas of a shard differ; the message names the leaf and the
            devices.
        """
        return {path: self._sum(path, leaves[path]) for path in paths}

    def _sum(self, path: str, leaf: Array) -> int:
        block_layout = self._block_layout(path)
        by_device = np.asarray(
            self._program(path)(
                as_row(leaf, self._row, block_layout.local), *_numbers(block_layout, self._row)
            )
        )
        total = 0
        for block, devices in block_layout.replicas.items():
            sums = by_device[devices]
            if (wrong := np.flatnonzero(sums != sums[0])).size:
                raise ReplicasDifferError(
                    f"leaf {path!r}, block {block}: devices {devices[0]} and {devices[wrong[0]]}"
                    " hold different bits"
                )
            total += int(sums[0])
        return total % 2**32

    def _program(self, path: str) -> jax.stages.Compiled:
        return _program(
            self._block_layout(path).local, np.dtype(self._layout.named[path].dtype), self._row
        )

    def _block_layout(self, path: str) -> BlockLayout:
        return self._layout.block_layout(path, tuple(self._row.devices.flat))


@lru_cache(maxsize=1 << 10)
def _program(local: Index, dtype: np.dtype, row: Mesh) -> jax.stages.Compiled:
    """Compile the program that sums the shard of every device.

    (shards [devices * local[0], ...], row numbers, starts) -> uint32 [devices], replicated.
    """
    rows = NamedSharding(row, PartitionSpec(ROW))

    chunks = _num_chunks(local) if row.devices.flat[0].platform == "cpu" else 1

    def on_device(shard: Array, first_D: Array, starts_D: Array) -> Array:
        return lax.all_gather(_sum_of(shard, first_D, starts_D[0], chunks), ROW, to="invarying")

    shapes = (
        ((row.size * local[0], *local[1:]), dtype),
        ((row.size * local[0],), np.int32),
        ((row.size, len(local) - 1), np.int32),
    )
    summed = jax.shard_map(
        on_device, mesh=row, in_specs=PartitionSpec(ROW), out_specs=PartitionSpec()
    )
    return (
        jax.jit(summed)
        .lower(*(jax.ShapeDtypeStruct(shape, kind, sharding=rows) for shape, kind in shapes))
        .compile()
    )


def _num_chunks(local: Index) -> int:
    """Number of equal chunks into which a shard's rows (all dimensions but the last) are split.

    Each chunk has at most CHUNK_ELEMENTS; 1 if no such number exists.
    """
    num_rows, least = math.prod(local[:-1]), math.prod(local) / CHUNK_ELEMENTS
    return next(
        (
            chunks
            for chunks in range(max(1, math.ceil(least)), min(num_rows, MAX_CHUNKS) + 1)
            if num_rows % chunks == 0
        ),
        1,
    )


def _sum_of(shard: Array, rows: Array, starts: Array, chunks: int) -> Array:
    """uint32 []: the part of an array's checksum that one shard contributes.

    Args:
      shard: any shape.
      rows: int32 [shard.shape[0]], the number of every row in the whole array.
      starts: int32 [shard.ndim - 1], where the shard begins along the other dimensions.
      chunks: number of chunks that are added elementwise before the final sum. On a CPU a loop over
        scalar sums is 10 times as slow as one over vectors.
    """
    *outer, last = shard.shape if shard.ndim > 1 else (1, *shard.shape)
    weights_R = scramble(rows.astype(jnp.uint32))
    for dim in range(1, shard.ndim - 1):
        numbers = starts[dim - 1].astype(jnp.uint32) + jnp.arange(
            shard.shape[dim], dtype=jnp.uint32
        )
        weights_R = scramble(weights_R[:, None] + numbers[None, :]).reshape(-1)

    def scrambled(bits_RK: Array, weights_R: Array) -> Array:
        bits_RK = bits_RK.view(f"uint{8 * bits_RK.dtype.itemsize}").astype(jnp.uint32)
        if shard.ndim == 1:
            weights_RK = weights_R[None, :]
        else:
            weights_RK = scramble(
                weights_R[:, None]
                + starts[-1].astype(jnp.uint32)
                + jnp.arange(last, dtype=jnp.uint32)[None, :]
            )
        return scramble(bits_RK * (weights_RK | np.uint32(1)))

    if chunks == 1:
        return jnp.sum(scrambled(shard.reshape(-1, last), weights_R), dtype=jnp.uint32)
    size = math.prod(outer) // chunks

    def add(sums_RK: Array, chunk: tuple[Array, Array]) -> tuple[Array, None]:
        return sums_RK + scrambled(*chunk), None

    nothing = jnp.zeros((size, last), jnp.uint32)
    sums_RK, _ = lax.scan(
        add,
        vary(nothing, (ROW,)),
        (shard.reshape(chunks, size, last), weights_R.reshape(chunks, size)),
    )
    return jnp.sum(sums_RK, dtype=jnp.uint32)


@lru_cache(maxsize=1 << 8)
def _numbers(block_layout: BlockLayout, row: Mesh) -> tuple[Array, Array]:
    """Row numbers [devices * local[0]], and starts along the other dimensions [devices, dims - 1],
    of every device's shard.
    """
    blocks = [block or (0,) * len(block_layout.local) for block in block_layout.blocks]
    rows = np.array(block_layout.rows, np.int32).reshape(-1, block_layout.local[0])
    starts = np.array(
        [
            [place * size for place, size in zip(block[1:], block_layout.local[1:], strict=True)]
            for block in blocks
        ],
        np.int32,
    )
    numbers = (
        np.concatenate([rows[block[0]] for block in blocks]),
        starts.reshape(len(blocks), len(block_layout.local) - 1),
    )
    sharding = NamedSharding(row, PartitionSpec(ROW))
    first, second = (
        jax.make_array_from_callback(array.shape, sharding, lambda index, array=array: array[index])
        for array in numbers
    )
    return first, second
