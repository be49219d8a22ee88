"""Snapshots: a fast second tier of checkpoints in host memory.

They are taken every few steps, so that a restart on the same hosts loses few steps.

Snapshots are files in an in-memory file system (`/dev/shm`), in a directory of the run. Every
process writes the shards of its own devices, so with replicas on several hosts each shard is in the
memory of several hosts. Snapshots survive the processes but not the host; checkpoints on disk
(checkpoint/checkpoints.py) remain the durable tier.

On a resume, all processes together find the newest step of which the present hosts have every shard
intact. A process that lacks a shard receives it from one that has it, so the number of processes
and the plan may change. The restored state is bit-identical.

Two complete snapshots are kept while a third is written. The newest may be complete in one process
but not in another, but the one before is complete in all. A process deletes older ones when it
takes the next snapshot: by then it has finished a step that every process began after waiting for
the previous snapshot.
"""

import contextlib
import hashlib
import os
import shutil
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from optimus_jax.checkpoint import snapshot_files as files
from optimus_jax.checkpoint.reading import Restored, check_same_model
from optimus_jax.checkpoint.snapshot_files import Bounds, HostSnapshot, Key
from optimus_jax.cluster.distributed import gather_json_from_all
from optimus_jax.devices.hosts import hosts_of_processes
from optimus_jax.errors import ConfigError, explain
from optimus_jax.reshard.checksum import named_leaves
from optimus_jax.system.paths import local_path

GENERATIONS = 2
"""Number of complete snapshots that are kept."""
CHECKSUMS_DIFFER = -1
"""Used in place of a checksum if processes have different ones."""


