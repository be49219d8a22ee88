"""Pieces copied straight from old shards into new ones, where all devices are one process's CPU.

Virtual devices have one memory. A program that sends a piece from one of them to another
(reshard/piece_programs.py) copies it three times: out of the old shard, to the other device, into
the new shard. Here it is copied once, and nothing but zeros is compiled, a program for each shape
of shards.

The new shards are written where they lie. They are arrays that nobody has seen yet, so that nobody
sees them change.
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

from optimus_jax.reshard.exchange import Device, Exchange, Index, Place, Round, Run, Stretch
from optimus_jax.reshard.piece_programs import ROW


def have_one_memory(devices: Sequence[Device]) -> bool:
    """Whether all of them are virtual devices of this process."""
    return all(
        device.platform == "cpu" and device.process_index == jax.process_index()
        for device in devices
    )


@lru_cache(maxsize=1 << 10)
def blank_program(local: Index, dtype: np.dtype, row: Mesh) -> jax.stages.Compiled:
    """() -> zeros [devices * local[0], ...], a shard of shape `local` on every device."""
    shape = (row.size * local[0], *local[1:])
    return (
        jax.jit(
            lambda: jnp.zeros(shape, dtype), out_shardings=NamedSharding(row, PartitionSpec(ROW))
        )
        .lower()
        .compile()
    )


def copied(
    old: Mapping[Device, Array],
    exchange: Exchange,
    dtype: np.dtype,
    devices: Sequence[Device],
    row: Mesh,
) -> dict[Device, Array]:
    """The new shards, each of shape `exchange.new`, by device.

    Args:
      old: shards by device.
      devices: by their places in the exchange.
      row: those that get a new shard.
    """
    blank = jax.block_until_ready(blank_program(exchange.new, dtype, row)())
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


def _sender(part: Round, place: int) -> int | None:
    """The device from which one gets its piece in a round; None: it gets none."""
    if part.put[place] is None:
        return None
    return next(start for start, end in part.routes if end == place) if part.routes else place


def _copy(part: Round, old: np.ndarray, start: int, new: np.ndarray, end: int) -> None:
    """One piece."""
    take, put = part.take[start], part.put[end]
    assert take is not None
    assert put is not None
    for old_row, new_row, count in _runs(take.rows, put.rows):
        new[(slice(new_row, new_row + count), *_columns(part, put))] = old[
            (slice(old_row, old_row + count), *_columns(part, take))
        ]


def _columns(part: Round, place: Place) -> tuple[slice, ...]:
    """Where a piece lies along all dimensions but the first."""
    return tuple(
        slice(start, start + length)
        for start, length in zip(place.starts, part.shape[1:], strict=True)
    )


def _runs(take: Sequence[Stretch], put: Sequence[Stretch]) -> Iterator[Run]:
    """Rows that lie together in both shards."""
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
    """A shard's own memory."""
    memory = (ctypes.c_byte * shard.nbytes).from_address(shard.unsafe_buffer_pointer())
    return np.ctypeslib.as_array(memory).view(shard.dtype).reshape(shard.shape)
