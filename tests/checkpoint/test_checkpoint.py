"""A saved state is restored bit for bit on any mesh, or an error says why not."""

import contextlib
import errno
import json
import math
import os
import pathlib
import resource
import shutil
import socket
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from quick_flags import QUICK_FLAGS

from optimus_jax.checkpoint import errors as checkpoint_errors
from optimus_jax.checkpoint.checkpoints import (
    ABANDONED_DIR,
    Checkpoints,
    NotFiniteError,
)
from optimus_jax.checkpoint.disk_space import (
    DiskSpace,
    check_disk_space,
    disk_space_of,
    max_checkpoints,
)
from optimus_jax.checkpoint.reading import STEP_METADATA
from optimus_jax.config import CheckpointConfig
from optimus_jax.errors import CheckpointError
from optimus_jax.reshard.checksum import checksums

METADATA = {
    "plan": {"axes": {"data": 2}, "schedule": "1f1b"},
    "tokens": 123456789012,
    "lr": 0.1,
    "seed": None,
}


SHARDED, REPLICATED = False, True


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class State:
    step: Any
    params: Any
    opt_state: Any


def make_state(seed=0, rows=48):
    """Weights with AdamW's moments, every leaf random."""
    params = {
        "embed": jnp.zeros((rows, 64)),
        "blocks": {"w": jnp.zeros((4, 64, 256)), "scale": jnp.zeros((7,), jnp.bfloat16)},
    }
    state = State(jnp.int32(0), params, optax.adamw(1e-3).init(params))
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: (rng.standard_normal(x.shape) * 1000).astype(x.dtype), state)


def shardings(tree, num_devices, replicated=SHARDED):
    """Two axes; dim 0 over the first, the last dim over the second, where they divide."""
    mesh = jax.make_mesh(
        (-(-num_devices // 2), min(2, num_devices)),
        ("a", "b"),
        axis_types=(AxisType.Auto,) * 2,
        devices=jax.devices()[:num_devices],
    )

    def spec(x):
        first = "a" if x.ndim and x.shape[0] % mesh.shape["a"] == 0 else None
        last = ["b"] if x.ndim > 1 and x.shape[-1] % mesh.shape["b"] == 0 else []
        return P() if replicated or not x.ndim else P(first, *[None] * (x.ndim - 2), *last)

    return jax.tree.map(lambda x: NamedSharding(mesh, spec(x)), tree)


def place(state, num_devices=8, replicated=SHARDED):
    return jax.device_put(state, shardings(state, num_devices, replicated))


def abstract(state, num_devices=1, replicated=SHARDED):
    return jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        state,
        shardings(state, num_devices, replicated),
    )


def assert_identical(state, expected):
    assert jax.tree.structure(state) == jax.tree.structure(expected)
    for (path, x), y in zip(
        jax.tree_util.tree_leaves_with_path(state), jax.tree.leaves(expected), strict=True
    ):
        assert (x.dtype, x.shape) == (y.dtype, y.shape), path
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes(), path


@pytest.fixture
def warned():
    return []


@pytest.fixture
def opened(tmp_path, warned, monkeypatch):
    """Opens the checkpoints in `run` of a test's directory."""
    monkeypatch.chdir(tmp_path)
    with contextlib.ExitStack() as stack:
        yield lambda **config: stack.enter_context(
            contextlib.closing(Checkpoints("run", CheckpointConfig(**config), warn=warned.append))
        )


@pytest.fixture(scope="module")
def two_saved(tmp_path_factory):
    """A directory with good checkpoints of steps 1 and 2, to be copied before it is damaged."""
    directory = tmp_path_factory.mktemp("saved")
    with contextlib.closing(Checkpoints(directory, CheckpointConfig())) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, place(make_state(step)), {"at": step})
    return directory


