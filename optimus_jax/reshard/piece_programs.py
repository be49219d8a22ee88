"""The programs that carry pieces of a leaf from old shards to new ones (reshard/exchange.py), a
device's part in each.

A program depends on shapes and on who sends to whom. Where on a device its pieces lie it is told by
a table of numbers, so that one program serves leaves, and layouts, that are alike in the rest.
"""

from dataclasses import dataclass
from functools import lru_cache, partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from optimus_jax.mesh.compiler import compiler_options
from optimus_jax.reshard.edge_colouring import Route
from optimus_jax.reshard.exchange import Index, Place, Round

ROW = "device"
"""The only axis of the mesh on which shards are exchanged, whatever meshes they come from and go
to."""


@dataclass(frozen=True)
class Kind:
    """What the program of a round depends on; where its pieces lie is told to it."""

    shape: Index
    routes: tuple[Route, ...]
    is_scattered: bool
    is_for_all: bool
    """Whether something arrives on every device."""

    @classmethod
    def of(cls, part: Round) -> "Kind":
        return cls(part.shape, part.routes, part.is_scattered, None not in part.put)

    @property
    def num_places(self) -> int:
        """Numbers that tell a device where one piece lies."""
        return (self.shape[0] if self.is_scattered else 1) + len(self.shape) - 1


@lru_cache(maxsize=1 << 11)
def piece_program(
    kinds: tuple[Kind, ...], old: Index, new: Index, dtype: np.dtype, row: Mesh, is_first: bool
) -> jax.stages.Compiled:
    """(old shards, places, new shards unless it is the first) -> new shards.

    Leaves that are alike share it.
    """

    def rows(shape: Index, kind: np.dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(
            (row.size * shape[0], *shape[1:]), kind, sharding=NamedSharding(row, PartitionSpec(ROW))
        )

    num_places = sum(2 * kind.num_places + 1 for kind in kinds)
    given = (
        rows(old, dtype),
        rows((1, num_places), np.dtype(np.int32)),
        *(() if is_first else (rows(new, dtype),)),
    )
    return _carried.lower(*given, kinds=kinds, row=row, shape=new).compile(
        {**compiler_options(row)}
    )


@partial(jax.jit, static_argnames=("kinds", "row", "shape"), donate_argnums=2)
def _carried(
    old: Array,
    places: Array,
    new: Array | None = None,
    *,
    kinds: tuple[Kind, ...],
    row: Mesh,
    shape: Index,
) -> Array:
    """Old shards [devices * old[0], ...] and what there is of the new ones -> new ones with the
    pieces of some rounds.
    """

    def on_device(old: Array, places: Array, *before: Array) -> Array:
        new = before[0] if before else lax.pcast(jnp.zeros(shape, old.dtype), (ROW,), to="varying")
        first = 0
        for kind in kinds:
            last = first + 2 * kind.num_places + 1
            new = _with_piece(kind, old, new, places[0, first:last])
            first = last
        return new

    given = (old, places) if new is None else (old, places, new)
    return jax.shard_map(
        on_device, mesh=row, in_specs=PartitionSpec(ROW), out_specs=PartitionSpec(ROW)
    )(*given)


def _with_piece(kind: Kind, old: Array, new: Array, places: Array) -> Array:
    """A device's new shard with what one round brings."""
    take, put, arrives = places[: kind.num_places], places[kind.num_places : -1], places[-1]
    piece = old
    if kind.is_scattered:
        piece = (
            _columns(piece, take, kind.shape)
            .at[take[: kind.shape[0]]]
            .get(mode="promise_in_bounds")
        )
    elif kind.shape != old.shape:
        piece = lax.dynamic_slice(old, tuple(take), kind.shape)
    if kind.routes:
        piece = lax.ppermute(piece, ROW, kind.routes)
    if kind.is_scattered:
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
    """All rows of a shard, but along other dimensions only what a piece has."""
    if shard.shape[1:] == shape[1:]:
        return shard
    return lax.dynamic_slice(shard, (0, *place[shape[0] :]), (shard.shape[0], *shape[1:]))


@lru_cache(maxsize=1 << 10)
def places(part: tuple[Round, ...], new_rows: int, row: Mesh) -> Array:
    """int32 [devices, numbers]: for every round, where a device's piece lies in the old shard and
    in the new one, and whether any arrives.
    """

    def numbers(kind: Kind, place: Place | None, none: int) -> list[int]:
        if place is None:
            return (
                [none] * kind.shape[0] + [0] * (len(kind.shape) - 1)
                if kind.is_scattered
                else [0] * len(kind.shape)
            )
        rows = [row for first, count in place.rows for row in range(first, first + count)]
        return [*(rows if kind.is_scattered else rows[:1]), *place.starts]

    table = np.array(
        [
            [
                number
                for each in part
                for number in (
                    *numbers(Kind.of(each), each.take[device], 0),
                    *numbers(Kind.of(each), each.put[device], new_rows),
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
