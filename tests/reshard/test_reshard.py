"""A resharded state is the same bit for bit on every device, between any two plans; and little of
it exists twice on the way.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from plans import build, case
from switch_cases import (
    MODEL,
    PLANS,
    a_state,
    assert_is_the_state,
    bits_of,
    built,
    compiled_quickly,
    copied,
    layout_of,
    next_of,
)
from test_exchange import exchanged_in_numpy

from optimus_jax.reshard import piece_programs, reshard
from optimus_jax.reshard.checksum import checksums, named_leaves
from optimus_jax.reshard.reshard import Layout, Move, row_of_devices
from optimus_jax.reshard.shard_sums import ReplicasDifferError, ShardSums
from optimus_jax.training.state import to_stored

BUDGET_BYTES = 2**20


@pytest.fixture(scope="module", autouse=True)
def quickly():
    """Moves between many plans share programs."""
    with compiled_quickly():
        yield


@pytest.fixture(params=["programs", "one memory"])
def way(request, monkeypatch):
    """How pieces are moved: sent by programs, as between real devices, or copied, as between the
    virtual devices of a process.
    """
    sends = request.param == "programs"
    if sends:
        by_programs(monkeypatch)
    return sends


def by_programs(monkeypatch):
    monkeypatch.setattr(reshard, "share_memory", lambda devices: False)


def layout(name):
    return layout_of(built(name).program)


@pytest.mark.parametrize(
    ("way", "places"),
    [
        # Each plan is source and target once or three times. A pair takes a second or two to
        # compile with programs; the next test simulates every pair in NumPy.
        pytest.param("programs", (5,), id="programs-one"),
        pytest.param("one memory", (1, 5, 9), id="one memory-three"),
        *(
            pytest.param(way, range(1, len(PLANS)), id=f"{way}-all", marks=pytest.mark.nightly)
            for way in ("programs", "one memory")
        ),
    ],
    indirect=["way"],
)
@pytest.mark.parametrize("name", PLANS)
def test_state_resharded_to_other_plans_is_the_same(name, places, way):
    source = layout(name)
    state = a_state(source)
    for other in next_of(name, places):
        target = layout(other)
        move = Move(source, target, budget_bytes=BUDGET_BYTES)
        old = copied(state)
        assert_is_the_state(move.run(old), target)
        for path, leaf in named_leaves(old).items():
            assert leaf.is_deleted() != move.stays(path), path


def shards_of(layout, devices):
    """What every device holds of every leaf, as uint32."""
    found = {}
    for path, bits in bits_of(layout).items():
        leaf = layout.named[path]
        where, local = (
            leaf.sharding.devices_indices_map(leaf.shape),
            layout.block_layout(path, devices).local,
        )
        found[path] = [bits[where[device]].reshape(local) for device in devices]
    return found


@pytest.mark.parametrize("name", PLANS)
def test_exchanges_between_every_pair_give_the_new_shards(name):
    """For every ordered pair of plans, simulated by indexing; and the layouts differ."""
    source = layout(name)
    devices = row_of_devices(source)
    held = shards_of(source, devices)
    for other in PLANS:
        if other == name:
            continue
        target = layout(other)
        move = Move(source, target, budget_bytes=BUDGET_BYTES)
        expected, num_moved = shards_of(target, devices), 0
        for path in source.named:
            exchange = move.exchange(path)
            num_moved += not exchange.is_identity
            for new, shard in zip(
                exchanged_in_numpy(exchange, held[path]), expected[path], strict=True
            ):
                np.testing.assert_array_equal(new, shard, err_msg=f"{name} -> {other}: {path}")
        assert num_moved > 0, f"{name} and {other} lie alike"


def live_bytes():
    """Bytes of all arrays on the device that holds most; memory that several arrays share counts
    once."""
    buffers = {
        (shard.device, shard.data.unsafe_buffer_pointer()): shard.data.nbytes
        for array in jax.live_arrays()
        for shard in array.addressable_shards
    }
    by_device = {device: 0 for device, _ in buffers}
    for (device, _), num_bytes in buffers.items():
        by_device[device] += num_bytes
    return max(by_device.values())


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("fsdp, zero 3", "data"),
        ("data", "fsdp, zero 3"),
        ("interleaved, zero 1", "data x tensor, vocabulary whole"),
        ("eight stages, uneven", "feed-forward over tensor, attention not, zero 3"),
    ],
)
def test_no_device_holds_more_than_the_state_and_the_budget(name, other, way):
    """Arrays are counted when a group's old shards are still there; scratch space of programs is
    what XLA says.
    """
    source, target = layout(name), layout(other)
    before = live_bytes()
    leaves = named_leaves(a_state(source))
    largest = max(map(Move(source, target, budget_bytes=2**17).way_bytes_of, leaves))
    move = Move(source, target, budget_bytes=largest)
    move.compile()
    assert len(move.groups) > 1, "a state in one group would be there twice"
    assert sum(len(group.paths) for group in move.groups) == len(leaves)
    peak = 0
    for group in move.groups:
        arrived = move.carry(group, leaves)
        scratch = max(move.scratch_bytes(path) for path in group.paths)
        peak = max(peak, live_bytes() + scratch - before)
        move.release(group, leaves, arrived)
        del arrived
    # of tables that tell programs where pieces lie, which are kept for the move back
    places_bytes = 8192
    state_bytes = max(source.num_bytes(), target.num_bytes())
    assert peak <= state_bytes + largest + places_bytes
    assert peak > state_bytes, "old and new shards of a group were counted"


def test_reshard_between_vocabulary_paddings_on_six_devices(way):
    pipelined, data_parallel = (
        layout_of(build(MODEL, each).program)
        for each in (
            case("pipe=3,tensor=2", microbatches=3, layers_per_stage=(2, 5, 3)),
            case("data=6"),
        )
    )
    table = "params/head/table"
    assert pipelined.named[table].shape != data_parallel.named[table].shape
    state = Move(pipelined, data_parallel, budget_bytes=BUDGET_BYTES).run(a_state(pipelined))
    assert_is_the_state(state, data_parallel)
    assert_is_the_state(
        Move(data_parallel, pipelined, budget_bytes=BUDGET_BYTES).run(state), pipelined
    )


def test_reshard_to_fewer_devices_and_back(way):
    """Two of eight devices leave and come back; what another device has is not read from them."""
    eight, six = (
        layout("data x fsdp, zero 1"),
        layout_of(build(MODEL, case("fsdp=3,tensor=2", zero=2)).program),
    )
    lost = frozenset(jax.devices()[6:])
    move = Move(eight, six, budget_bytes=BUDGET_BYTES, avoid=lost)
    state = move.run(a_state(eight))
    assert_is_the_state(state, six)
    assert not lost & {device for leaf in jax.tree.leaves(state) for device in leaf.devices()}
    assert_is_the_state(Move(six, eight, budget_bytes=BUDGET_BYTES).run(state), eight)


def test_reshard_to_the_same_plan_moves_nothing():
    source = layout("tensor")
    state = a_state(source)
    before = piece_programs.piece_program.cache_info()
    move = Move(source, source, budget_bytes=BUDGET_BYTES)
    moved = move.run(state)
    assert (move.way_bytes, move.sent_bytes) == (0, 0)
    assert piece_programs.piece_program.cache_info() == before, "no program is asked for"
    for old, new in zip(jax.tree.leaves(state), jax.tree.leaves(moved), strict=True):
        assert [shard.data.unsafe_buffer_pointer() for shard in old.addressable_shards] == [
            shard.data.unsafe_buffer_pointer() for shard in new.addressable_shards
        ]


@pytest.mark.parametrize(
    "name",
    [
        "data",
        "interleaved, uneven, zero 3",
        "eight stages, uneven",
        "attention over tensor, feed-forward not",
    ],
)
def test_shard_sums_equal_the_checksums_of_checkpoints(name):
    """So they are the same under every plan."""
    program = built(name).program
    source = layout_of(program)
    state = a_state(source)
    sums = ShardSums(source).of(named_leaves(state), source.named)
    assert sums == checksums(
        to_stored(state, program.shapes, program.plan, program.state_shardings)
    )


def test_replica_that_differs_on_one_device_is_found():
    source = layout("data")
    leaves = named_leaves(a_state(source))
    path, sums = "params/final_norm/scale", ShardSums(source)
    shards = [shard.data for shard in leaves[path].addressable_shards]
    shards[5] = jax.device_put(np.asarray(shards[5]) + np.float32(1), shards[5].device)
    wrong = jax.make_array_from_single_device_arrays(
        leaves[path].shape, leaves[path].sharding, shards
    )
    sums.of(leaves, [path])
    with pytest.raises(ReplicasDifferError, match=r"final_norm.*devices 0 and 5"):
        sums.of(leaves | {path: wrong}, [path])


def test_any_bit_in_an_empty_slot_changes_the_sum():
    source = layout("gpipe, uneven")
    leaves = named_leaves(a_state(source))
    path, empty = "params/layers/mlp_norm/scale", source.slots.index(-1)
    wrong = jax.jit(lambda leaf: leaf.at[empty, 3].set(1e-30), out_shardings=leaves[path].sharding)(
        leaves[path]
    )
    assert ShardSums(source).of(leaves, [path]) != ShardSums(source).of({path: wrong}, [path])


def test_a_large_leaf_moves_in_pieces_of_the_budget(monkeypatch):
    """By several programs, each of which needs little memory: a sixteenth of the shard here."""
    by_programs(monkeypatch)
    mesh = jax.make_mesh((8,), ("a",), axis_types=(AxisType.Auto,))
    whole, split = (
        Layout(
            leaves={
                "w": jax.ShapeDtypeStruct(
                    (64, 4096), jnp.float32, sharding=NamedSharding(mesh, spec)
                )
            },
            slots=(),
        )
        for spec in (P(), P("a"))
    )
    shard_bytes = 64 * 4096 * 4
    move = Move(split, whole, budget_bytes=shard_bytes // 2)
    move.compile()
    assert len(move._steps("w")) >= 7
    assert move.scratch_bytes("w") <= shard_bytes / 8 + 1024
    values = np.random.default_rng(0).normal(size=(64, 4096)).astype(np.float32)
    moved = move.run({"w": jax.device_put(values, split.leaves["w"].sharding)})["w"]
    assert all(np.array_equal(np.asarray(shard.data), values) for shard in moved.addressable_shards)