@pytest.mark.parametrize(
    ("saved_on", "restored_on"),
    [
        ((8, SHARDED), (4, SHARDED)),
        ((8, SHARDED), (1, REPLICATED)),
        ((4, REPLICATED), (8, SHARDED)),
        ((1, SHARDED), (8, REPLICATED)),
    ],
)
def test_state_is_restored_on_another_mesh(opened, warned, saved_on, restored_on):
    state, checkpoints = make_state(), opened()
    placed, target = place(state, *saved_on), abstract(state, *restored_on)
    checkpoints.save(7, placed, METADATA)
    checkpoints.wait()
    restored = opened().restore(target)
    assert (restored.step, restored.metadata) == (7, METADATA)
    assert_identical(restored.state, state)
    assert checksums(restored.state) == checksums(placed)
    for x, wanted, before in zip(
        *map(jax.tree.leaves, (restored.state, target, placed)), strict=True
    ):
        assert x.sharding == wanted.sharding != before.sharding
    assert warned == []


@pytest.mark.parametrize("use", ["donate", "delete"])
@pytest.mark.parametrize("replicated", [SHARDED, REPLICATED])
def test_state_may_be_donated_once_save_returns(opened, use, replicated):
    state, checkpoints = make_state(rows=16384), opened()
    placed = place(state, replicated=replicated)
    overwrite = jax.jit(lambda tree: jax.tree.map(lambda x: -x, tree), donate_argnums=0)
    # compiled, so that it runs while files are being written
    overwrite(place(state, replicated=replicated))
    checkpoints.save(1, placed, {})
    if use == "donate":
        jax.block_until_ready(overwrite(placed))
    else:
        jax.tree.map(lambda x: x.delete(), placed)
        jax.block_until_ready([jnp.full((1 << 20,), float(i)) for i in range(32)])
    assert_identical(checkpoints.restore(abstract(state)).state, state)


def test_metadata_may_change_once_save_returns(opened):
    checkpoints, metadata = opened(), {"position": [1]}
    checkpoints.save(1, place(make_state()), metadata)
    metadata["position"].append(2)
    checkpoints.wait()
    assert checkpoints.latest().metadata == {"position": [1]}


def test_keep_and_keep_every_decide_which_steps_stay(opened):
    checkpoints, state = opened(keep=2, keep_every=4), place(make_state())
    for step in range(1, 8):
        checkpoints.save(step, state, {})
    checkpoints.wait()
    assert checkpoints.steps() == [4, 6, 7]
    reopened = opened(keep=1)
    reopened.save(8, state, {})
    reopened.wait()
    assert reopened.steps() == [8]


def test_nothing_to_restore_is_an_error_and_leaves_no_trace(opened, tmp_path):
    checkpoints = opened()
    assert (checkpoints.steps(), checkpoints.latest()) == ([], None)
    with pytest.raises(CheckpointError, match="no good checkpoint"):
        checkpoints.restore(abstract(make_state()))
    assert not (tmp_path / "run").exists()


def data_file(step_directory):
    """The largest file: where the arrays are."""
    return max(
        (file for file in step_directory.rglob("*") if file.is_file()),
        key=lambda file: file.stat().st_size,
    )


def truncate(step_directory):
    file = data_file(step_directory)
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def flip_a_bit(step_directory):
    file = data_file(step_directory)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def change_metadata(step_directory):
    file = step_directory / "manifest" / "metadata"
    content = json.loads(file.read_text())
    content["content"]["metadata"]["at"] = 3
    file.write_text(json.dumps(content))


