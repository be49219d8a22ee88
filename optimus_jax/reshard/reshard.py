"""Move a whole state from one layout to another: the only place that does.

Layouts differ in what is split over which mesh axes, in the slots that layers lie in, in the
padding of the vocabulary, and perhaps in the devices themselves. Every leaf moves by compiled
programs that send exactly the pieces which a device lacks (reshard/exchange.py); a leaf that lies
alike under both layouts is not touched. No array is made whole on the way, on a device or on the
host. Virtual devices of one process have one memory, in which pieces are copied without any program
(reshard/host_copies.py).

Memory: leaves move in *groups*. A group's old shards are deleted when its new ones are there, and
what a device holds besides (new shards, and pieces on the way) is at most the budget, or what a
single leaf takes if that is more. Leaves whose shards shrink come first: then at no time does a
device hold more than the larger of old and new state, plus one group (`Move.way_bytes`).

    move = Move(source, target, budget_bytes=..., devices=...)
    move.compile()                        # may be done in another thread, long before
    for group in move.groups: new = move.carry(group, leaves); ...look at it...; move.release(group,
    leaves, new)

Several programs at once would be quicker to send, but on a CPU they run out of threads and wait for
one another for ever: there each is waited for.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from optimus_jax.reshard.checksum import named_leaves
from optimus_jax.reshard.exchange import Device, Exchange, Index, Lying, Round, lying, make_exchange
from optimus_jax.reshard.host_copies import blank_program, copied, have_one_memory
from optimus_jax.reshard.memory_kinds import in_memory_of, lies_on_host, on_devices
from optimus_jax.reshard.piece_programs import ROW, Kind, piece_program, places
from optimus_jax.reshard.restack import is_stacked

PIECE_SHARE = 1 / 8
"""Of the budget, for the pieces of one program: they are there twice, sent and received."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How a state lies on devices."""

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
        """Of the mesh, in its order."""
        sharding = next(iter(self.named.values())).sharding
        assert isinstance(sharding, NamedSharding)
        assert isinstance(sharding.mesh, Mesh)
        return tuple(sharding.mesh.devices.flat)

    def lying(self, path: str, devices: tuple[Device, ...]) -> Lying:
        """How the leaf of a path lies on a row of devices."""
        leaf = self.named[path]
        return lying(
            tuple(leaf.shape), leaf.sharding, devices, self.slots if is_stacked(path) else None
        )

    def num_bytes(self) -> int:
        """Of the whole state on one device; what lies in the host's memory does not count."""
        return sum(
            math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
            for leaf in self.named.values()
            if not lies_on_host(leaf.sharding)
        )


def row_of_devices(*layouts: Layout) -> tuple[Device, ...]:
    """Every device of the layouts once: those of the first in its order, then those that only
    others have.
    """
    return tuple(dict.fromkeys(device for layout in layouts for device in layout.devices))


@dataclass(frozen=True, kw_only=True)
class Group:
    """Leaves that move together."""

    paths: tuple[str, ...]
    way_bytes: int
    """That a device holds besides the state while they move."""


