"""Plan a reshard of one array: which parts of the old shards each device needs, and in which rounds
they travel.

Devices form a row. Each holds one *block* of a grid of blocks; devices with the same block are
*replicas*. Rows along the first dimension are numbered, so that layers can be in any slots
(mesh/slots.py) and a vocabulary can have any padding: a row of the new array is the old row with
the same number, or zeros if there was none. A *piece* is everything that one old block contributes
to one new block.

In a *round* every device sends at most one piece and receives at most one, all of the same shape. A
device takes a piece from itself if it has it, else from a replica on its own process, else from any
replica. Replicas share the sending. Each device receives every byte of its new shard exactly once,
and nothing else.

The plan depends only on shapes and shardings, so it is made before anything moves.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
from jax.sharding import Sharding

from optimus_jax.mesh.slots import EMPTY
from optimus_jax.reshard.edge_colouring import Route, route_rounds

if TYPE_CHECKING:
    from jaxlib._jax import Device  # jax.Device, which type checkers take for a variable
else:
    from jax import Device

Index = tuple[int, ...]
RowRange = tuple[int, int]
"""Consecutive rows: (first, count)."""

CopyRange = tuple[int, int, int]
"""Consecutive elements: (start in the old block, start in the new block, length)."""


@dataclass(frozen=True, kw_only=True)
class BlockLayout:
    """How an array is split into blocks over a row of devices.

    An array without dimensions counts as one of shape [1].
    """

    local: Index
    """Shape of a block."""
    blocks: tuple[Index | None, ...]
    """Grid index of each device's block; None if the device has no part of the array."""
    rows: Index | range
    """Number of each row along the first dimension. EMPTY: a row of zeros."""

    @property
    def replicas(self) -> dict[Index, list[int]]:
        """The devices that hold each block."""
        found: dict[Index, list[int]] = {}
        for device, block in enumerate(self.blocks):
            if block is not None:
                found.setdefault(block, []).append(device)
        return found


@lru_cache(maxsize=1 << 12)
def block_layout(
    shape: Index, sharding: Sharding, devices: tuple[Device, ...], rows: Index | None = None
) -> BlockLayout:
    """The blocks of an array of `shape` under `sharding`; rows are numbered in order by default."""
    local, where = sharding.shard_shape(shape), sharding.devices_indices_map(shape)

    def block(device: Device) -> Index | None:
        if device not in where:
            return None
        return tuple(
            (part.start or 0) // size for part, size in zip(where[device], local, strict=True)
        ) or (0,)

    return BlockLayout(
        local=local or (1,),
        blocks=tuple(map(block, devices)),
        rows=rows or range((shape or (1,))[0]),
    )


@dataclass(frozen=True)
class PiecePosition:
    """Position of a piece in a shard."""

    rows: tuple[RowRange, ...]
    """Ranges of rows along the first dimension."""
    starts: Index
    """First index along each other dimension."""


@dataclass(frozen=True, kw_only=True)
class TransferRound:
    """Pieces of one shape that move at the same time."""

    shape: Index
    routes: tuple[Route, ...]
    """All routes, including those from a device to itself; empty if every piece stays on its
    device."""
    take: tuple[PiecePosition | None, ...]
    """The piece that each device sends, in the old shard; None if it sends nothing."""
    put: tuple[PiecePosition | None, ...]
    """The piece that each device receives, in the new shard; None if it receives nothing."""

    @property
    def has_scattered_rows(self) -> bool:
        """Whether the rows of any piece are not consecutive."""
        return any(place is not None and len(place.rows) > 1 for place in (*self.take, *self.put))


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """Rounds that turn the old shards of one array into the new ones."""

    old: Index
    """Shape of an old shard."""
    new: Index
    """Shape of a new shard, which starts as zeros."""
    rounds: tuple[TransferRound, ...]

    @property
    def is_identity(self) -> bool:
        """Whether every new shard equals the old shard of its device."""
        one = self.rounds[0] if len(self.rounds) == 1 else None
        return (
            one is not None
            and not one.routes
            and not one.has_scattered_rows
            and self.old == one.shape == self.new
        )