DAMAGE = {
    "arrays truncated": (truncate, "OUT_OF_RANGE"),
    "arrays lost": (lambda directory: data_file(directory).unlink(), "Error reading"),
    "bit flipped": (flip_a_bit, "checksum of .* is not what was saved"),
    "state lost": (lambda directory: shutil.rmtree(directory / "state"), "FileNotFoundError"),
    "tree unreadable": (
        lambda directory: (directory / "state" / "_METADATA").write_text("{"),
        "state/_METADATA is not JSON",
    ),
    "manifest lost": (
        lambda directory: (directory / "manifest" / "metadata").unlink(),
        "FileNotFoundError",
    ),
    "metadata changed": (change_metadata, "manifest is not what was saved"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_checkpoint_is_skipped_with_a_warning(two_saved, opened, warned, tmp_path, name):
    shutil.copytree(two_saved, tmp_path / "run")
    damage, reason = DAMAGE[name]
    damage(tmp_path / "run" / "2")
    checkpoints, target = opened(), abstract(make_state(), 4)
    restored = checkpoints.restore(target)
    assert (restored.step, restored.metadata) == (1, {"at": 1})
    assert_identical(restored.state, make_state(1))
    [warning] = warned
    assert "step 2 is damaged" in warning
    with pytest.raises(
        CheckpointError, match=f"(?s)no good checkpoint of step 2.*steps 1, 2\n.*{reason}"
    ):
        checkpoints.restore(target, step=2)
    checkpoints.save(2, place(make_state(3)), {})  # the run comes to step 2 again
    assert_identical(checkpoints.restore(target).state, make_state(3))


@pytest.mark.parametrize(
    "content", [b'[1,"a",null]', b'{"item_handlers": 5}', b"\xff\x00{", b"", None]
)
def test_damaged_step_metadata_sets_only_its_checkpoint_aside(
    two_saved, opened, warned, tmp_path, content
):
    """Orbax reads arrays whatever such a file says, but could then save no other checkpoint.

    `content` None: a folder in its place.
    """
    for step, name in ((2, STEP_METADATA), (1, STEP_METADATA), (2, "state/_sharding")):
        if name != STEP_METADATA and content and content.startswith(b"{"):
            continue
        shutil.copytree(two_saved, tmp_path / "run")
        path = tmp_path / "run" / str(step) / name
        path.unlink()
        path.mkdir() if content is None else path.write_bytes(content)
        checkpoints = opened()
        assert checkpoints.restore(abstract(make_state())).step == 3 - step or step == 1
        for later in (3, 4):
            checkpoints.save(later, place(make_state()), {})
        checkpoints.close()
        assert checkpoints.steps() == [3 - step, 3, 4]
        assert f"step {step} is damaged" in warned[0]
        assert (tmp_path / "damaged" / str(step)).is_dir(), "nothing of it is deleted"
        shutil.rmtree(tmp_path / "run")
        shutil.rmtree(tmp_path / "damaged")
        warned.clear()


def test_restore_fails_if_every_checkpoint_is_damaged(two_saved, opened, tmp_path):
    shutil.copytree(two_saved, tmp_path / "run")
    flip_a_bit(tmp_path / "run" / "2")
    truncate(tmp_path / "run" / "1")
    with pytest.raises(
        CheckpointError, match=r"(?s)no good checkpoint\n.*2: the checksum .*1: .*OUT_OF_RANGE"
    ):
        opened().restore(abstract(make_state()))


def test_chosen_step_is_restored(two_saved, warned):
    checkpoints, target = (
        Checkpoints(two_saved, CheckpointConfig(), warn=warned.append),
        abstract(make_state()),
    )
    assert_identical(checkpoints.restore(target, step=1).state, make_state(1))
    with pytest.raises(CheckpointError, match=r"(?s)step 3\n.*steps 1, 2"):
        checkpoints.restore(target, step=3)
    assert warned == []


def replaced(state, **params):
    return State(state.step, {**state.params, **params}, state.opt_state)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            replaced(make_state(), head=np.zeros((2, 3), np.float32)),
            r"'params/head'.*no such leaf, requested float32\[2, 3\]",
        ),
        (
            State(np.int32(0), make_state().params, ()),
            r"'opt_state/0/count'.*saved int32\[\], requested no such leaf",
        ),
        (
            replaced(make_state(), embed=np.zeros((64, 64), np.float32)),
            r"'params/embed'.*float32\[48, 64\], requested float32\[64, 64\]",
        ),
        (
            replaced(
                make_state(),
                blocks={**make_state().params["blocks"], "w": np.zeros((4, 64, 512), np.int32)},
            ),
            r"'params/blocks/w'.*saved float32\[4, 64, 256\], requested int32\[4, 64, 512\]",
        ),
    ],
)
def test_checkpoint_of_another_model_is_an_error_not_damage(two_saved, warned, other, message):
    checkpoints = Checkpoints(two_saved, CheckpointConfig(), warn=warned.append)
    for step in (None, 2):
        with pytest.raises(CheckpointError, match=f"(?s)step 2 is of another model.*{message}"):
            checkpoints.restore(
                abstract(other), step, paddable=lambda path: path == "params/blocks/w"
            )
    assert warned == []