class Move:
    """The way of a state from one layout to another.

    Args:
      source, target: layouts of states with the same paths.
      budget_bytes: that a device may hold besides the state on the way; a leaf that takes more
        moves alone.
      avoid: devices, reported bad perhaps, from which only is read what no other device has.
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
        self._is_one_memory = have_one_memory(row_of_devices(source, target))
        self._avoid = avoid
        self.groups: tuple[Group, ...] = ()

    def compile(self) -> None:
        """Compile every program that is needed; only then is it known what they need, and `groups`
        is filled.

        Runs nothing, but puts the tables that programs are told by onto the devices.
        """
        if self._is_one_memory:
            for path, leaf in self.target.named.items():
                if not (exchange := self.exchange(path)).is_nothing:
                    blank_program(exchange.new, np.dtype(leaf.dtype), self._target_row)
        way_bytes = {path: self.way_bytes_of(path) for path in self.source.named}
        self.groups = tuple(
            _in_groups(way_bytes, sorted(way_bytes, key=self._growth_bytes), self._budget_bytes)
        )

    @property
    def way_bytes(self) -> int:
        """The most that a device holds besides the larger of the two states."""
        return max((group.way_bytes for group in self.groups), default=0)

    @property
    def sent_bytes(self) -> int:
        """That all devices together get from others."""
        return sum(
            math.prod(part.shape) * leaf.dtype.itemsize
            for path, leaf in self.source.named.items()
            for part in self.exchange(path).rounds
            for start, end in part.routes
            if start != end
        )

    def carry(self, group: Group, leaves: Mapping[str, Array]) -> dict[str, Array]:
        """The group's leaves in the new layout, finished. The old ones are still there."""
        arrived = {}
        for path in group.paths:
            old, asked, exchange = leaves[path], self.target.named[path], self.exchange(path)
            if exchange.is_nothing:
                arrived[path] = _as_leaf(_shards(old), asked)  # in another memory perhaps
                continue
            if self._is_one_memory:
                new = copied(
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
        """Delete the group's old shards and put the new leaves in their place in `leaves`."""
        for path in group.paths:
            if not self.stays(path):  # otherwise both are the same memory
                leaves[path].delete()
            leaves[path] = arrived[path]

    def run(self, state: Any) -> Any:
        """The whole state in the new layout. The old one is given up."""
        if not self.groups:
            self.compile()
        leaves = named_leaves(state)
        for group in self.groups:
            self.release(group, leaves, self.carry(group, leaves))
        return self.target_state(leaves)

    def target_state(self, leaves: Mapping[str, Array]) -> Any:
        """The leaves, all in the new layout, as a state."""
        return jax.tree.unflatten(
            jax.tree.structure(self.target.leaves), [leaves[path] for path in self.target.named]
        )

    def _sent(self, path: str, row: Array) -> Array:
        """A leaf's shards, one after the other, as programs make them of the old ones."""
        new, is_cpu = None, self._row.devices.flat[0].platform == "cpu"
        for program, told in self._steps(path):
            new = program(row, told) if new is None else program(row, told, new)
            if is_cpu:
                jax.block_until_ready(new)
        assert new is not None
        return new

    def exchange(self, path: str) -> Exchange:
        """How the shards of a leaf become its new ones."""
        devices = tuple(self._row.devices.flat)
        itemsize = self.source.named[path].dtype.itemsize
        return make_exchange(
            self.source.lying(path, devices),
            self.target.lying(path, devices),
            processes=tuple(device.process_index for device in devices),
            most=self._piece_bytes // itemsize,
            avoid=frozenset(place for place, device in enumerate(devices) if device in self._avoid),
        )

    @property
    def _piece_bytes(self) -> int:
        return max(1024, int(self._budget_bytes * PIECE_SHARE))

    def _steps(self, path: str) -> "list[tuple[jax.stages.Compiled, Array]]":
        """The programs that move a leaf one after the other, and what each is told: the first makes
        new shards, others add to them.
        """
        exchange, dtype = self.exchange(path), np.dtype(self.source.named[path].dtype)
        return [
            (
                piece_program(
                    tuple(map(Kind.of, part)),
                    exchange.old,
                    exchange.new,
                    dtype,
                    self._row,
                    number == 0,
                ),
                places(part, exchange.new[0], self._row),
            )
            for number, part in enumerate(
                _parts(exchange.rounds, self._piece_bytes // dtype.itemsize)
            )
        ]

    def scratch_bytes(self, path: str) -> int:
        """That a device needs for pieces of a leaf, beside its old shard and its new one; as the
        compiled programs say.
        """
        if self._is_one_memory or self.exchange(path).is_nothing:
            return 0
        analyses = [program.memory_analysis() for program, _ in self._steps(path)]
        return max(0 if analysis is None else analysis.temp_size_in_bytes for analysis in analyses)

    def way_bytes_of(self, path: str) -> int:
        """That a device needs for a leaf, beside its old shard."""
        if self.stays(path):
            return 0
        # What comes from the host's memory, or goes there, lies on the device while it is put
        # together.
        (old_bytes, new_bytes), comes = (
            self._shard_bytes(path),
            lies_on_host(self.source.named[path].sharding),
        )
        return (
            new_bytes
            + (old_bytes if comes and not self.exchange(path).is_nothing else 0)
            + self.scratch_bytes(path)
        )

    def stays(self, path: str) -> bool:
        """Whether a leaf lies as it did, in the same memory."""
        return self.exchange(path).is_nothing and lies_on_host(
            self.source.named[path].sharding
        ) == lies_on_host(self.target.named[path].sharding)

    def _shard_bytes(self, path: str) -> tuple[int, int]:
        """Of a leaf's old and new shard."""
        exchange, itemsize = self.exchange(path), self.source.named[path].dtype.itemsize
        return math.prod(exchange.old) * itemsize, math.prod(exchange.new) * itemsize

    def _growth_bytes(self, path: str) -> int:
        """That a device holds more of a leaf afterwards."""
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
    """Paths in order, as many together as the budget allows."""
    groups: list[Group] = []
    for path in order:
        if groups and groups[-1].way_bytes + way_bytes[path] <= budget_bytes:
            groups[-1] = Group(
                paths=(*groups[-1].paths, path), way_bytes=groups[-1].way_bytes + way_bytes[path]
            )
        else:
            groups.append(Group(paths=(path,), way_bytes=way_bytes[path]))
    return groups


def _parts(rounds: Sequence[Round], most: int) -> list[tuple[Round, ...]]:
    """Rounds dealt out to programs, whose pieces may all be there at the same time: `most`
    elements, but one at least.
    """
    parts: list[tuple[Round, ...]] = [()]
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
    """A leaf's shards one after the other [devices * local[0], ...], zeros from devices that have
    none; the same memory, if that is the devices'.
    """
    shards = _shards(leaf)
    parts = [
        on_devices(_in_shape(shards[device], local))
        if device in shards
        else jnp.zeros(local, leaf.dtype, device=device)
        for device in row.devices.flat
        if device.process_index == jax.process_index()
    ]
    return jax.make_array_from_single_device_arrays(
        (row.size * local[0], *local[1:]), NamedSharding(row, PartitionSpec(ROW)), parts
    )


def _as_leaf(shards: Mapping[Device, Array], asked: jax.ShapeDtypeStruct) -> Array:
    """The leaf whose shards these are, and perhaps others which nobody asks for."""
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
    """The same memory, but for an array of one element, [] or [1]."""
    return shard if shard.shape == shape else shard.reshape(shape)
