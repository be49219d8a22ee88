"""Save a state to disk, and restore it onto any mesh.

A checkpoint is a directory named after its step, which Orbax writes under a temporary name and
renames when it is complete. It holds
* `state`: every leaf of the state by its path (`named_leaves`), so that the format does not depend
  on Python classes; each process writes its shards;
* `manifest`: JSON with the caller's metadata, the shape, dtype and checksum of every leaf, and
  a checksum of that text itself.

Three failures are distinguished. A *damaged* checkpoint (truncated, shards missing, a wrong
checksum) is skipped in favour of an older one. A checkpoint of *another model* is an error: falling
back would hide the wrong config. So is one that *cannot be reached* (permissions, a network disk
that does not answer): it may be good, and a run that resumes from an older one would delete it.

The import takes a quarter of a second beyond JAX, nearly all of it Orbax.
"""

import contextlib
import errno
import json
import logging
import math
import os
import shutil
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint.checkpoint_managers import (
    AnyPreservationPolicy,
    EveryNSteps,
    LatestN,
    PolicyCheckpointInfo,
    PreservationContext,
    PreservationPolicy,
)
from orbax.checkpoint.path import atomicity_types

from optimus_jax.checkpoint.errors import (
    DamagedError,
    UnreachableError,
    event_loops_that_finish,
    in_one_line,
    on_every_process,
    raise_if_peer_failure,
)
from optimus_jax.checkpoint.reading import (
    MANIFEST,
    STATE,
    Restored,
    Saved,
    check_descriptions,
    checksum_of,
    listed,
    read_checkpoint,
    read_manifest,
)
from optimus_jax.cluster.distributed import broadcast_from_0
from optimus_jax.config import CheckpointConfig
from optimus_jax.errors import CheckpointError, explain
from optimus_jax.reshard.checksum import check_arrays, named_leaves
from optimus_jax.reshard.restack import is_stacked

_REMEDIES = {
    errno.EFBIG: "raise the limit on the size of a file (ulimit -f)",
    errno.ENOSPC: "make room",
    errno.EDQUOT: "make room within the quota",
    errno.ENOENT: "see whether somebody has removed or unmounted it",
    errno.EACCES: "fix its permissions",
    errno.EPERM: "fix its permissions",
    errno.EROFS: "mount it so that it can be written",
    errno.ENOTDIR: "remove the file that has taken its place",
}
"""What to do about a failed save, by the system's errno."""
CHUNK_BYTES = 32 << 20
"""Largest chunk in which a shard is written, before compression."""
DAMAGED_DIR, ABANDONED_DIR = "damaged", "abandoned"
"""Directories next to `checkpoints`: for damaged checkpoints, and for those after a step to which
the run was told to go back."""

# Orbax logs every phase of a save at level INFO, and every error with its traceback, once per
# thread, although it also raises the error and we report it.
logging.getLogger("absl").setLevel(logging.CRITICAL)


class NotFiniteError(CheckpointError):
    """The state is not finite, so it is not saved: no run could resume from it."""

    def __init__(self, leaf: str) -> None:
        super().__init__(
            explain(
                "a state that is not finite is not saved",
                given=f"leaf {leaf!r}",
                do="go back to an older checkpoint",
            )
        )
        self.leaf = leaf


@dataclass
class _NewestUpTo(PreservationPolicy):
    """Keeps, for each limit, the newest checkpoint at or before it."""

    limits: Callable[[], Iterable[int]]

    def should_preserve(
        self, checkpoints: Sequence[PolicyCheckpointInfo], *, context: PreservationContext
    ) -> Sequence[bool]:
        kept = {
            max((found.step for found in checkpoints if found.step <= limit), default=None)
            for limit in self.limits()
        }
        return [found.step in kept for found in checkpoints]