def test_part_of_a_state_can_be_restored(two_saved, warned):
    checkpoints, target = (
        Checkpoints(two_saved, CheckpointConfig(), warn=warned.append),
        abstract(make_state()),
    )
    restored = checkpoints.restore({"params": target.params}, partial=True)
    assert_identical(restored.state, {"params": make_state(2).params})
    with pytest.raises(CheckpointError, match="'head' differs"):
        checkpoints.restore({"params": target.params, "head": target.step}, partial=True)
    assert warned == []


def test_padding_of_named_leaves_may_change(opened):
    def with_rows(state, rows):
        def resized(path, x):
            if "embed" not in jax.tree_util.keystr(path):
                return x
            return np.concatenate([x, np.zeros((rows, 64), x.dtype)])[:rows]

        return jax.tree_util.tree_map_with_path(resized, state)

    state, checkpoints = make_state(), opened()
    for step, (saved, wanted_rows) in enumerate([(48, 64), (64, 48), (64, 72)]):
        checkpoints.save(step, place(with_rows(state, saved)), {})
        target = abstract(with_rows(state, wanted_rows), 8)
        restored = checkpoints.restore(target, step, paddable=lambda path: path.endswith("/embed"))
        assert_identical(restored.state, with_rows(state, wanted_rows))
        assert restored.state.params["embed"].sharding == target.params["embed"].sharding
    with pytest.raises(
        CheckpointError, match=r"checksum of .*params/embed.* is not what was saved"
    ):
        checkpoints.restore(
            abstract(with_rows(state, 40)), 2, paddable=lambda path: path.endswith("/embed")
        )


def test_leftover_of_a_killed_save_is_ignored_then_removed(two_saved, opened, warned, tmp_path):
    shutil.copytree(two_saved, tmp_path / "run")
    leftover = tmp_path / "run" / "3.orbax-checkpoint-tmp"
    shutil.copytree(two_saved / "2", leftover)
    shutil.copytree(two_saved / "2", tmp_path / "run" / "mine_9")
    checkpoints = opened()
    assert checkpoints.steps() == [1, 2]
    assert checkpoints.restore(abstract(make_state())).step == 2
    assert leftover.exists()  # reading changes nothing: another process may be saving
    checkpoints.save(4, place(make_state()), {})
    checkpoints.wait()
    assert checkpoints.steps() == [1, 2, 4]
    assert not leftover.exists()
    assert warned == []


def test_saving_an_earlier_step_again_deletes_later_ones(two_saved, opened, warned, tmp_path):
    shutil.copytree(two_saved, tmp_path / "run")
    checkpoints = opened(keep=1)
    checkpoints.save(1, place(make_state(5)), {"again": True})
    checkpoints.wait()
    assert checkpoints.steps() == [1]
    assert checkpoints.latest().metadata == {"again": True}
    assert_identical(checkpoints.restore(abstract(make_state())).state, make_state(5))
    assert ["step 1 is deleted" in warned[0], "step 2 is deleted" in warned[1]] == [True, True]


