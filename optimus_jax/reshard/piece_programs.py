"""Compiled programs that move pieces of a leaf from old shards to new ones (reshard/exchange.py).

A program depends on shapes and on which device sends to which. The offsets of the pieces are an
argument (a table of integers), so leaves and layouts that differ only in offsets share a program.
"""

from dataclasses import dataclass
from functools import lru_cache, partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from optimus_jax.mesh.xla_options import compiler_options
from optimus_jax.reshard.edge_colouring import Route
from optimus_jax.reshard.exchange import Index, PiecePosition, TransferRound

ROW = "device"
"""The only axis of the mesh used for the exchange, which is independent of the old and new mesh."""


@dataclass(frozen=True)
class RoundShape:
    """The properties of a round for which its program is compiled; offsets are its arguments."""

    shape: Index
    routes: tuple[Route, ...]
    has_scattered_rows: bool
    is_for_all: bool
    """Whether every device receives a piece."""

    @classmethod
    def of(cls, part: TransferRound) -> "RoundShape":
        return cls(part.shape, part.routes, part.has_scattered_rows, None not in part.put)

    @property
    def num_offsets(self) -> int:
        """Number of integers that give the position of one piece."""
        return (self.shape[0] if self.has_scattered_rows else 1) + len(self.shape) - 1


@lru_cache(maxsize=1 << 11)
def piece_program(
    kinds: tuple[RoundShape, ...],
    old: Index,
    new: Index,
    dtype: np.dtype,
    row: Mesh,
    is_first: bool,
) -> jax.stages.Compiled:
    """Compile (old shards, offsets, new shards unless it is the first program) -> new shards.

    Leaves with the same shapes and dtype share it.
    """

    def rows(shape: Index, kind: np.dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(
            (row.size * shape[0], *shape[1:]), kind, sharding=NamedSharding(row, PartitionSpec(ROW))
        )

    num_offsets = sum(2 * kind.num_offsets + 1 for kind in kinds)
    given = (
        rows(old, dtype),
        rows((1, num_offsets), np.dtype(np.int32)),
        *(() if is_first else (rows(new, dtype),)),
    )
    return _carried.lower(*given, kinds=kinds, row=row, shape=new).compile(
        {**compiler_options(row)}
    )


@partial(jax.jit, static_argnames=("kinds", "row", "shape"), donate_argnums=2)
def _carried(
    old: Array,
    piece_offsets: Array,
    new: Array | None = None,
    *,
    kinds: tuple[RoundShape, ...],
    row: Mesh,
    shape: Index,
) -> Array:
    """The new shards so far, with the pieces of some rounds added.

    Old shards are [devices * old[0], ...]. Without `new`, new shards start as zeros.
    """

    def on_device(old: Array, piece_offsets: Array, *before: Array) -> Array:
        new = before[0] if before else lax.pcast(jnp.zeros(shape, old.dtype), (ROW,), to="varying")
        first = 0
        for kind in kinds:
            last = first + 2 * kind.num_offsets + 1
            new = _with_piece(kind, old, new, piece_offsets[0, first:last])
            first = last
        return new

    given = (old, piece_offsets) if new is None else (old, piece_offsets, new)
    return jax.shard_map(
        on_device, mesh=row, in_specs=PartitionSpec(ROW), out_specs=PartitionSpec(ROW)
    )(*given)


def _with_piece(kind: RoundShape, old: Array, new: Array, piece_offsets: Array) -> Array:
    """A device's new shard with the piece of one round added."""
    take, put, arrives = (
        piece_offsets[: kind.num_offsets],
        piece_offsets[kind.num_offsets : -1],
        piece_offsets[-1],
    )
    piece = old
    if kind.has_scattered_rows:
        piece = (
            _columns(piece, take, kind.shape)
            .at[take[: kind.shape[0]]]
            .get(mode="promise_in_bounds")
        )
    elif kind.shape != old.shape:
        piece = lax.dynamic_slice(old, tuple(take), kind.shape)
    if kind.routes:
        piece = lax.ppermute(piece, ROW, kind.routes)
    if kind.has_scattered_rows:
        columns = _columns(new, put, kind.shape).at[put[: kind.shape[0]]].set(piece, mode="drop")
        return (
            columns
            if columns.shape == new.shape
            else lax.dynamic_update_slice(new, columns, (0, *put[kind.shape[0] :]))
        )
    if not kind.is_for_all:
        piece = jnp.where(arrives > 0, piece, lax.dynamic_slice(new, tuple(put), kind.shape))
    return piece if kind.shape == new.shape else lax.dynamic_update_slice(new, piece, tuple(put))


def _columns(shard: Array, place: Array, shape: Index) -> Array:
    """All rows of a shard, restricted to a piece along the other dimensions."""
    if shard.shape[1:] == shape[1:]:
        return shard
    return lax.dynamic_slice(shard, (0, *place[shape[0] :]), (shard.shape[0], *shape[1:]))


@lru_cache(maxsize=1 << 10)
def piece_offsets(part: tuple[TransferRound, ...], new_rows: int, row: Mesh) -> Array:
    """int32 [devices, numbers]: the offsets of each device's pieces.

    For every round: offsets in the old shard, offsets in the new one, and whether the device
    receives a piece.
    """

    def numbers(kind: RoundShape, place: PiecePosition | None, none: int) -> list[int]:
        if place is None:
            return (
                [none] * kind.shape[0] + [0] * (len(kind.shape) - 1)
                if kind.has_scattered_rows
                else [0] * len(kind.shape)
            )
        rows = [row for first, count in place.rows for row in range(first, first + count)]
        return [*(rows if kind.has_scattered_rows else rows[:1]), *place.starts]

    table = np.array(
        [
            [
                number
                for each in part
                for number in (
                    *numbers(RoundShape.of(each), each.take[device], 0),
                    *numbers(RoundShape.of(each), each.put[device], new_rows),
                    each.put[device] is not None,
                )
            ]
            for device in range(row.size)
        ],
        np.int32,
    )
    return jax.make_array_from_callback(
        table.shape, NamedSharding(row, PartitionSpec(ROW)), lambda index: table[index]
    )