class Snapshots:
    """The snapshots of one run on this process's host.

    All processes must call `take` and `restore` in the same way.

    Args:
      directory: a directory in an in-memory file system.
      run_directory: the directory of the run.
      started: text of the run's first event, which distinguishes it from earlier and later runs in
        the same run directory.
      every: steps between snapshots. 0: none are taken.
      begun: steps after which the run was started or resumed so far, in order. Snapshots that a
        later rollback made invalid are not used, although a host that was absent may still have
        them.
      warn: called with a text about a failure that does not end the run.
      warn_here: the same, for failures of this process only.
    """

    def __init__(
        self,
        directory: str | Path,
        run_directory: Path,
        started: str,
        every: int,
        begun: Sequence[int] = (),
        *,
        warn: Callable[[str], object] = warnings.warn,
        warn_here: Callable[[str], object] = warnings.warn,
    ) -> None:
        key = hashlib.blake2b(
            f"{run_directory.resolve()}\n{started}".encode(), digest_size=8
        ).hexdigest()
        self.root = (
            local_path(directory, what="checkpoint.snapshot_dir").absolute()
            / f"optimus_jax-{os.getuid()}"
            / key
        )
        self._every, self._begun, self._warn, self._warn_here = every, tuple(begun), warn, warn_here
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="snapshots")
        self._writing: Future[None] | None = None

    def is_due(self, step: int) -> bool:
        """Whether a snapshot is due after `step`."""
        return self._every > 0 and step % self._every == 0

    def prepare(self, num_bytes_of_host: int) -> None:
        """Create the directory.

        Args:
          num_bytes_of_host: bytes of the state that this host's processes hold together.
        Raises:
          ConfigError: it cannot be created, belongs to another user, or has too little space.
        """
        if not self._every:
            return
        parent = self.root.parent
        try:
            try:
                self._make_root()
            # another run has ended in the meantime and removed the parent
            except FileNotFoundError:
                self._make_root()
            free_bytes = shutil.disk_usage(self.root).free + sum(
                path.stat().st_size for path in self.root.rglob("*.bin")
            )
        except OSError as error:
            raise ConfigError(
                explain(
                    "snapshots cannot be written",
                    given=f"checkpoint.snapshot_dir={parent.parent}: {error}",
                    do="name another file system in memory, or --set checkpoint.snapshot_every=0",
                )
            ) from error
        needed_bytes = (GENERATIONS + 1) * num_bytes_of_host
        if needed_bytes > free_bytes:
            raise ConfigError(
                explain(
                    "there is no room for snapshots",
                    given=(
                        f"{GENERATIONS + 1} times this host's share of the state are"
                        f" {needed_bytes:,} bytes, {free_bytes:,} are free in {parent.parent}"
                    ),
                    do="make it larger, or --set checkpoint.snapshot_every=0",
                )
            )

    def _make_root(self) -> None:
        parent = self.root.parent
        parent.mkdir(mode=0o700, exist_ok=True)
        if not _is_own(parent):
            parent.lstat()  # raises FileNotFoundError if it is gone
            raise PermissionError(f"{parent} belongs to another user")
        self.root.mkdir(exist_ok=True)

    def take(self, step: int, state: Any, metadata: Mapping[str, Any]) -> None:
        """Start to write the state after `step`. Waits for the previous snapshot first.

        `state` may be donated once this returns.
        """
        self.wait()
        # another process may have started the snapshot of this step
        for old in [other for other in files.steps(self.root) if other < step][:-GENERATIONS]:
            files.delete(self.root, old)
        leaves = {path: (leaf.shape, leaf.dtype.name) for path, leaf in named_leaves(state).items()}
        held = list(_local_shards(state))
        for _, shard in held:
            shard.copy_to_host_async()
        # On a CPU the host's copy may be the buffer itself. The writer's reference protects it from
        # being donated.
        shards = [(key, np.asarray(shard)) for key, shard in held]
        self._writing = self._writer.submit(
            files.write,
            self.root,
            step,
            jax.process_index(),
            {_START: len(self._begun), _METADATA: dict(metadata)},
            leaves,
            shards,
        )

    def _is_current(self, step: int) -> bool:
        """Whether the run has not been rolled back to before the snapshot since it was taken.

        Completeness is checked later.
        """
        held = files.read(self.root, step)
        return held is None or all(step <= begun for begun in self._begun[held.metadata[_START] :])

    def wait(self) -> None:
        """Wait for the current snapshot. A failure only causes a warning: the run does not depend
        on it.
        """
        if self._writing is not None:
            try:
                self._writing.result()
            except OSError as error:
                self._warn_here(
                    f"a snapshot in {self.root} could not be written: {error.strerror or error};"
                    " the run continues without it"
                )
            self._writing = None

    def delete_after(self, step: int) -> None:
        """Delete snapshots of later steps, because the run continues from `step`."""
        for later in (other for other in files.steps(self.root) if other > step):
            files.delete(self.root, later)

    def discard(self) -> None:
        """Delete all snapshots, because the run has ended and its last state is on disk."""
        with contextlib.suppress(OSError):
            if self._writing is not None:
                self._writing.result()
        shutil.rmtree(self.root, ignore_errors=True)
        with contextlib.suppress(OSError):  # other runs have snapshots there
            self.root.parent.rmdir()

    def close(self) -> None:
        """End the thread, without waiting for it."""
        self._writer.shutdown(wait=False, cancel_futures=True)

    def restore(
        self,
        abstract_state: Any,
        newer_than: int,
        *,
        paddable: Callable[[str], bool] = lambda path: False,
        check: Callable[[Mapping[str, Any]], object] = lambda metadata: None,
    ) -> Restored | None:
        """The newest state of which the present hosts have every shard.

        None if there is none after step `newer_than`.

        Args:
          abstract_state: pytree of jax.ShapeDtypeStruct, each with its target sharding.
          newer_than: step of the newest checkpoint on disk.
          paddable: as for `Checkpoints.restore`.
          check: called with the metadata before arrays are assembled; may raise.
        Raises:
          CheckpointError: it is of another model.
        """
        local_steps = (
            [
                step
                for step in files.steps(self.root)
                if step > newer_than and self._is_current(step)
            ]
            if _is_own(self.root.parent)
            else []
        )
        for step in sorted(
            {step for steps in gather_json_from_all(local_steps) for step in steps}, reverse=True
        ):
            held = files.read(self.root, step)
            restored = _SnapshotAssembly(step, held).onto(abstract_state, paddable, check)
            if isinstance(restored, Restored):
                return restored
            self._warn(f"the snapshot of step {step} is skipped: {restored}")
        return None


_START, _METADATA = "start", "said"
"""Manifest keys: how often the run had been started when the snapshot was taken, and the metadata
given to `take`."""