def test_state_can_be_saved_while_an_exception_is_handled(opened):
    """An error that the caller handles is not taken for one of the save."""
    checkpoints = opened()
    try:
        _ = 1 / 0
    except ZeroDivisionError:
        checkpoints.save(1, place(make_state()), {})
        checkpoints.wait()
    assert checkpoints.steps() == [1]


@contextlib.contextmanager
def full_disk():
    """No file can grow beyond 64 KiB, as if the disk were full or had a quota."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_saved_callback_is_called_when_a_save_is_complete(tmp_path):
    completed, state = [], place(make_state())
    checkpoints = Checkpoints(
        tmp_path / "run",
        CheckpointConfig(),
        saved=lambda step, blocked_s: completed.append((step, blocked_s > 0, checkpoints.steps())),
    )
    checkpoints.save(1, state, {})
    assert completed == []
    checkpoints.save(2, state, {})
    assert completed == [(1, True, [1])]
    checkpoints.close()
    checkpoints.wait()
    assert completed == [(1, True, [1]), (2, True, [1, 2])]


def test_failed_save_raises_one_error_and_prints_nothing(tmp_path, capfd):
    completed = []
    checkpoints = Checkpoints(
        tmp_path / "run", CheckpointConfig(), saved=lambda step, blocked_s: completed.append(step)
    )
    state = place(
        {
            str(i): np.random.default_rng(i).standard_normal((128, 512)).astype(np.float32)
            for i in range(20)
        }
    )
    with full_disk():
        checkpoints.save(1, state, {})
        with pytest.raises(
            CheckpointError, match=r"(?s)step 1 failed: .*File too large.*ulimit -f"
        ):
            checkpoints.close()
    checkpoints.save(2, state, {})
    checkpoints.close()
    assert completed == [2]
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    "error",
    [
        PermissionError(errno.EACCES, "Permission denied"),
        OSError(errno.ESTALE, "Stale file handle"),
        ValueError("PERMISSION_DENIED: Error opening a file"),
        ValueError("Input/output error [os_error_code='5']"),
    ],
)
def test_unreachable_checkpoint_is_not_taken_for_damaged(
    two_saved, opened, warned, tmp_path, monkeypatch, error
):
    shutil.copytree(two_saved, tmp_path / "run")

    def refuse(*_, **__):
        raise error

    monkeypatch.setattr(ocp.PyTreeCheckpointHandler, "restore", refuse)
    with pytest.raises(
        CheckpointError, match=r"(?s)step 2 cannot be reached, and may be good.*then try again"
    ):
        opened().restore(abstract(make_state()))
    assert warned == []


@pytest.fixture
def one_host_is_late(monkeypatch):
    """The second of two processes sees files only after some polls, as from a slow file server.

    This process stands for both.
    """

    def late(polls):
        views = []

        def gather_from_all(number):
            if number in (0, 1, 2):  # how reading went, and whether it is late: alike in both
                return [number, number]
            views.append(number)
            return [number, number + (len(views) <= polls)]

        monkeypatch.setattr(checkpoint_errors, "gather_from_all", gather_from_all)
        monkeypatch.setattr(checkpoint_errors, "_POLL_S", 0.0)

    return late


def failing(monkeypatch, times):
    """The first `times` reads find no file."""
    restore, left = ocp.PyTreeCheckpointHandler.restore, iter(range(times))

    def maybe(*args, **more):
        if next(left, None) is not None:
            raise FileNotFoundError("there is no such file")
        return restore(*args, **more)

    monkeypatch.setattr(ocp.PyTreeCheckpointHandler, "restore", maybe)


def test_files_that_a_host_does_not_see_yet_are_waited_for(
    two_saved, opened, warned, tmp_path, monkeypatch, one_host_is_late
):
    shutil.copytree(two_saved, tmp_path / "run")
    one_host_is_late(2)
    failing(monkeypatch, 2)
    assert opened().restore(abstract(make_state())).step == 2
    assert warned == []


def test_files_that_a_host_never_sees_are_not_damage(
    two_saved, opened, warned, tmp_path, monkeypatch, one_host_is_late
):
    shutil.copytree(two_saved, tmp_path / "run")
    one_host_is_late(math.inf)
    failing(monkeypatch, 10**9)
    monkeypatch.setattr(checkpoint_errors, "PATIENCE_S", 0.0)
    with pytest.raises(
        CheckpointError,
        match=(
            r"(?s)step 2 cannot be reached, and may be good.*process 1 does not see the files that"
            r" process 0 sees"
        ),
    ):
        opened().restore(abstract(make_state()))
    assert warned == []


def test_manifest_that_a_host_never_sees_is_not_damage(
    two_saved, opened, warned, tmp_path, monkeypatch, one_host_is_late
):
    shutil.copytree(two_saved, tmp_path / "run")
    one_host_is_late(math.inf)
    monkeypatch.setattr(checkpoint_errors, "PATIENCE_S", 0.0)
    (tmp_path / "run" / "2" / "manifest" / "metadata").unlink()
    with pytest.raises(
        CheckpointError,
        match=(
            r"(?s)step 2 cannot be reached, and may be good.*process 1 does not see the files that"
            r" process 0 sees"
        ),
    ):
        opened().latest()
    assert warned == []


def test_files_missing_on_all_hosts_are_damage(
    two_saved, opened, warned, tmp_path, monkeypatch, one_host_is_late
):
    shutil.copytree(two_saved, tmp_path / "run")
    one_host_is_late(0)
    failing(monkeypatch, 1)
    assert opened().restore(abstract(make_state())).step == 1
    assert "damaged" in warned[0]


@pytest.mark.parametrize("surfaces_in", ["wait", "save"])
def test_save_that_fails_in_the_background_is_reported(opened, tmp_path, surfaces_in):
    # One array on one device: after one failed write, Orbax's threads would complain about all the
    # others.
    values = {"w": np.random.default_rng(0).standard_normal((512, 512)).astype(np.float32)}
    state, checkpoints = place(values, 1), opened(keep=1)
    checkpoints.save(1, state, {})
    checkpoints.wait()
    with full_disk():
        checkpoints.save(2, state, {})
        with pytest.raises(
            CheckpointError,
            match=r"(?s)step 2 failed: .*File too large.*1,048,576 bytes.*of step 1",
        ):
            checkpoints.wait() if surfaces_in == "wait" else checkpoints.save(3, state, {})
    # what was half written does not fill the disk
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["1"]
    assert_identical(checkpoints.restore(abstract(values)).state, values)
    checkpoints.save(3, state, {})
    checkpoints.wait()
    assert checkpoints.steps() == [3]


def test_a_directory_that_cannot_be_made_is_reported(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(
        CheckpointError, match=r"(?s)step 1 failed: NotADirectoryError.*there is no checkpoint yet"
    ):
        Checkpoints(tmp_path / "file" / "run", CheckpointConfig()).save(1, place(make_state()), {})


TWO_PROCESSES = """
import pathlib, sys
import jax, numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from optimus_jax.checkpoint.checkpoints import Checkpoints
from optimus_jax.checkpoint.reading import STEP_METADATA
from optimus_jax.config import CheckpointConfig

