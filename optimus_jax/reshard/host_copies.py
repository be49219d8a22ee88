"""Copy pieces directly from old shards into new ones when all devices are one process's CPU.

Virtual devices share one memory. A program that sends a piece between them
(reshard/piece_programs.py) copies it three times: out of the old shard, to the other device, into
the new shard. This module copies it once, and only compiles a program that makes zeros, per shard
shape.

New shards are written in place. No other code holds a reference to them yet, so nothing can observe
the change.
"""

import ctypes
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from optimus_jax.reshard.exchange import (
    CopyRange,
    Device,
    Exchange,
    Index,
    PiecePosition,
    RowRange,
    TransferRound,
)
from optimus_jax.reshard.piece_programs import ROW


def share_memory(devices: Sequence[Device]) -> bool:
    """Whether all devices are virtual devices of this process."""
    return all(
        device.platform == "cpu" and device.process_index == jax.process_index()
        for device in devices
    )


@lru_cache(maxsize=1 << 10)
def zeros_program(local: Index, dtype: np.dtype, row: Mesh) -> jax.stages.Compiled:
    """() -> zeros [devices * local[0], ...], a shard of shape `local` on every device."""
    shape = (row.size * local[0], *local[1:])
    return (
        jax.jit(
            lambda: jnp.zeros(shape, dtype), out_shardings=NamedSharding(row, PartitionSpec(ROW))
        )
        .lower()
        .compile()
    )


def copy_shards(
    old: Mapping[Device, Array],
    exchange: Exchange,
    dtype: np.dtype,
    devices: Sequence[Device],
    row: Mesh,
) -> dict[Device, Array]:
    """The new shards, each of shape `exchange.new`, by device.

    Args:
      old: shards by device.
      devices: the devices in the order of the exchange.
      row: the devices that get a new shard.
    """
    blank = jax.block_until_ready(zeros_program(exchange.new, dtype, row)())
    new = {shard.device: shard.data for shard in blank.addressable_shards}
    sent = {
        place: np.asarray(old[device]).reshape(exchange.old)
        for place, device in enumerate(devices)
        if device in old
    }

    def fill(place: int) -> None:
        put = _writable(new[devices[place]])
        for part in exchange.rounds:
            if (start := _sender(part, place)) is not None:
                _copy(part, sent[start], start, put, place)

    with ThreadPoolExecutor(os.cpu_count()) as threads:
        list(threads.map(fill, (place for place, device in enumerate(devices) if device in new)))
    return new


def _sender(part: TransferRound, place: int) -> int | None:
    """The device that sends to `place` in a round; None if `place` receives nothing."""
    if part.put[place] is None:
        return None
    return next(start for start, end in part.routes if end == place) if part.routes else place


def _copy(part: TransferRound, old: np.ndarray, start: int, new: np.ndarray, end: int) -> None:
    """Copy one piece."""
    take, put = part.take[start], part.put[end]
    assert take is not None
    assert put is not None
    for old_row, new_row, count in _runs(take.rows, put.rows):
        new[(slice(new_row, new_row + count), *_columns(part, put))] = old[
            (slice(old_row, old_row + count), *_columns(part, take))
        ]


def _columns(part: TransferRound, place: PiecePosition) -> tuple[slice, ...]:
    """Slices of a piece along all dimensions but the first."""
    return tuple(
        slice(start, start + length)
        for start, length in zip(place.starts, part.shape[1:], strict=True)
    )


def _runs(take: Sequence[RowRange], put: Sequence[RowRange]) -> Iterator[CopyRange]:
    """Ranges of rows that are consecutive in both shards."""
    olds, news = list(take), list(put)
    while olds:
        (old, old_count), (new, new_count) = olds.pop(0), news.pop(0)
        count = min(old_count, new_count)
        yield old, new, count
        if old_count > count:
            olds.insert(0, (old + count, old_count - count))
        if new_count > count:
            news.insert(0, (new + count, new_count - count))


def _writable(shard: Array) -> np.ndarray:
    """A writable view of a shard's memory."""
    memory = (ctypes.c_byte * shard.nbytes).from_address(shard.unsafe_buffer_pointer())
    return np.ctypeslib.as_array(memory).view(shard.dtype).reshape(shard.shape)
