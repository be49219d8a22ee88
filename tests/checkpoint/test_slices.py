"""Slices of a checkpoint equal what was saved, whatever the mesh it was saved on."""

import itertools
from math import prod

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from optimus_jax.checkpoint import checkpoints as module
from optimus_jax.checkpoint.checkpoints import Checkpoints
from optimus_jax.checkpoint.errors import DamagedError
from optimus_jax.checkpoint.slices import StoredCheckpoint
from optimus_jax.config import CheckpointConfig
from optimus_jax.mesh.boxes import sizes, split

SPECS = {
    "params/layers/up": P("a", "b"),
    "params/table": P(("a", "b")),
    "params/norm": P(),
    "params/layers/scale": P(None, "b"),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The directory of a checkpoint with small chunks, and its leaves."""
    rng = np.random.default_rng(0)
    values = {
        "params": {
            "layers": {
                "up": rng.standard_normal((6, 8, 2, 10)).astype(np.float32),
                "scale": rng.standard_normal((6, 8)).astype(jnp.bfloat16),
            },
            "table": rng.standard_normal((40, 12)).astype(np.float16),
            "norm": rng.standard_normal(8).astype(np.float32),
        }
    }
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    leaves = module.named_leaves(values)
    state = jax.tree.map_with_path(
        lambda path, leaf: jax.device_put(
            leaf,
            NamedSharding(mesh, SPECS[jax.tree_util.keystr(path, simple=True, separator="/")]),
        ),
        values,
    )
    directory = tmp_path_factory.mktemp("checkpoints")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "CHUNK_BYTES", 96)
        checkpoints = Checkpoints(directory, CheckpointConfig())
        checkpoints.save(3, state, {"a": "b"})
        checkpoints.close()
    return directory / "3", leaves, state


@pytest.mark.parametrize("most_bytes", [1, 500, 10**9])
def test_boxes_hold_what_was_saved(saved, most_bytes):
    path, leaves, _ = saved
    stored = StoredCheckpoint.at(path)
    assert (stored.step, stored.metadata) == (3, {"a": "b"})
    assert stored.leaves.keys() == leaves.keys()
    for name, leaf in stored.leaves.items():
        found = np.full(leaf.shape, np.nan, leaf.dtype)
        for box in leaf.boxes(range(len(leaf.shape)), most_bytes):
            assert np.isnan(found[box]).all()  # no two of them overlap
            found[box] = leaf.read(box)
        np.testing.assert_array_equal(found, leaves[name])
        leaf.check()
    num_boxes = len(list(stored.leaves["params/layers/up"].boxes(range(4), most_bytes)))
    assert (num_boxes == 1) == (most_bytes == 10**9)


def test_large_shards_are_divided_by_layers_and_small_ones_are_not(saved):
    path, _, state = saved
    leaves = StoredCheckpoint.at(path).leaves
    chunks = {name: leaf._store.chunk_layout.read_chunk.shape for name, leaf in leaves.items()}
    assert chunks["params/layers/up"][0] == 1
    assert chunks["params/layers/up"][1] <= 2  # of a shard
    assert chunks["params/layers/scale"] == (6, 2)  # 24 bytes of a shard
    assert prod(chunks["params/table"]) * 2 <= 96
    restored = Checkpoints(path.parent, CheckpointConfig()).restore(state)
    for ours, theirs in zip(jax.tree.leaves(restored.state), jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_boxes_are_chunks_or_more_of_them():
    whole = (slice(0, 10), slice(0, 12))
    for grid, most in itertools.product([(1, 1), (3, 4), (10, 1), (1, 12)], [1, 5, 24, 200]):
        parts = list(split(whole, (0, 1), most, grid))
        seen = np.zeros((10, 12), int)
        for part in parts:
            seen[part] += 1
            assert all(each.start % chunk == 0 for each, chunk in zip(part, grid, strict=True))
            assert prod(sizes(part)) <= max(most, prod(grid))
        assert (seen == 1).all()


def test_damage_is_noticed(saved, tmp_path):
    """In the data, where nothing but the checksum shows it, and in the manifest."""
    path, leaves, _ = saved
    leaf = StoredCheckpoint.at(path).leaves["params/norm"]
    values = leaf.read((slice(0, 8),))
    leaf.check()
    changed = StoredCheckpoint.at(path).leaves["params/norm"]
    changed.checksum += 1
    changed.read((slice(0, 8),))
    with pytest.raises(DamagedError, match="checksum of params/norm is not what was saved"):
        changed.check()
    np.testing.assert_array_equal(values, leaves["params/norm"])
    unread = StoredCheckpoint.at(path).leaves["params/norm"]
    unread.read((slice(0, 4),))
    with pytest.raises(AssertionError):
        unread.check()
    with pytest.raises(DamagedError):
        StoredCheckpoint.at(tmp_path / "3")
    other = StoredCheckpoint.at(path).leaves["params/norm"]
    other.shape = (9,)
    with pytest.raises(DamagedError, match="another shape or dtype"):
        other.read((slice(0, 9),))
