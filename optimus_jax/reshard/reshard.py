"""Reshard a whole state from one layout to another.

Layouts may differ in what is split over which mesh axes, in the slots of layers, in the padding of
the vocabulary, and in the devices. Every leaf is moved by compiled programs that send exactly the
pieces that a device lacks (reshard/exchange.py). A leaf with the same shards in both layouts is not
touched. No array is gathered on a device or on the host. Virtual devices of one process share
memory, so their pieces are copied without a program (reshard/host_copies.py).

Memory: leaves move in *groups*. A group's old shards are deleted once its new shards exist. The
additional memory on a device (new shards, and pieces in flight) is at most the budget, or what a
single leaf needs if that is more. Leaves whose shards shrink move first, so a device never holds
more than the larger of the old and the new state plus one group (`Move.way_bytes`).

    move = Move(source, target, budget_bytes=..., devices=...)
    move.compile()                        # may run earlier, in another thread
    for group in move.groups:
        new = move.carry(group, leaves)
        ...verify it...
        move.release(group, leaves, new)

Programs are not awaited one by one, except on a CPU, where many programs in flight exhaust the
threads and deadlock.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from optimus_jax.mesh.sharding import zeros_on
from optimus_jax.reshard.checksum import named_leaves
from optimus_jax.reshard.exchange import (
    BlockLayout,
    Device,
    Exchange,
    Index,
    TransferRound,
    block_layout,
    make_exchange,
)
from optimus_jax.reshard.host_copies import copy_shards, share_memory, zeros_program
from optimus_jax.reshard.memory_kinds import in_memory_of, lies_on_host, on_devices
from optimus_jax.reshard.piece_programs import ROW, RoundShape, piece_offsets, piece_program
from optimus_jax.reshard.restack import is_stacked

PIECE_SHARE = 1 / 8
"""Share of the budget for the pieces of one program. Each exists twice: as sent and as received."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How a state is distributed over devices."""

    leaves: Any
    """The state as jax.ShapeDtypeStructs with NamedShardings."""
    slots: Index
    """The layer in each slot of stacked leaves (mesh/slots.py)."""

    @cached_property
    def named(self) -> dict[str, jax.ShapeDtypeStruct]:
        """The leaves by path."""
        return named_leaves(self.leaves)

    @cached_property
    def devices(self) -> tuple[Device, ...]:
        """Devices of the mesh, in mesh order."""
        sharding = next(iter(self.named.values())).sharding
        assert isinstance(sharding, NamedSharding)
        assert isinstance(sharding.mesh, Mesh)
        return tuple(sharding.mesh.devices.flat)

    def block_layout(self, path: str, devices: tuple[Device, ...]) -> BlockLayout:
        """The blocks of the leaf at a path, over a row of devices."""
        leaf = self.named[path]
        return block_layout(
            tuple(leaf.shape), leaf.sharding, devices, self.slots if is_stacked(path) else None
        )

    def num_bytes(self) -> int:
        """Bytes of the state on one device, without leaves in host memory."""
        return sum(
            math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
            for leaf in self.named.values()
            if not lies_on_host(leaf.sharding)
        )


def row_of_devices(*layouts: Layout) -> tuple[Device, ...]:
    """All devices of the layouts, each once, in the order in which they first appear."""
    return tuple(dict.fromkeys(device for layout in layouts for device in layout.devices))


@dataclass(frozen=True, kw_only=True)
class Group:
    """Leaves that move together."""

    paths: tuple[str, ...]
    way_bytes: int
    """Bytes that a device holds in addition to the state while the group moves."""