def _is_own(folder: Path) -> bool:
    """Whether the folder belongs to this user. Its parent is writable by all users."""
    return not folder.is_symlink() and folder.is_dir() and folder.stat().st_uid == os.getuid()


def bytes_of_host(state: Any) -> int:
    """Bytes of a state that all processes of this host hold, including replicas.

    Every process must call it.
    """
    own = sum(shard.nbytes for _, shard in _local_shards(state))
    if jax.process_count() == 1:
        return own
    everyones, hosts = (
        np.asarray(multihost_utils.process_allgather(np.array(own, np.float64))),
        hosts_of_processes(),
    )
    return int(
        sum(
            num_bytes
            for num_bytes, host in zip(everyones.ravel(), hosts, strict=True)
            if host == hosts[jax.process_index()]
        )
    )


class _SnapshotAssembly:
    """Assembles the state of one step from shards on all hosts.

    All processes must call the same methods.

    Args:
      step: the step of the snapshot.
      held: the shards on this host; None if there are none.
    """

    def __init__(self, step: int, held: HostSnapshot | None) -> None:
        self._step = step
        self._local = held.intact_shards() if held else {}
        self._content: dict[Key, bytes] = {}
        """The shards that this process needs, after they are fetched."""
        gathered = gather_json_from_all(
            {
                "metadata": held and held.metadata[_METADATA],
                "leaves": held and held.leaves,
                "pieces": (
                    [[*key, crc32] for key in self._local for crc32 in held.checksums_of(key)]
                    if held
                    else []
                ),
            }
        )
        self._metadata = next(
            (each["metadata"] for each in gathered if each["metadata"] is not None), {}
        )
        self._leaves = {
            path: (tuple(shape), dtype)
            for each in gathered
            if each["leaves"]
            for path, (shape, dtype) in each["leaves"].items()
        }
        self._owner: dict[Key, int] = {}
        self._crc32: dict[Key, int] = {}
        for process, each in enumerate(gathered):
            for path, bounds, crc32 in each["pieces"]:
                key = _key((path, bounds))
                self._owner.setdefault(key, process)
                if self._crc32.setdefault(key, crc32) != crc32:
                    self._crc32[key] = CHECKSUMS_DIFFER

    def onto(
        self,
        abstract_state: Any,
        paddable: Callable[[str], bool],
        check: Callable[[Mapping[str, Any]], object],
    ) -> Restored | str:
        """The state under its target shardings, or a text that says why it cannot be restored."""
        if (why := self._missing()) is not None:
            return why
        check(self._metadata)
        asked = named_leaves(abstract_state)
        saved = {
            path: {"shape": shape, "dtype": dtype} for path, (shape, dtype) in self._leaves.items()
        }
        check_same_model(self._step, saved, asked, paddable)
        problem = self._fetch(asked)
        if any(gather_json_from_all(problem is not None)):
            return problem or "another process lacks a piece of it"
        arrays = [self._array(path, leaf) for path, leaf in asked.items()]
        return Restored(
            step=self._step,
            metadata=self._metadata,
            state=jax.tree.unflatten(jax.tree.structure(abstract_state), arrays),
        )

    def _missing(self) -> str | None:
        if not self._leaves:
            return "no process has written all that it had"
        if any(crc32 == CHECKSUMS_DIFFER for crc32 in self._crc32.values()):
            return "replicas of a piece differ"
        covered: dict[str, int] = dict.fromkeys(self._leaves, 0)
        for path, bounds in self._owner:
            covered[path] += _size(bounds)
        missing = [
            path
            for path, (shape, _) in self._leaves.items()
            if covered[path] != _size(tuple((0, size) for size in shape))
        ]
        return (
            f"the hosts that are here do not have all of {missing[0]!r}, and of {len(missing) - 1}"
            " others"
            if missing
            else None
        )

    def _fetch(self, asked: Mapping[str, Any]) -> str | None:
        """Fetch the shards that this process needs, from its own host or another process.

        Returns the problem, if any.
        """
        needed = {key for key in self._owner if self._is_needed(key, asked)}
        self._content = {
            key: content
            for key in needed
            if key in self._local and (content := self._local[key].read()) is not None
        }
        missing = {
            _key(key)
            for keys in gather_json_from_all([list(key) for key in needed - self._content.keys()])
            for key in keys
        }
        for key in sorted(missing):
            content = self._from_owner(key)
            if key in needed:
                self._content[key] = content
        for key, content in self._content.items():
            if zlib.crc32(content) != self._crc32[key]:
                return f"a piece of {key[0]!r} has changed on its way"
            if not self._is_zero_where_cropped(key, asked[key[0]]):
                return f"rows of {key[0]!r} that the plan has no room for are not padding"
        return None

    def _from_owner(self, key: Key) -> bytes:
        """Broadcast a shard from the process that has it. All processes must call it."""
        (path, bounds), is_source = key, self._owner[key] == jax.process_index()
        sent = np.zeros(_size(bounds) * jnp.dtype(self._leaves[path][1]).itemsize, np.uint8)
        if is_source and (content := self._local[key].read()) is not None:
            sent = np.frombuffer(content, np.uint8)
        # Sent as bytes: the broadcast adds zeros, which is exact for bytes.
        return np.asarray(multihost_utils.broadcast_one_to_all(sent, is_source=is_source)).tobytes()

    def _is_needed(self, key: Key, asked: Mapping[str, Any]) -> bool:
        path, bounds = key
        leaf = asked[path]
        if leaf.ndim and bounds[0][1] > leaf.shape[0]:
            return True  # some of it is cropped, and must be checked to be zero
        return any(
            _overlap(bounds, _bounds(index, leaf.shape)) is not None
            for index in leaf.sharding.addressable_devices_indices_map(leaf.shape).values()
        )

    def _is_zero_where_cropped(self, key: Key, leaf: Any) -> bool:
        path, bounds = key
        if not leaf.ndim or bounds[0][1] <= leaf.shape[0]:
            return True
        rows = files.as_array(self._content[key], self._leaves[path][1], bounds)
        return not rows[max(0, leaf.shape[0] - bounds[0][0]) :].any()

    def _array(self, path: str, leaf: Any) -> jax.Array:
        shards = {
            bounds: files.as_array(content, self._leaves[path][1], bounds)
            for (name, bounds), content in self._content.items()
            if name == path
        }

        def part(index: tuple[slice, ...] | None) -> np.ndarray:
            target = _bounds(index, leaf.shape)
            if target in shards:
                return shards[target]
            # zeros: rows that pad a vocabulary or layers
            found = np.zeros([stop - start for start, stop in target], leaf.dtype)
            for bounds, array in shards.items():
                if (common := _overlap(bounds, target)) is not None:
                    found[_slices(common, target)] = array[_slices(common, bounds)]
            return found

        return jax.make_array_from_callback(leaf.shape, leaf.sharding, part)