@dataclass(frozen=True)
class _Piece:
    start: int
    """Device that sends it."""
    end: int
    """Device that receives it."""
    take: PiecePosition
    put: PiecePosition
    shape: Index


@lru_cache(maxsize=1 << 12)
def make_exchange(
    source: BlockLayout,
    target: BlockLayout,
    *,
    processes: tuple[int, ...],
    most: int,
    avoid: frozenset[int] = frozenset(),
) -> Exchange:
    """The rounds that turn one block layout into another.

    Args:
      processes: the process of every device.
      most: maximum number of elements of a piece.
      avoid: devices that send only pieces that no other device has.
    """
    pieces = [
        part for piece in _pieces(source, target, processes, avoid) for part in _cut(piece, most)
    ]
    by_shape: dict[Index, list[_Piece]] = {}
    for piece in _of_equal_rows(pieces):
        by_shape.setdefault(piece.shape, []).append(piece)
    rounds = [
        _round(part, len(processes))
        for shape in sorted(by_shape, key=lambda shape: (-math.prod(shape), shape))
        for among in _staying_apart(by_shape[shape])
        for part in _without_conflict(among)
    ]
    return Exchange(old=source.local, new=target.local, rounds=tuple(rounds))


def _of_equal_rows(pieces: Sequence[_Piece]) -> Iterator[_Piece]:
    """Cut pieces along rows so that pieces of one round have equal shapes.

    A round costs every device the same time, even those that receive nothing, so fewer and fuller
    rounds are better.
    """
    lengths: dict[Index, set[int]] = {}
    for piece in pieces:
        lengths.setdefault(piece.shape[1:], {0}).add(piece.shape[0])
    for piece in pieces:
        for first, last in itertools.pairwise(
            sorted(length for length in lengths[piece.shape[1:]] if length <= piece.shape[0])
        ):
            yield _along(piece, 0, first, last - first)


def _staying_apart(pieces: Sequence[_Piece]) -> list[list[_Piece]]:
    """Separate pieces that stay on their device from those that move.

    This is done only if every receiver has some that stay. Otherwise all are kept in one list,
    which gives fuller rounds.
    """
    staying = [piece for piece in pieces if piece.start == piece.end]
    if {piece.end for piece in staying} != {piece.end for piece in pieces}:
        return [list(pieces)]
    return [staying, [piece for piece in pieces if piece.start != piece.end]]


def _without_conflict(pieces: Sequence[_Piece]) -> list[list[_Piece]]:
    return [
        [pieces[number] for number in part]
        for part in route_rounds([(piece.start, piece.end) for piece in pieces])
    ]


def _round(pieces: Sequence[_Piece], num_devices: int) -> TransferRound:
    """One round of pieces of one shape; no two have the same sender or the same receiver."""
    take: list[PiecePosition | None] = [None] * num_devices
    put: list[PiecePosition | None] = [None] * num_devices
    for piece in pieces:
        take[piece.start], put[piece.end] = piece.take, piece.put
    routes = tuple(sorted((piece.start, piece.end) for piece in pieces))
    moves = any(start != end for start, end in routes)
    return TransferRound(
        shape=pieces[0].shape, routes=routes if moves else (), take=tuple(take), put=tuple(put)
    )


def _pieces(
    source: BlockLayout, target: BlockLayout, processes: Sequence[int], avoid: frozenset[int]
) -> Iterator[_Piece]:
    """Yield every piece of every new shard, each from one device that has it."""
    rows = _DimensionOverlap(source.rows, target.rows, source.local[0], target.local[0])
    dims = [
        _DimensionOverlap(None, None, old, new)
        for old, new in zip(source.local[1:], target.local[1:], strict=True)
    ]
    needs = [
        (
            end,
            (stretches[0], *(old for old, _ in parts)),
            stretches[1],
            [runs[0] for _, runs in parts],
        )
        for end, block in enumerate(target.blocks)
        if block is not None
        for stretches, *parts in itertools.product(
            rows.by_old(block[0]),
            *(dim.by_old(at) for dim, at in zip(dims, block[1:], strict=True)),
        )
    ]
    replicas, busy = source.replicas, [0] * len(processes)
    # pieces that stay come first
    for end, block, stretches, others in sorted(
        needs, key=lambda need: need[0] not in replicas[need[1]]
    ):
        start = min(
            replicas[block],
            key=lambda device, end=end: (
                device in avoid and device != end,
                device != end,
                processes[device] != processes[end],
                busy[device],
                (device - end) % len(processes),
            ),
        )
        piece = _piece(start, end, stretches, others)
        busy[start] += math.prod(piece.shape)
        yield piece