address, process, directory = sys.argv[1], int(sys.argv[2]), pathlib.Path(sys.argv[3])
jax.distributed.initialize(address, 2, process)
mesh = jax.make_mesh((4,), ("a",), axis_types=(AxisType.Auto,))
rows, whole = NamedSharding(mesh, P("a")), NamedSharding(mesh, P())
values = lambda step: np.random.default_rng(step).standard_normal((64, 1024)).astype(np.float32)
placed = jax.make_array_from_callback
place = lambda step: {"rows": placed((64, 1024), rows, lambda i: values(step)[i]),
                      "step": placed((), whole, lambda i: np.int32(step))}
warned = []
checkpoints = Checkpoints(directory, CheckpointConfig(), warn=warned.append)
for step in (1, 2):
    checkpoints.save(step, place(step), {"step": step})
checkpoints.wait()
if process == 0:  # damage rows that only process 1 will read
    files = (directory / "2" / "state" / "ocdbt.process_1" / "d").iterdir()
    file = max(files, key=lambda file: file.stat().st_size)
    file.write_bytes(file.read_bytes()[:100])
multihost_utils.sync_global_devices("damaged")
shape = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
target = jax.tree.map(shape, place(0))
restored = checkpoints.restore(target)
assert (restored.step, restored.metadata) == (1, {"step": 1})
assert "step 2 is damaged" in warned[0], warned
assert int(restored.state["step"]) == 1
for shard in restored.state["rows"].addressable_shards:
    assert (np.asarray(shard.data) == values(1)[shard.index]).all()