def _local_shards(state: Any) -> Iterator[tuple[Key, jax.Array]]:
    """Yield the shards of this process's devices, each once."""
    for path, leaf in named_leaves(state).items():
        seen = set()
        for shard in leaf.addressable_shards:
            bounds = _bounds(shard.index, leaf.shape)
            if bounds not in seen:
                seen.add(bounds)
                assert shard.data is not None
                yield (path, bounds), shard.data


def _key(value: Any) -> Key:
    path, bounds = value
    return path, tuple((start, stop) for start, stop in bounds)


def _bounds(index: tuple[slice, ...] | None, shape: tuple[int, ...]) -> Bounds:
    return tuple(
        (part.start or 0, size if part.stop is None else part.stop)
        for part, size in zip(index or (), shape, strict=True)
    )


def _size(bounds: Bounds) -> int:
    return int(np.prod([stop - start for start, stop in bounds], dtype=np.int64))


def _overlap(first: Bounds, second: Bounds) -> Bounds | None:
    """The intersection of two bounds; None if it is empty."""
    common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(first, second, strict=True))
    return common if all(start < stop for start, stop in common) else None


def _slices(part: Bounds, whole: Bounds) -> tuple[slice, ...]:
    """Index of `part` in an array with bounds `whole`."""
    return tuple(
        slice(start - base, stop - base)
        for (start, stop), (base, _) in zip(part, whole, strict=True)
    )
