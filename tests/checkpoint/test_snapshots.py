"""Snapshots in host memory: bit for bit onto any mesh, complete or not at all, two generations."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import host_leaves
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from optimus_jax.checkpoint import snapshot_files as files
from optimus_jax.checkpoint import snapshots as snapshots_module
from optimus_jax.checkpoint.snapshots import Snapshots, bytes_of_host
from optimus_jax.errors import CheckpointError, ConfigError
from optimus_jax.reshard.checksum import named_leaves

METADATA = {"plan": "p", "next_step": 5}
SPECS = {
    "table": PartitionSpec("x", "y"),
    "bias": PartitionSpec("y"),
    "half": PartitionSpec(None, "x"),
    "step": PartitionSpec(),
}
OTHER_SPECS = {
    "table": PartitionSpec("y"),
    "bias": PartitionSpec(("x", "y")),
    "half": PartitionSpec("y", "x"),
    "step": PartitionSpec(),
}


def mesh(*sizes):
    return jax.make_mesh(
        sizes,
        ("x", "y"),
        devices=jax.devices()[: sizes[0] * sizes[1]],
        axis_types=(AxisType.Auto,) * 2,
    )


def host_state(seed=0, rows=16):
    """Numbers of every kind, among them those that a sum would change."""
    draw = np.random.default_rng(seed)
    table = draw.standard_normal((rows, 8)).astype(np.float32)
    table[0, :4] = [-0.0, np.nan, np.inf, 1e-42]
    table[12:] = 0
    return {
        "table": table,
        "bias": draw.standard_normal(8).astype(np.float32),
        "half": jnp.asarray(draw.standard_normal((4, 4)), jnp.bfloat16),
        "step": np.int32(seed),
    }


def placed(state, on, specs=SPECS):
    return {
        name: jax.device_put(leaf, NamedSharding(on, specs[name])) for name, leaf in state.items()
    }


def abstract(state, on, specs=SPECS):
    return {
        name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(on, specs[name]))
        for name, leaf in state.items()
    }


def assert_same_bits(actual, expected):
    actual, expected = host_leaves(actual), host_leaves(expected)
    assert actual.keys() == expected.keys()
    for path, leaf in expected.items():
        assert actual[path].tobytes() == leaf.tobytes(), path


@pytest.fixture
def warned():
    return []


@pytest.fixture
def snapshots(tmp_path, warned):
    made = Snapshots(
        tmp_path / "memory", tmp_path / "run", "1.0", 5, warn=warned.append, warn_here=warned.append
    )
    (tmp_path / "memory").mkdir()
    made.prepare(bytes_of_host(placed(host_state(), mesh(4, 2))))
    yield made
    made.close()


def take(snapshots, *steps):
    for step in steps:
        snapshots.take(
            step, placed(host_state(step), mesh(4, 2)), METADATA | {"next_step": step + 1}
        )
    snapshots.wait()


@pytest.mark.parametrize(
    ("sizes", "specs"),
    [((4, 2), SPECS), ((2, 4), OTHER_SPECS), ((2, 2), SPECS), ((1, 1), OTHER_SPECS)],
    ids=str,
)
def test_snapshot_is_restored_bit_for_bit_on_any_mesh(snapshots, sizes, specs):
    take(snapshots, 5)
    target = abstract(host_state(), mesh(*sizes), specs)
    found = snapshots.restore(target, 4)
    assert (found.step, found.metadata) == (5, METADATA | {"next_step": 6})
    assert_same_bits(found.state, host_state(5))
    assert {name: leaf.sharding for name, leaf in found.state.items()} == {
        name: leaf.sharding for name, leaf in target.items()
    }


def test_state_may_be_donated_once_its_snapshot_is_taken(snapshots):
    state = placed(host_state(5), mesh(4, 2))
    snapshots.take(5, state, METADATA)
    after = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf * 0, tree), donate_argnums=0)(state)
    jax.block_until_ready(after)
    assert_same_bits(restore_newest(snapshots).state, host_state(5))


def restore_newest(snapshots, newer_than=0):
    snapshots.wait()
    return snapshots.restore(abstract(host_state(), mesh(4, 2)), newer_than)


def test_rows_of_padding_are_added_and_cropped(snapshots):
    take(snapshots, 5)
    for rows in (12, 24):
        target = abstract(host_state(), mesh(4, 1))
        target["table"] = jax.ShapeDtypeStruct(
            (rows, 8), np.float32, sharding=target["table"].sharding
        )
        found = snapshots.restore(target, 0, paddable=lambda path: path == "table")
        expected = np.zeros((rows, 8), np.float32)
        expected[: min(rows, 16)] = host_state(5)["table"][:rows]
        assert np.asarray(found.state["table"]).tobytes() == expected.tobytes()


def test_rows_that_are_not_padding_are_not_cropped(snapshots, warned):
    take(snapshots, 5)
    target = abstract(host_state(), mesh(4, 1))
    target["table"] = jax.ShapeDtypeStruct((8, 8), np.float32, sharding=target["table"].sharding)
    assert snapshots.restore(target, 0, paddable=lambda path: path == "table") is None
    assert "are not padding" in warned[0]


def test_two_generations_stay_and_the_newest_is_restored(snapshots):
    take(snapshots, 5, 10, 15, 20)
    assert files.steps(snapshots.root) == [10, 15, 20], (
        "the third goes when the next is taken, for others may not have this one yet"
    )
    assert restore_newest(snapshots).step == 20
    assert restore_newest(snapshots, newer_than=20) is None


def test_snapshot_begun_by_another_process_deletes_no_older_one(snapshots):
    """It finished the step a little earlier: only the two before are known to be complete."""
    take(snapshots, 5, 10)
    files.write(snapshots.root, 15, 1, METADATA, {}, [])
    take(snapshots, 15)
    assert files.steps(snapshots.root) == [5, 10, 15]


def damage(path, how):
    content = path.read_bytes()
    if how == "removed":
        path.unlink()
    elif how == "cut":
        path.write_bytes(content[:-1])
    else:
        path.write_bytes(bytes([content[0] ^ 1]) + content[1:])


@pytest.mark.parametrize("name", ["0.bin", "0.json"])
@pytest.mark.parametrize("how", ["removed", "cut", "turned"])
def test_damaged_snapshot_is_skipped_with_a_warning(snapshots, warned, name, how):
    take(snapshots, 5, 10)
    damage(snapshots.root / "10" / name, how)
    found = restore_newest(snapshots)
    assert found.step == 5
    assert_same_bits(found.state, host_state(5))
    assert "the snapshot of step 10 is skipped" in warned[0]


def test_snapshot_without_a_manifest_does_not_count(snapshots, monkeypatch):
    """A process that dies while it writes has written no manifest."""
    take(snapshots, 5)
    monkeypatch.setattr(files.os, "replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        files.write(snapshots.root, 10, 0, METADATA, {}, [])
    monkeypatch.undo()
    assert restore_newest(snapshots).step == 5


def test_failed_write_is_a_warning_and_keeps_older_snapshots(snapshots, warned, monkeypatch):
    take(snapshots, 5)
    monkeypatch.setattr(
        files,
        "_write_all",
        lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")),
    )
    take(snapshots, 10, 15, 20)
    assert (
        "could not be written: No space left on device; the run continues without it" in warned[0]
    )
    assert files.steps(snapshots.root) == [5], (
        "what could not be written does not push out what could"
    )
    assert restore_newest(snapshots).step == 5


def test_room_for_snapshots_is_checked_at_the_start(snapshots, monkeypatch):
    monkeypatch.setattr(
        snapshots_module.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 1000})
    )
    with pytest.raises(
        ConfigError, match=r"no room for snapshots(.|\n)*3 times(.|\n)*snapshot_every=0"
    ):
        snapshots.prepare(bytes_of_host(placed(host_state(), mesh(4, 2))))


@pytest.mark.parametrize("before", ["root", "parent"])
def test_parent_directory_removed_by_another_run_is_made_again(tmp_path, monkeypatch, before):
    """The last run to end removes it while this one starts: before the root is made in it, or right
    after it was made.
    """
    snapshots = Snapshots(tmp_path, tmp_path / "run", "1.0", 5)
    parent, mkdir, removed = snapshots.root.parent, Path.mkdir, []

    def make(path, **options):
        if path == snapshots.root and before == "root" and not removed:
            removed.append(parent.rmdir())
        mkdir(path, **options)
        if path == parent and before == "parent" and not removed:
            removed.append(parent.rmdir())

    monkeypatch.setattr(Path, "mkdir", make)
    snapshots.prepare(0)
    assert snapshots.root.is_dir()
    assert removed


def test_missing_snapshot_directory_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match=r"snapshots cannot be written(.|\n)*No such file"):
        Snapshots(tmp_path / "memory", tmp_path / "run", "1.0", 5).prepare(0)


def test_snapshot_of_another_model_is_an_error(snapshots):
    take(snapshots, 5)
    target = abstract(host_state(), mesh(4, 2))
    target["bias"] = jax.ShapeDtypeStruct((16,), np.float32, sharding=target["bias"].sharding)
    with pytest.raises(CheckpointError, match="of another model: leaf 'bias' differs"):
        snapshots.restore(target, 0)


def test_another_run_in_the_same_directory_finds_no_snapshot(snapshots, tmp_path):
    take(snapshots, 5)
    other = Snapshots(tmp_path / "memory", tmp_path / "run", "2.0", 5)
    assert other.restore(abstract(host_state(), mesh(4, 2)), 0) is None


def test_delete_after_removes_later_snapshots(snapshots):
    take(snapshots, 5, 10)
    snapshots.delete_after(5)
    assert files.steps(snapshots.root) == [5]


def test_discard_frees_the_memory(snapshots, tmp_path):
    take(snapshots, 5)
    snapshots.discard()
    assert not list((tmp_path / "memory").iterdir())


def test_pieces_of_a_lost_host_come_from_its_replica(tmp_path, monkeypatch, warned):
    """Two hosts, each with a replica.

    One is replaced by an empty one, which gets all pieces; without replicas there is no state.
    """
    # along `x` these are replicas: what one of four hosts would write
    state = placed(host_state(5), mesh(1, 2))
    one, empty = (
        Snapshots(tmp_path / host, tmp_path / "run", "1.0", 5, warn=warned.append)
        for host in ("one", "empty")
    )
    for host, each in (("one", one), ("empty", empty)):
        (tmp_path / host).mkdir()
        each.prepare(bytes_of_host(state))
    one.take(5, state, METADATA)
    one.wait()
    held = files.read(one.root, 5)
    both = [
        {
            "metadata": held.metadata,
            "leaves": held.leaves,
            "pieces": [[*key, shard.crc32] for key, (shard,) in held.shards.items()],
        },
        {"metadata": None, "leaves": None, "pieces": []},
    ]
    sent = []

    def gathered_json(value):
        if isinstance(value, dict):
            return both
        return [[5], value] if value == [] else [value, value]

    def broadcast(mine, is_source):
        assert not is_source
        assert not mine.any()
        key = sorted(held.shards)[len(sent)]
        sent.append(key)
        return np.frombuffer(held.shards[key][0].read(), np.uint8)

    monkeypatch.setattr(snapshots_module, "gather_json_from_all", gathered_json)
    monkeypatch.setattr(snapshots_module.multihost_utils, "broadcast_one_to_all", broadcast)
    monkeypatch.setattr(snapshots_module.jax, "process_index", lambda: 1)
    found = empty.restore(abstract(host_state(), mesh(2, 4), OTHER_SPECS), 0)
    assert_same_bits(found.state, host_state(5))
    assert sent == sorted(held.shards)
    monkeypatch.setattr(
        snapshots_module.multihost_utils, "broadcast_one_to_all", lambda mine, is_source: mine + 1
    )
    assert empty.restore(abstract(host_state(), mesh(2, 4), OTHER_SPECS), 0) is None
    assert "has changed on its way" in warned[-1]
    both[0]["pieces"].pop(0)
    assert empty.restore(abstract(host_state(), mesh(2, 4), OTHER_SPECS), 0) is None
    assert "the hosts that are here do not have all of" in warned[-1]
    assert named_leaves(host_state()).keys() == held.leaves.keys()


def test_a_damaged_piece_is_taken_from_another_process_of_the_host(snapshots, monkeypatch, warned):
    """If two intact copies differ, neither is used."""
    take(snapshots, 5)
    monkeypatch.setattr(snapshots_module.jax, "process_index", lambda: 1)
    take(snapshots, 5)
    own, other = (snapshots.root / "5" / f"{process}.bin" for process in range(2))
    content = own.read_bytes()
    assert content == other.read_bytes()
    wanted = abstract(host_state(), mesh(4, 2))
    for place in (0, len(content) - 1):
        own.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        found = snapshots.restore(wanted, 0)
        assert found is not None, warned
        assert_same_bits(found.state, host_state(5))
    other.write_bytes(own.read_bytes())
    assert snapshots.restore(wanted, 0) is None
    own.write_bytes(content)
    snapshots.take(5, placed(host_state(6), mesh(4, 2)), METADATA)
    snapshots.wait()
    assert snapshots.restore(wanted, 0) is None
    assert "replicas of a piece differ" in warned[-1]


def test_snapshots_of_another_user_are_not_read(snapshots, monkeypatch):
    take(snapshots, 5)
    wanted = abstract(host_state(), mesh(4, 2))
    assert snapshots.restore(wanted, 0) is not None
    monkeypatch.setattr(snapshots_module.os, "getuid", lambda: 12345)
    assert snapshots.restore(wanted, 0) is None


@pytest.mark.parametrize(
    ("resumed_at", "expected"),
    [((), 10), ((10,), 10), ((12,), 10), ((5,), 5), ((5, 10), 5), ((3,), None), ((12, 4), None)],
)
def test_snapshot_of_an_abandoned_course_is_not_restored(tmp_path, warned, resumed_at, expected):
    """A host that was absent does not know that the others have gone on from an earlier step."""
    (tmp_path / "memory").mkdir()
    first = Snapshots(tmp_path / "memory", tmp_path / "run", "1.0", 5, [0])
    take(first, 5, 10)
    later = Snapshots(
        tmp_path / "memory", tmp_path / "run", "1.0", 5, [0, *resumed_at], warn=warned.append
    )
    found = later.restore(abstract(host_state(), mesh(4, 2)), 0)
    assert (found and found.step) == expected
    take(later, 20)
    found = later.restore(abstract(host_state(), mesh(4, 2)), 0)
    assert found is not None
    assert found.step == 20, "of its own course"
    for each in (first, later):
        each.close()