checkpoints.save(2, place(2), {})
checkpoints.close()
assert checkpoints.steps() == [1, 2] and len(warned) == 2, warned
print("passed", *warned)
"""


def test_two_processes_save_and_fall_back_together(tmp_path):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    flags = f"--xla_force_host_platform_device_count=2 {QUICK_FLAGS}"
    environment = os.environ | {"XLA_FLAGS": flags}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", TWO_PROCESSES, address, str(process), str(tmp_path / "run")],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for process in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=100)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    for output in outputs:
        assert "passed" in output, output
    assert "another process cannot read it" in outputs[0]
    assert "OUT_OF_RANGE" in outputs[1]


@pytest.mark.parametrize(
    ("cause", "is_peer_failure"),
    [
        (jax.errors.JaxRuntimeError("UNAVAILABLE: connection reset"), True),
        (ValueError("UNKNOWN: Gloo AllGather failed: Connection closed by peer"), True),
        (ValueError("RESOURCE_EXHAUSTED: Error writing a file"), False),
        (OSError("no room"), False),
    ],
)
def test_failure_of_a_peer_is_not_taken_for_one_of_the_disk(monkeypatch, cause, is_peer_failure):
    """Seen with four processes of one device each: when one is killed, a save of another raises the
    ValueError of a collective.
    """
    error = TimeoutError("Orbax has waited")
    error.__cause__ = cause
    checkpoint_errors.raise_if_peer_failure(error)  # of one process
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(type(cause)) if is_peer_failure else contextlib.nullcontext():
        checkpoint_errors.raise_if_peer_failure(error)


def test_failure_of_a_peer_is_not_taken_for_damage(tmp_path):
    def read():
        raise ValueError("UNKNOWN: Gloo AllGather failed: Connection closed by peer")

    with pytest.raises(ValueError, match="Gloo"):
        checkpoint_errors.on_every_process(read, tmp_path)


def test_newest_checkpoint_up_to_each_limit_is_kept(tmp_path, warned):
    limits = [2]
    checkpoints = Checkpoints(
        tmp_path / "run", CheckpointConfig(keep=2), warn=warned.append, limits=lambda: limits
    )
    state = place({"w": np.ones((8,), np.float32)}, 1)
    for step in range(1, 6):
        checkpoints.save(step, state, {})
    checkpoints.wait()
    assert checkpoints.steps() == [2, 4, 5]
    limits[:] = [5]
    checkpoints.save(6, state, {})
    checkpoints.close()
    assert checkpoints.steps() == [5, 6]
    assert (checkpoints.holds(6), checkpoints.holds(5)) == (True, False)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_state_that_is_not_finite_is_not_saved(tmp_path, bad):
    checkpoints = Checkpoints(tmp_path / "run", CheckpointConfig())
    with pytest.raises(NotFiniteError, match="'b/w'"):
        checkpoints.save(
            1,
            place({"a": np.ones((8,), np.float32), "b": {"w": np.full((8,), bad, np.float32)}}, 1),
            {},
        )
    assert (checkpoints.steps(), checkpoints.holds(1)) == ([], False)


def test_has_ended_is_known_without_waiting(tmp_path):
    values = {"w": np.random.default_rng(0).standard_normal((512, 512)).astype(np.float32)}
    checkpoints = Checkpoints(tmp_path / "run", CheckpointConfig())
    assert not checkpoints.has_ended
    with full_disk():
        checkpoints.save(1, place(values, 1), {})
        checkpoints._waiter.join()
        assert checkpoints.has_ended
        with pytest.raises(CheckpointError, match="step 1 failed"):
            checkpoints.wait()
    assert (checkpoints.has_ended, checkpoints.holds(1)) == (False, False)
    checkpoints.save(1, place(values, 1), {})
    checkpoints.close()
    assert (checkpoints.steps(), checkpoints.holds(1)) == ([1], True)


def test_abandoned_checkpoints_are_moved_and_not_deleted(two_saved, opened, warned, tmp_path):
    shutil.copytree(two_saved, tmp_path / "run")
    checkpoints = opened()
    assert checkpoints.latest(1).metadata == {"at": 1}
    assert checkpoints.latest(7) is None
    (moved,) = checkpoints.set_aside([2], ABANDONED_DIR)
    assert (checkpoints.steps(), moved.is_dir(), moved.parent.name) == ([1], True, "abandoned")
    assert warned == []


def test_metadata_is_checked_before_arrays_are_read(two_saved, warned):
    def refuse(metadata):
        raise CheckpointError(f"of another model: {metadata['at']}")

    checkpoints = Checkpoints(two_saved, CheckpointConfig(), warn=warned.append)
    with pytest.raises(CheckpointError, match="another model: 2"):
        checkpoints.restore(abstract(make_state()), check=refuse)


ROOM = {"free_files": None, "used_bytes": 0, "num_checkpoints": 0}


@pytest.mark.parametrize(
    ("room", "wanted", "expected"),
    [
        ({"free_bytes": 500}, 4, None),
        ({"free_bytes": 399}, 4, "4 of 100 bytes"),
        ({"free_bytes": 150}, 4, CheckpointError),
        ({"free_bytes": 95}, 1, "1 of 100 bytes"),
        ({"free_bytes": 80}, 1, CheckpointError),
        ({"free_bytes": 50, "used_bytes": 300, "num_checkpoints": 3}, 4, CheckpointError),
        ({"free_bytes": 120, "used_bytes": 300, "num_checkpoints": 3}, 4, None),
        ({"free_bytes": 500, "free_files": 10}, 4, CheckpointError),
        ({"free_bytes": 500, "free_files": 60}, 4, "60 files"),
    ],
)
def test_disk_space_is_checked_before_the_first_step(tmp_path, room, wanted, expected):
    given = DiskSpace(**ROOM | room)
    if expected is CheckpointError:
        with pytest.raises(CheckpointError, match=r"no room for (.|\n)*100 bytes"):
            check_disk_space(given, 100, wanted=wanted, num_processes=1, directory=tmp_path)
    else:
        warning = check_disk_space(given, 100, wanted=wanted, num_processes=1, directory=tmp_path)
        assert warning is None if expected is None else expected in warning


def test_max_checkpoints_follows_every_keep_and_keep_every():
    many, few = (
        CheckpointConfig(every=10, keep=3, keep_every=100),
        CheckpointConfig(every=500, keep=3),
    )
    assert max_checkpoints(many, 0, 1000, 0) == 3 + 10 + 1
    assert [max_checkpoints(few, 0, steps, 0) for steps in (300, 1000, 5000)] == [1, 2, 4]
    assert disk_space_of(pathlib.Path("/")).free_bytes > 0