def _piece(
    start: int, end: int, stretches: Sequence[CopyRange], others: Sequence[CopyRange]
) -> _Piece:
    """The piece with these ranges along the first dimension, and one range along each other
    dimension.
    """
    take, put = (
        PiecePosition(
            tuple((run[side], run[2]) for run in stretches), tuple(run[side] for run in others)
        )
        for side in (0, 1)
    )
    return _Piece(
        start, end, take, put, (sum(run[2] for run in stretches), *(run[2] for run in others))
    )


class _DimensionOverlap:
    """Ranges along one dimension that are consecutive both in an old block and in a new one."""

    def __init__(
        self,
        old_rows: Index | range | None,
        new_rows: Index | range | None,
        old_size: int,
        new_size: int,
    ) -> None:
        self._old_size, self._new_size, self._new_rows = old_size, new_size, new_rows
        self._place: np.ndarray | None = None  # position of each row number in the old array
        if old_rows is not None and new_rows is not None:
            numbers = np.array(old_rows)
            self._place = np.full(max(max(old_rows), max(new_rows)) + 1, EMPTY)
            self._place[numbers[numbers != EMPTY]] = np.flatnonzero(numbers != EMPTY)
        self._found: dict[int, list[tuple[int, list[CopyRange]]]] = {}

    def by_old(self, block: int) -> list[tuple[int, list[CopyRange]]]:
        """(old block, ranges that a new block takes from it) pairs; one range each if rows have no
        numbers.
        """
        if block not in self._found:
            by_old: dict[int, list[CopyRange]] = {}
            for old, run in self._runs(block):
                by_old.setdefault(old, []).append(run)
            self._found[block] = list(by_old.items())
        return self._found[block]

    def _runs(self, block: int) -> Iterator[tuple[int, CopyRange]]:
        new = np.arange(block * self._new_size, (block + 1) * self._new_size)
        if self._place is not None:
            numbers = np.array(self._new_rows)[new]
            new = np.where(numbers == EMPTY, EMPTY, self._place[numbers])
        olds = new // self._old_size
        breaks = np.flatnonzero((np.diff(new) != 1) | (np.diff(olds) != 0)) + 1
        for first, last in itertools.pairwise([0, *breaks, len(new)]):
            if new[first] != EMPTY:
                yield (
                    int(olds[first]),
                    (int(new[first] % self._old_size), int(first), int(last - first)),
                )


def _cut(piece: _Piece, most: int) -> Iterator[_Piece]:
    """Split a piece into parts of at most `most` elements, along its outermost non-trivial
    dimension.
    """
    if (size := math.prod(piece.shape)) <= most:
        yield piece
        return
    dim = next(dim for dim, length in enumerate(piece.shape) if length > 1)
    step = max(1, most * piece.shape[dim] // size)
    for first in range(0, piece.shape[dim], step):
        length = min(step, piece.shape[dim] - first)
        yield from _cut(_along(piece, dim, first, length), most)


def _along(piece: _Piece, dim: int, first: int, length: int) -> _Piece:
    """The part of a piece from `first` to `first + length` along dimension `dim`."""
    return replace(
        piece,
        take=_part(piece.take, dim, first, length),
        put=_part(piece.put, dim, first, length),
        shape=(*piece.shape[:dim], length, *piece.shape[dim + 1 :]),
    )


def _part(place: PiecePosition, dim: int, first: int, length: int) -> PiecePosition:
    """The position of that part of a piece."""
    if dim > 0:
        return replace(
            place,
            starts=(*place.starts[: dim - 1], place.starts[dim - 1] + first, *place.starts[dim:]),
        )
    rows, before = [], 0
    for begin, count in place.rows:
        low, high = max(first - before, 0), min(first + length - before, count)
        if low < high:
            rows.append((begin + low, high - low))
        before += count
    return replace(place, rows=tuple(rows))
