"""Checksums of a state as it lies, of every copy of every shard.

The sums are those that checkpoints have (reshard/checksum.py, of the stored form): an element
counts by its layer, not its slot, and padding of zeros does not count, so they are the same under
every layout. Each device adds up its own shards. Hence replicas are compared too: a copy that went
wrong on one device is seen, and on which.
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
from optimus_jax.reshard.exchange import Index, Lying
from optimus_jax.reshard.piece_programs import ROW
from optimus_jax.reshard.reshard import Layout, as_row

CHUNK_ELEMENTS = 1 << 16
"""Added up at a time: they and their sums stay in a core's cache."""
MAX_CHUNKS = 1 << 12


class ReplicasDifferError(Exception):
    """Two devices hold different bits where they should hold the same."""


class ShardSums:
    """The checksums of states that lie as a layout says.

    Args:
      layout: of the states.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout, self._row = layout, Mesh(np.array(layout.devices), (ROW,))

    def compile(self) -> None:
        """Compile every program that is needed; leaves whose shards are alike share one."""
        for path in self._layout.named:
            self._program(path)
            _numbers(self._lying(path), self._row)

    def of(self, leaves: Mapping[str, Array], paths: Iterable[str]) -> dict[str, int]:
        """The checksum of some leaves, by path; the same on every process.

        Raises:
          ReplicasDifferError: naming the leaf and a device.
        """
        return {path: self._sum(path, leaves[path]) for path in paths}

    def _sum(self, path: str, leaf: Array) -> int:
        lying = self._lying(path)
        by_device = np.asarray(
            self._program(path)(as_row(leaf, self._row, lying.local), *_numbers(lying, self._row))
        )
        total = 0
        for block, devices in lying.replicas.items():
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
            self._lying(path).local, np.dtype(self._layout.named[path].dtype), self._row
        )

    def _lying(self, path: str) -> Lying:
        return self._layout.lying(path, tuple(self._row.devices.flat))


@lru_cache(maxsize=1 << 10)
def _program(local: Index, dtype: np.dtype, row: Mesh) -> jax.stages.Compiled:
    """(shards [devices * local[0], ...], their numbers) -> uint32 [devices]: the sum of every
    device's shard, known to all.
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
    """Parts of equal size that a shard's rows along all dimensions but the last are added up in, of
    CHUNK_ELEMENTS or less; 1 if there are none.
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
    """uint32 []: `mesh.checksum` of a shard in its place.

    Args:
      shard: any shape.
      rows: int32 [shard.shape[0]], the number of every row in the whole array.
      starts: int32 [shard.ndim - 1], where the shard begins along the other dimensions.
      chunks: parts to be added up elementwise before the sum over all is taken. A CPU's loop over
        one sum after the other is 10 times as slow as one over vectors.
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
def _numbers(lying: Lying, row: Mesh) -> tuple[Array, Array]:
    """The numbers of rows [devices * local[0]], and starts along other dimensions [devices, dims -
    1], of every device's shard.
    """
    blocks = [block or (0,) * len(lying.local) for block in lying.blocks]
    rows = np.array(lying.rows, np.int32).reshape(-1, lying.local[0])
    starts = np.array(
        [
            [place * size for place, size in zip(block[1:], lying.local[1:], strict=True)]
            for block in blocks
        ],
        np.int32,
    )
    numbers = (
        np.concatenate([rows[block[0]] for block in blocks]),
        starts.reshape(len(blocks), len(lying.local) - 1),
    )
    sharding = NamedSharding(row, PartitionSpec(ROW))
    first, second = (
        jax.make_array_from_callback(array.shape, sharding, lambda index, array=array: array[index])
        for array in numbers
    )
    return first, second