class Checkpoints:
    """The checkpoints of one run.

    All processes must call the same methods in the same order.

    Reading does not change the directory; the first `save` creates it. Call `close` at the end.

    Args:
      directory: the directory of the checkpoints. Nothing is written elsewhere, except by
        `set_aside`.
      config: how many checkpoints are kept.
      warn: called with a text about a damaged or deleted checkpoint when the run continues.
      saved: called with the step of a completed save and the seconds for which `save` blocked, by
        the next method that waits.
      limits: returns steps. The newest checkpoint at or before each of them is kept. Must return
        the same on all processes.
    """

    def __init__(
        self,
        directory: epath.PathLike,
        config: CheckpointConfig,
        warn: Callable[[str], object] = warnings.warn,
        saved: Callable[[int, float], object] = lambda step, blocked_s: None,
        limits: Callable[[], Iterable[int]] = tuple,
    ) -> None:
        self._directory = epath.Path(directory).absolute()  # TensorStore refuses relative paths
        self._config = config
        self._warn = warn
        self._manager: ocp.CheckpointManager | None = None
        self._saved, self._limits = saved, limits
        self._known_step: int | None = None
        """Step of the state that this object last saved or restored."""
        self._waiter: threading.Thread | None = None
        """Thread that ends when the current save does."""
        self._saving = (0, 0)  # step and bytes of the newest save
        self._blocked_s: float | None = None  # of the save under way
        self._loops = contextlib.ExitStack()
        self._caller_error: BaseException | None = None
        """The exception that the caller is handling while it waits, because a state may be saved
        after something else has failed. It does not come from the save."""

    def steps(self) -> list[int]:
        """Steps of all complete checkpoints, oldest first."""
        return sorted(
            found.step for found in ocp.path.step.standard_name_format().find_all(self._directory)
        )

    def steps_for_all(self) -> list[int]:
        """`steps` as process 0 sees them.

        A file server may show other processes a listing that is a minute old.
        """
        return json.loads(broadcast_from_0(json.dumps(self.steps())))

    def holds(self, step: int) -> bool:
        """Whether the state that this object last saved or restored is the one after `step`.

        False if its save is known to have failed. The same on all processes.
        """
        return self._known_step == step

    def latest(self, step: int | None = None) -> Saved | None:
        """The newest checkpoint with a valid manifest, or that of `step`, without reading its
        arrays.

        Raises CheckpointError if a checkpoint cannot be reached.
        """
        for step in reversed(
            [found for found in self.steps_for_all() if step is None or found == step]
        ):
            try:
                return Saved(step=step, metadata=read_manifest(self._path(step))["metadata"])
            except DamagedError:
                continue
            except UnreachableError as error:
                raise self._unreachable(step, error) from error
        return None

    def save(self, step: int, state: Any, metadata: Mapping[str, Any]) -> None:
        """Start an asynchronous save.

        Waits for the previous save. Existing checkpoints of `step` and later steps are deleted with
        a warning: the run was resumed from before them (some may be damaged).

        Args:
          step: number of finished steps.
          state: pytree of jax.Arrays. It may be donated or deleted once this returns: Orbax has
            copied it to the host (`transfer_arrays_to_host`); on a CPU the "copy" may be the buffer
            itself, which the writer's reference protects from donation.
          metadata: JSON values; returned by `restore` and `latest`.
        Raises:
          NotFiniteError: some of the state is not finite; nothing was written.
          CheckpointError: this save cannot start, or the previous one failed. This one has not
            started then; it is safe to call again.
        """
        started = time.perf_counter()
        self.wait()
        leaves, found = named_leaves(state), check_arrays(state)
        if (
            broken := next((name for name, leaf in found.items() if not leaf.is_finite), None)
        ) is not None:
            raise NotFiniteError(broken)
        manifest = {
            "metadata": dict(metadata),
            "leaves": {
                name: {
                    "shape": leaf.shape,
                    "dtype": leaf.dtype.name,
                    "checksum": found[name].checksum,
                }
                for name, leaf in leaves.items()
            },
        }
        manifest = json.loads(json.dumps(manifest))  # a copy: it is written after this returns
        self._saving = (step, sum(leaf.nbytes for leaf in leaves.values()))
        try:
            # closed by `wait` after this save
            self._loops.enter_context(event_loops_that_finish())
            manager = self._open_manager()
            for stale in (other for other in manager.all_steps() if other >= step):
                self._warn(
                    f"the checkpoint of step {stale} is deleted: this run has come to step {step}"
                    " without it"
                )
                manager.delete(stale)
            manager.save(
                step,
                force=True,
                args=ocp.args.Composite(
                    **{
                        STATE: ocp.args.PyTreeSave(
                            leaves,
                            save_args={name: _chunks(name, leaf) for name, leaf in leaves.items()},
                        ),
                        MANIFEST: ocp.args.JsonSave(
                            {"content": manifest, "crc32": checksum_of(manifest)}
                        ),
                    }
                ),
            )
        except Exception as error:
            raise_if_peer_failure(error)
            raise self._save_error(error) from error
        self._waiter = threading.Thread(
            target=_wait_quietly, args=(manager,), name="save ends", daemon=True
        )
        self._waiter.start()
        self._blocked_s, self._known_step = time.perf_counter() - started, step

    @property
    def has_ended(self) -> bool:
        """Whether the current save has finished or failed; then `wait` returns or raises at
        once."""
        return self._waiter is not None and not self._waiter.is_alive()

    def wait(self) -> None:
        """Wait for the current save.

        Raises CheckpointError if it failed.
        """
        self._caller_error = sys.exception()
        try:
            if self._manager is not None:
                self._manager.wait_until_finished()
        except Exception as error:
            raise_if_peer_failure(error)
            raise self._save_error(error) from error
        self._loops.close()
        self._waiter = None
        if self._blocked_s is not None:
            blocked_s, self._blocked_s = self._blocked_s, None
            self._saved(self._saving[0], blocked_s)

    def close(self) -> None:
        """`wait`, then end Orbax's threads."""
        self.wait()
        if self._manager is not None:
            self._manager.close()
            self._manager = None

    def restore(
        self,
        abstract_state: Any,
        step: int | None = None,
        *,
        paddable: Callable[[str], bool] = lambda path: False,
        partial: bool = False,
        check: Callable[[Mapping[str, Any]], object] = lambda metadata: None,
    ) -> Restored:
        """Restore a checkpoint onto any mesh, and verify the checksum of every leaf.

        Args:
          abstract_state: pytree of jax.ShapeDtypeStruct, each with its target sharding.
          step: which checkpoint; None: the newest good one, with a warning for each one that is
            skipped.
          paddable: whether the leaf at a path may be cropped or zero-padded along its first
            dimension to the requested shape. Cropped rows must be zero, like the padding of a
            vocabulary.
          partial: whether to skip leaves that are not in `abstract_state` (sampling needs no
            moments); otherwise they are an error.
          check: called with the metadata of each candidate before its arrays are read; may raise.
        Raises:
          CheckpointError: there is no such checkpoint, none is good, or it is of another model or
            cannot be reached.
        """
        self.wait()
        steps = self.steps_for_all()
        damage = {}
        for candidate in reversed(steps) if step is None else [step] if step in steps else []:
            try:
                restored = replace(
                    read_checkpoint(
                        self._path(candidate), abstract_state, paddable, partial, check
                    ),
                    damaged=tuple(damage),
                )
            except DamagedError as error:
                damage[candidate] = str(error)
                if step is None:
                    self._warn(
                        f"the checkpoint of step {candidate} is damaged and skipped: {error}"
                    )
            except UnreachableError as error:
                raise self._unreachable(candidate, error) from error
            else:
                self._known_step = None if partial else candidate
                return restored
        raise CheckpointError(
            explain(
                "there is no good checkpoint" + ("" if step is None else f" of step {step}"),
                given=f"{self._directory}, steps {listed(steps)}"
                + "".join(f"\n    {at}: {why}" for at, why in damage.items()),
                do="choose another step, bring back the directory from a copy, or start a new run",
            )
        )

    def set_aside(self, steps: Iterable[int], folder: str = DAMAGED_DIR) -> list[Path]:
        """Move checkpoints into another directory for inspection, instead of deleting them.

        One process must call it, before any process saves.

        Args:
          folder: name of a directory next to `checkpoints`.
        Returns:
          The new paths. Checkpoints that cannot be moved stay, with a warning.
        """
        moved = []
        for step in steps:
            target = Path(self._directory).with_name(folder) / str(step)
            while target.exists():
                target = target.with_name(f"{target.name}+")
            try:
                target.parent.mkdir(exist_ok=True)
                os.rename(self._directory / str(step), target)
            except OSError as error:
                self._warn(
                    f"the checkpoint of step {step} cannot be moved to {target}:"
                    f" {error.strerror or error}"
                )
            else:
                moved.append(target)
        return moved

    def _unreachable(self, step: int, error: UnreachableError) -> CheckpointError:
        return CheckpointError(
            explain(
                f"the checkpoint of step {step} cannot be reached, and may be good",
                given=f"{self._directory / str(step)}: {error}",
                do="fix permissions or the disk, then try again",
            )
        )

    def _set_aside_unreadable(self) -> None:
        """Move checkpoints away that Orbax cannot list, because it lists all before the
        first save.
        """
        damaged = []
        for step in self.steps_for_all():
            try:
                on_every_process(
                    lambda step=step: check_descriptions(self._path(step)), self._path(step)
                )
            except DamagedError as error:
                damaged.append(step)
                self._warn(f"the checkpoint of step {step} is damaged: {error}")
            except UnreachableError:
                continue  # it may be good, and Orbax can save next to it
        if jax.process_index() == 0:
            for path in self.set_aside(damaged):
                self._warn(f"the damaged checkpoint is kept as {path}")
        if damaged:
            broadcast_from_0("")  # no process lists them before they are moved

    def _path(self, step: int) -> Path:
        return Path(self._directory / str(step))

    def _open_manager(self) -> ocp.CheckpointManager:
        if self._manager is None:
            self._remove_unfinished()
            self._set_aside_unreadable()
            policies: list[PreservationPolicy] = [
                LatestN(self._config.keep),
                _NewestUpTo(self._limits),
            ]
            if self._config.keep_every is not None:
                policies.append(EveryNSteps(self._config.keep_every))
            # With several hosts, replicas share the writing of a leaf. In one process that would
            # only compile a program per slice of every leaf (three seconds for a small model).
            arrays = ocp.type_handlers.ArrayHandler(use_replica_parallel=jax.process_count() > 1)
            handler = ocp.PyTreeCheckpointHandler(
                type_handler_registry=ocp.type_handlers.create_type_handler_registry(
                    (jax.Array, arrays)
                )
            )
            self._manager = ocp.CheckpointManager(
                self._directory,
                options=ocp.CheckpointManagerOptions(
                    preservation_policy=AnyPreservationPolicy(policies),
                    async_options=ocp.options.AsyncOptions(barrier_sync_fn=self._barrier),
                ),
                item_handlers={STATE: handler, MANIFEST: ocp.JsonCheckpointHandler()},
            )
        return self._manager

    def _barrier(self, *, key: str, timeout_ms: int) -> None:
        """Orbax's barrier between processes, which raises instead of waiting if this process has
        failed.

        Otherwise this process would wait for the others, which wait elsewhere for it, and none
        would report the error. The others learn of it from the watchdog when this process ends.
        """
        error = sys.exception()
        # Orbax calls this in a `finally` of a failed save
        if error is not None and error is not self._caller_error:
            raise error
        ocp.multihost.get_barrier_sync_fn()(key=key, timeout_ms=timeout_ms)

    def _remove_unfinished(self) -> None:
        """Remove the temporary files of a failed or killed save, which would fill the disk."""
        # after a failed write, others that are in progress may still add files
        deadline_s = time.monotonic() + 5
        while jax.process_index() == 0 and time.monotonic() < deadline_s:
            leftovers = list(self._directory.glob(f"*{atomicity_types.TMP_DIR_SUFFIX}"))
            if not leftovers:
                break
            for path in leftovers:
                shutil.rmtree(path, ignore_errors=True)

    def _save_error(self, error: Exception) -> CheckpointError:
        """The error for a failed save.

        Drops the manager, because its list of steps is wrong now. The next save opens a new one.
        """
        if self._manager is not None:
            with contextlib.suppress(Exception):  # the error that is about to be reported
                self._manager.close()
            self._manager = None
        self._loops.close()
        self._blocked_s = self._known_step = self._waiter = None
        try:
            free = f"{shutil.disk_usage(self._directory).free:,}"
        except OSError:
            free = "an unknown number"
        with contextlib.suppress(OSError):
            self._remove_unfinished()
        step, num_bytes = self._saving
        steps, reason = self.steps(), in_one_line(error)
        # A limit on the file size applies however much space is free.
        remedy = next(
            (do for number, do in _REMEDIES.items() if os.strerror(number) in reason),
            "see whether there is room, and whether it can be written",
        )
        return CheckpointError(
            explain(
                f"saving the checkpoint of step {step} failed: {reason}",
                given=(
                    f"{num_bytes:,} bytes to write before compression, {free} free, in"
                    f" {self._directory}"
                ),
                do=f"{remedy} or choose another run directory; "
                + (
                    f"the newest checkpoint is that of step {steps[-1]}"
                    if steps
                    else "there is no checkpoint yet"
                ),
            )
        )


def _chunks(name: str, leaf: jax.Array) -> ocp.SaveArgs:
    """How a shard of a leaf is divided on the disk: a large one of a stack by layers, and further
    if need be.

    A chunk is the least that can be read: without this a whole shard, even for one layer.
    """
    shard = leaf.sharding.shard_shape(leaf.shape)
    if math.prod(shard) * leaf.dtype.itemsize <= CHUNK_BYTES:
        return ocp.SaveArgs()
    return ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES, shard_axes=(0,) if is_stacked(name) else ())


def _wait_quietly(manager: ocp.CheckpointManager) -> None:
    with contextlib.suppress(BaseException):  # `wait` raises it again
        manager.wait_until_finished()