class Move:
    """Reshards a state from one layout to another.

    Args:
      source, target: layouts of states with the same paths.
      budget_bytes: bytes that a device may hold in addition to the state. A leaf that needs more
        moves alone.
      avoid: devices to read from only if no other device has the data, such as faulty ones.
    """

    def __init__(
        self,
        source: Layout,
        target: Layout,
        *,
        budget_bytes: int,
        avoid: frozenset[Device] = frozenset(),
    ) -> None:
        assert source.named.keys() == target.named.keys(), "the states are of different models"
        self.source, self.target, self._budget_bytes = source, target, budget_bytes
        self._row, self._target_row = (
            Mesh(np.array(devices), (ROW,))
            for devices in (row_of_devices(source, target), target.devices)
        )
        self._shares_memory = share_memory(row_of_devices(source, target))
        self._avoid = avoid
        self.groups: tuple[Group, ...] = ()

    def compile(self) -> None:
        """Compile all programs, and fill `groups` from the memory that they need.

        Runs no program, but transfers the offset tables to the devices.
        """
        if self._shares_memory:
            for path, leaf in self.target.named.items():
                if not (exchange := self.exchange(path)).is_identity:
                    zeros_program(exchange.new, np.dtype(leaf.dtype), self._target_row)
        way_bytes = {path: self.way_bytes_of(path) for path in self.source.named}
        self.groups = tuple(
            _in_groups(way_bytes, sorted(way_bytes, key=self._growth_bytes), self._budget_bytes)
        )

    @property
    def way_bytes(self) -> int:
        """Maximum bytes that a device holds in addition to the larger of the two states."""
        return max((group.way_bytes for group in self.groups), default=0)

    @property
    def sent_bytes(self) -> int:
        """Bytes that all devices together receive from other devices."""
        return sum(
            math.prod(part.shape) * leaf.dtype.itemsize
            for path, leaf in self.source.named.items()
            for part in self.exchange(path).rounds
            for start, end in part.routes
            if start != end
        )

    def carry(self, group: Group, leaves: Mapping[str, Array]) -> dict[str, Array]:
        """The group's leaves in the new layout, once they are ready. The old leaves still exist."""
        arrived = {}
        for path in group.paths:
            old, asked, exchange = leaves[path], self.target.named[path], self.exchange(path)
            if exchange.is_identity:
                arrived[path] = _as_leaf(_shards(old), asked)  # possibly in another memory kind
                continue
            if self._shares_memory:
                new = copy_shards(
                    _shards(old),
                    exchange,
                    np.dtype(asked.dtype),
                    tuple(self._row.devices.flat),
                    self._target_row,
                )
            else:
                new = _shards(self._sent(path, as_row(old, self._row, exchange.old)))
            arrived[path] = _as_leaf(new, asked)
        return jax.block_until_ready(arrived)

    def release(self, group: Group, leaves: dict[str, Array], arrived: Mapping[str, Array]) -> None:
        """Delete the group's old shards and replace its entries in `leaves` by the new leaves."""
        for path in group.paths:
            if not self.stays(path):  # otherwise the new leaf shares its memory
                leaves[path].delete()
            leaves[path] = arrived[path]

    def run(self, state: Any) -> Any:
        """The whole state in the new layout. The old state is deleted."""
        if not self.groups:
            self.compile()
        leaves = named_leaves(state)
        for group in self.groups:
            self.release(group, leaves, self.carry(group, leaves))
        return self.target_state(leaves)

    def target_state(self, leaves: Mapping[str, Array]) -> Any:
        """The state made of the leaves, which are all in the new layout."""
        return jax.tree.unflatten(
            jax.tree.structure(self.target.leaves), [leaves[path] for path in self.target.named]
        )

    def _sent(self, path: str, row: Array) -> Array:
        """A leaf's new shards, concatenated, computed by compiled programs from the old ones."""
        new, is_cpu = None, self._row.devices.flat[0].platform == "cpu"
        for program, offsets in self._steps(path):
            new = program(row, offsets) if new is None else program(row, offsets, new)
            if is_cpu:
                jax.block_until_ready(new)
        assert new is not None
        return new

    def exchange(self, path: str) -> Exchange:
        """The exchange that turns a leaf's old shards into its new ones."""
        devices = tuple(self._row.devices.flat)
        itemsize = self.source.named[path].dtype.itemsize
        return make_exchange(
            self.source.block_layout(path, devices),
            self.target.block_layout(path, devices),
            processes=tuple(device.process_index for device in devices),
            most=self._piece_bytes // itemsize,
            avoid=frozenset(place for place, device in enumerate(devices) if device in self._avoid),
        )

    @property
    def _piece_bytes(self) -> int:
        return max(1024, int(self._budget_bytes * PIECE_SHARE))

    def _steps(self, path: str) -> "list[tuple[jax.stages.Compiled, Array]]":
        """The programs that move a leaf, in order, each with its table of offsets. The first
        creates the new shards, the others update them.
        """
        exchange, dtype = self.exchange(path), np.dtype(self.source.named[path].dtype)
        return [
            (
                piece_program(
                    tuple(map(RoundShape.of, part)),
                    exchange.old,
                    exchange.new,
                    dtype,
                    self._row,
                    number == 0,
                ),
                piece_offsets(part, exchange.new[0], self._row),
            )
            for number, part in enumerate(
                _parts(exchange.rounds, self._piece_bytes // dtype.itemsize)
            )
        ]

    def scratch_bytes(self, path: str) -> int:
        """Bytes that a device needs for pieces of a leaf, in addition to its old and new shard.

        The compiled programs report them.
        """
        if self._shares_memory or self.exchange(path).is_identity:
            return 0
        analyses = [program.memory_analysis() for program, _ in self._steps(path)]
        return max(0 if analysis is None else analysis.temp_size_in_bytes for analysis in analyses)

    def way_bytes_of(self, path: str) -> int:
        """Bytes that a device needs for moving a leaf, in addition to its old shard."""
        if self.stays(path):
            return 0
        # Shards that come from or go to host memory are in device memory while they are assembled.
        (old_bytes, new_bytes), comes = (
            self._shard_bytes(path),
            lies_on_host(self.source.named[path].sharding),
        )
        return (
            new_bytes
            + (old_bytes if comes and not self.exchange(path).is_identity else 0)
            + self.scratch_bytes(path)
        )

    def stays(self, path: str) -> bool:
        """Whether a leaf keeps its shards and its memory kind."""
        return self.exchange(path).is_identity and lies_on_host(
            self.source.named[path].sharding
        ) == lies_on_host(self.target.named[path].sharding)

    def _shard_bytes(self, path: str) -> tuple[int, int]:
        """Bytes of a leaf's old and new shard."""
        exchange, itemsize = self.exchange(path), self.source.named[path].dtype.itemsize
        return math.prod(exchange.old) * itemsize, math.prod(exchange.new) * itemsize

    def _growth_bytes(self, path: str) -> int:
        """Bytes by which a leaf's part of a device's memory grows; negative if it shrinks."""
        old, new = (
            0 if lies_on_host(layout.named[path].sharding) else size
            for layout, size in zip(
                (self.source, self.target), self._shard_bytes(path), strict=True
            )
        )
        return new - old


def _in_groups(
    way_bytes: Mapping[str, int], order: Sequence[str], budget_bytes: int
) -> list[Group]:
    """Paths in order, grouped greedily within the budget."""
    groups: list[Group] = []
    for path in order:
        if groups and groups[-1].way_bytes + way_bytes[path] <= budget_bytes:
            groups[-1] = Group(
                paths=(*groups[-1].paths, path), way_bytes=groups[-1].way_bytes + way_bytes[path]
            )
        else:
            groups.append(Group(paths=(path,), way_bytes=way_bytes[path]))
    return groups


def _parts(rounds: Sequence[TransferRound], most: int) -> list[tuple[TransferRound, ...]]:
    """Group rounds into programs.

    The pieces of one program may all exist at the same time, so together they have at most `most`
    elements, unless a single round has more.
    """
    parts: list[tuple[TransferRound, ...]] = [()]
    for each in rounds:
        if (
            parts[-1]
            and sum(math.prod(other.shape) for other in parts[-1]) + math.prod(each.shape) > most
        ):
            parts.append(())
        parts[-1] = (*parts[-1], each)
    return parts


def _shards(leaf: Array) -> dict[Device, Array]:
    return {shard.device: shard.data for shard in leaf.addressable_shards}


def as_row(leaf: Array, row: Mesh, local: Index) -> Array:
    """A leaf's shards concatenated, [devices * local[0], ...], with zeros for devices without one.

    Shares the leaf's memory if that is device memory.
    """
    shards = _shards(leaf)
    parts = [
        on_devices(_in_shape(shards[device], local))
        if device in shards
        else zeros_on(device, local, leaf.dtype)
        for device in row.devices.flat
        if device.process_index == jax.process_index()
    ]
    return jax.make_array_from_single_device_arrays(
        (row.size * local[0], *local[1:]), NamedSharding(row, PartitionSpec(ROW)), parts
    )


def _as_leaf(shards: Mapping[Device, Array], asked: jax.ShapeDtypeStruct) -> Array:
    """The leaf made of these shards. Shards on devices that are not in its sharding are ignored."""
    local = asked.sharding.shard_shape(asked.shape)
    return jax.make_array_from_single_device_arrays(
        asked.shape,
        asked.sharding,
        [
            in_memory_of(_in_shape(shards[device], local), asked.sharding)
            for device in asked.sharding.addressable_devices
        ],
    )


def _in_shape(shard: Array, shape: Index) -> Array:
    """The shard in `shape`, which may differ from its own only for a single element ([] or [1])."""
    return shard if shard.shape == shape else shard.reshape(shape)
