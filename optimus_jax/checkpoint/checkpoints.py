"""Save a state; restore it onto any mesh.

A checkpoint is a directory named after its step, written by Orbax under a temporary name and
renamed when it is whole. It holds
* `state`: every leaf of the state by its path (`named_leaves`), so what is on disk does not
  depend on Python classes; each process writes the shards it has;
* `manifest`: JSON with the caller's metadata, the shape, dtype and checksum of every leaf, and
  a checksum of that text itself.

Three kinds of trouble are kept apart. A *damaged* checkpoint (truncated, pieces missing, a checksum
that differs) is passed over for an older one. A checkpoint of *another model* is an error: to
fall back from it would only hide the wrong config. So is one that *cannot be reached* (permissions,
a network disk that does not answer): it may be good, and a run that went on from an older one would
delete it.

Importing this takes a quarter of a second beyond JAX, nearly all of it Orbax.
"""

import contextlib
import errno
import json
import logging
import os
import shutil
import sys
import threading
import time
import warnings
import zlib
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
    raise_if_of_others,
)
from optimus_jax.cluster.distributed import broadcast_from_0
from optimus_jax.config import CheckpointConfig
from optimus_jax.errors import CheckpointError, explain
from optimus_jax.reshard.checksum import check_arrays, checksums, named_leaves
from optimus_jax.system.json_input import JSONInputError, parse_json

_REMEDIES = {
    errno.EFBIG: "raise the limit on the size of a file (ulimit -f)",
    errno.ENOSPC: "make room",
    errno.EDQUOT: "make room within the quota",
    errno.ENOENT: "see whether somebody has removed or unmounted it",
    errno.EACCES: "mend its permissions",
    errno.EPERM: "mend its permissions",
    errno.EROFS: "mount it so that it can be written",
    errno.ENOTDIR: "remove the file that has taken its place",
}
"""By what the system says: what to do about a save that has failed."""
STATE = "state"
MANIFEST = "manifest"
STEP_METADATA = "_CHECKPOINT_METADATA"
ORBAX_JSON = (STEP_METADATA, f"{STATE}/_METADATA", f"{STATE}/_sharding")
"""Files of a checkpoint in which Orbax describes it; each is a JSON object."""
ASIDE, ABANDONED = "damaged", "abandoned"
"""Beside the directory of checkpoints: those that were found to be damaged, and those of a course
that the run was told to leave."""

# Orbax tells every phase of every save at level INFO, which a program that logs at INFO would show;
# and every error with pages of traceback, once for each thread that it passes, although it raises
# it as well and we report it.
logging.getLogger("absl").setLevel(logging.CRITICAL)


@dataclass(frozen=True, kw_only=True)
class Saved:
    """A checkpoint, as its manifest describes it."""

    step: int
    metadata: dict[str, Any]
    """What the caller gave to `save`, as JSON values."""


@dataclass(frozen=True, kw_only=True)
class Restored(Saved):
    """A checkpoint with its state on devices."""

    state: Any
    damaged: tuple[int, ...] = ()
    """Steps of newer checkpoints that were passed over."""


class NotFiniteError(CheckpointError):
    """A state is not saved, for some of it is not finite: nobody could go on from it."""

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
    """Keeps, of the checkpoints that are not later than a limit, the newest; for each of the
    limits.
    """

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

    With several processes, each calls the same methods in the same order.

    Reading leaves the directory as it is; the first `save` creates it. Call `close` at the end.

    Args:
      directory: where checkpoints are; nothing is written elsewhere.
      config: how many are kept.
      warn: told what happened to a checkpoint when the run goes on regardless.
      saved: told, by the next call of any method that waits, that a save is complete: its step, and
        for how many seconds `save` kept its caller.
      limits: steps of which the newest checkpoint that is not later outlives its turn; the same in
        every process.
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
        self._held: int | None = None
        """Step of the state that was last saved, or read, here."""
        self._end: threading.Thread | None = None
        """Ends when the save under way does."""
        self._saving = (0, 0)  # step and bytes of the newest save
        self._blocked_s: float | None = None  # of the save under way
        self._loops = contextlib.ExitStack()
        self._outside: BaseException | None = None
        """What whoever called is handling, and is none of a save's business: a state may be saved
        because something else has failed."""

    def steps(self) -> list[int]:
        """Steps of all complete checkpoints, oldest first."""
        return sorted(
            found.step for found in ocp.path.step.standard_name_format().find_all(self._directory)
        )

    def steps_for_all(self) -> list[int]:
        """As the first process sees them: what a file server tells others of a directory may be a
        minute old.
        """
        return json.loads(broadcast_from_0(json.dumps(self.steps())))

    def holds(self, step: int) -> bool:
        """Whether the state after `step` was saved by this object, as far as is known, or read by
        it; the same answer in every process.
        """
        return self._held == step

    def latest(self, step: int | None = None) -> Saved | None:
        """The newest checkpoint whose manifest is good, or that of `step`; its arrays are not read.

        Raises CheckpointError if one cannot be reached.
        """
        for step in reversed(
            [found for found in self.steps_for_all() if step is None or found == step]
        ):
            try:
                return Saved(step=step, metadata=self._manifest(step)["metadata"])
            except DamagedError:
                continue
            except UnreachableError as error:
                raise self._unreachable(step, error) from error
        return None

    def save(self, step: int, state: Any, metadata: Mapping[str, Any]) -> None:
        """Start to save; the files are written while the caller goes on.

        Waits for the save before. Checkpoints of `step` and of later steps belong to a course that
        this run has left (damaged ones among them) and are deleted, with a warning.

        Args:
          step: steps done.
          state: pytree of jax.Arrays. It may be donated or deleted once this returns: Orbax
            copies to the host before it returns (`transfer_arrays_to_host`), and where the CPU's
            "copy" is the buffer itself, the reference which the writer holds keeps it unchanged.
          metadata: anything that JSON holds; read back by `restore` and `latest`.
        Raises:
          NotFiniteError: some of the state is not finite; nothing was written.
          CheckpointError: this save cannot start, or the one before it failed. Then this one has
            not started, and trying again is safe.
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
            # until `wait` has seen the end of this save
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
                        STATE: ocp.args.PyTreeSave(leaves),
                        MANIFEST: ocp.args.JsonSave(
                            {"content": manifest, "crc32": _crc32(manifest)}
                        ),
                    }
                ),
            )
        except Exception as error:
            raise_if_of_others(error)
            raise self._failure(error) from error
        self._end = threading.Thread(
            target=_await_end, args=(manager,), name="save ends", daemon=True
        )
        self._end.start()
        self._blocked_s, self._held = time.perf_counter() - started, step

    @property
    def has_ended(self) -> bool:
        """Whether the save under way has ended, well or not: `wait` says which, and nobody
        waits."""
        return self._end is not None and not self._end.is_alive()

    def wait(self) -> None:
        """Return when nothing is being written any more.

        Raises CheckpointError if the save under way failed.
        """
        self._outside = sys.exception()
        try:
            if self._manager is not None:
                self._manager.wait_until_finished()
        except Exception as error:
            raise_if_of_others(error)
            raise self._failure(error) from error
        self._loops.close()
        self._end = None
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
        """Read a checkpoint onto any mesh and check every leaf against the checksum it was saved
        with.

        Args:
          abstract_state: pytree of jax.ShapeDtypeStruct, each with its target sharding.
          step: which checkpoint; None: the newest good one, with a warning for each that is passed
            over.
          paddable: whether the leaf of a path may be cropped, or padded with zeros, to the shape
            asked for along its first dimension. What is cropped must be zero, as the rows that pad
            a vocabulary are.
          partial: whether leaves that `abstract_state` does not have are left unread (sampling
            needs no moments); otherwise they are an error.
          check: is shown the metadata of each candidate before its arrays are read; may raise.
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
                    self._read(candidate, abstract_state, paddable, partial, check),
                    damaged=tuple(damage),
                )
            except DamagedError as error:
                damage[candidate] = str(error)
                if step is None:
                    self._warn(
                        f"the checkpoint of step {candidate} is damaged and passed over: {error}"
                    )
            except UnreachableError as error:
                raise self._unreachable(candidate, error) from error
            else:
                self._held = None if partial else candidate
                return restored
        raise CheckpointError(
            explain(
                "there is no good checkpoint" + ("" if step is None else f" of step {step}"),
                given=f"{self._directory}, steps {_listed(steps)}"
                + "".join(f"\n    {at}: {why}" for at, why in damage.items()),
                do="choose another step, bring back the directory from a copy, or start a new run",
            )
        )

    def set_aside(self, steps: Iterable[int], folder: str = ASIDE) -> list[Path]:
        """Move checkpoints out of the way, where somebody may look at them; nothing is deleted.

        One process does it, before anyone saves.

        Args:
          folder: beside the directory of checkpoints; says why.
        Returns:
          Where they are now. Those that cannot be moved stay, with a warning.
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
                do="mend permissions or the disk, then try again",
            )
        )

    def _read(
        self,
        step: int,
        abstract_state: Any,
        paddable: Callable[[str], bool],
        partial: bool,
        check_metadata: Callable[[Mapping[str, Any]], object],
    ) -> Restored:
        manifest = self._manifest(step)
        check_metadata(manifest["metadata"])
        asked = named_leaves(abstract_state)
        saved = {
            name: leaf for name, leaf in manifest["leaves"].items() if name in asked or not partial
        }
        check_same_model(step, saved, asked, paddable)
        restore_args = {
            name: ocp.ArrayRestoreArgs(
                sharding=leaf.sharding, global_shape=leaf.shape, strict=not paddable(name)
            )
            for name, leaf in asked.items()
        }
        with event_loops_that_finish():
            state = on_every_process(
                lambda: ocp.PyTreeCheckpointHandler().restore(
                    self._directory / str(step) / STATE,
                    args=ocp.args.PyTreeRestore(
                        asked, restore_args=restore_args, partial_restore=partial
                    ),
                ),
                self._path(step),
            )

        def check() -> None:
            wrong = [
                name for name, value in checksums(state).items() if value != saved[name]["checksum"]
            ]
            if wrong:
                raise DamagedError(f"the checksum of {_listed(wrong)} is not what was saved")

        on_every_process(check, self._path(step))
        leaves = [state[name] for name in asked]
        return Restored(
            step=step,
            metadata=manifest["metadata"],
            state=jax.tree.unflatten(jax.tree.structure(abstract_state), leaves),
        )

    def _manifest(self, step: int) -> dict[str, Any]:
        def read() -> dict[str, Any]:
            stored = ocp.JsonCheckpointHandler().restore(self._directory / str(step) / MANIFEST)
            if stored["crc32"] != _crc32(stored["content"]):
                raise ValueError("the manifest is not what was saved")
            self._check_descriptions(step)
            return stored["content"]

        return on_every_process(read, self._path(step))

    def _check_descriptions(self, step: int) -> None:
        """Raise DamagedError or OSError unless what Orbax wrote of a checkpoint beside its arrays
        says what it should.

        Orbax itself passes over some of that when it reads arrays, and cannot save beside it.
        """
        for name in ORBAX_JSON:
            path = self._path(step) / name
            if not os.path.lexists(path):
                continue  # other versions of Orbax write other files
            try:
                is_object = isinstance(parse_json(path.read_bytes(), finite=False), dict)
            except JSONInputError as error:
                raise DamagedError(f"{name} is not JSON: {error}") from error
            if not is_object:
                raise DamagedError(f"{name} is not a JSON object")
            if name == STEP_METADATA:
                try:
                    ocp.metadata.get_step_metadata(self._directory / str(step))
                except (ValueError, TypeError) as error:
                    raise DamagedError(
                        f"{name} does not describe a checkpoint: {in_one_line(error)}"
                    ) from error

    def _set_aside_unreadable(self) -> None:
        """Move checkpoints out of the way that Orbax could not list, which it does before the first
        save.
        """
        damaged = []
        for step in self.steps_for_all():
            try:
                on_every_process(lambda step=step: self._check_descriptions(step), self._path(step))
            except DamagedError as error:
                damaged.append(step)
                self._warn(f"the checkpoint of step {step} is damaged: {error}")
            except UnreachableError:
                continue  # it may be good, and Orbax can save beside it
        if jax.process_index() == 0:
            for path in self.set_aside(damaged):
                self._warn(f"the damaged checkpoint is kept as {path}")
        if damaged:
            broadcast_from_0("")  # nobody lists them before they have moved

    def _path(self, step: int) -> Path:
        return Path(self._directory / str(step))

    def _open_manager(self) -> ocp.CheckpointManager:
        if self._manager is None:
            self._remove_unfinished()
            self._set_aside_unreadable()
            kept: list[PreservationPolicy] = [LatestN(self._config.keep), _NewestUpTo(self._limits)]
            if self._config.keep_every is not None:
                kept.append(EveryNSteps(self._config.keep_every))
            # Replicas on several hosts share the writing of a leaf; in one process that only costs
            # a compilation for every slice of every leaf (three seconds before the first save of a
            # small model).
            arrays = ocp.type_handlers.ArrayHandler(use_replica_parallel=jax.process_count() > 1)
            handler = ocp.PyTreeCheckpointHandler(
                type_handler_registry=ocp.type_handlers.create_type_handler_registry(
                    (jax.Array, arrays)
                )
            )
            self._manager = ocp.CheckpointManager(
                self._directory,
                options=ocp.CheckpointManagerOptions(
                    preservation_policy=AnyPreservationPolicy(kept),
                    async_options=ocp.options.AsyncOptions(barrier_sync_fn=self._meet),
                ),
                item_handlers={STATE: handler, MANIFEST: ocp.JsonCheckpointHandler()},
            )
        return self._manager

    def _meet(self, *, key: str, timeout_ms: int) -> None:
        """Orbax's barrier between the processes that write a checkpoint, but not for one that has
        failed: it would wait there for the others, who wait elsewhere for it, and nobody would
        learn why. They learn it from the watchdog when this process ends.
        """
        error = sys.exception()
        # Orbax is on its way out of a save, by a `finally`
        if error is not None and error is not self._outside:
            raise error
        ocp.multihost.get_barrier_sync_fn()(key=key, timeout_ms=timeout_ms)

    def _remove_unfinished(self) -> None:
        """Remove what a save that failed or was killed has left, which would go on filling the
        disk.
        """
        # where one write has failed, others under way may still add files
        deadline_s = time.monotonic() + 5
        while jax.process_index() == 0 and time.monotonic() < deadline_s:
            leftovers = list(self._directory.glob(f"*{atomicity_types.TMP_DIR_SUFFIX}"))
            if not leftovers:
                break
            for path in leftovers:
                shutil.rmtree(path, ignore_errors=True)

    def _failure(self, error: Exception) -> CheckpointError:
        """What to raise for a save that failed.

        The next takes a new manager: this one's list of steps is wrong.
        """
        if self._manager is not None:
            with contextlib.suppress(Exception):  # the error that we are about to report
                self._manager.close()
            self._manager = None
        self._loops.close()
        self._blocked_s = self._held = self._end = None
        try:
            free = f"{shutil.disk_usage(self._directory).free:,}"
        except OSError:
            free = "an unknown number"
        with contextlib.suppress(OSError):
            self._remove_unfinished()
        step, num_bytes = self._saving
        steps, reason = self.steps(), in_one_line(error)
        # A limit on the size of a file is met however much room there is.
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


def check_same_model(
    step: int, saved: Mapping[str, Any], asked: Mapping[str, Any], paddable: Callable[[str], bool]
) -> None:
    """Raises CheckpointError, naming the first leaf which is not in both or has another shape or
    dtype.
    """
    for name in [*asked, *saved]:
        have = (saved[name]["dtype"], tuple(saved[name]["shape"])) if name in saved else None
        want = (asked[name].dtype.name, tuple(asked[name].shape)) if name in asked else None
        padded = (
            have and want and paddable(name) and have[0] == want[0] and have[1][1:] == want[1][1:]
        )
        if have != want and not padded:
            saved_as, asked_as = (
                f"{leaf[0]}{list(leaf[1])}" if leaf else "no such leaf" for leaf in (have, want)
            )
            raise CheckpointError(
                explain(
                    f"the checkpoint of step {step} is of another model: leaf {name!r} differs",
                    given=f"saved {saved_as}, asked for {asked_as}",
                    do=(
                        "use the model, optimizer and precision.moments of the run that saved it,"
                        " or start a new run"
                    ),
                )
            )


def _await_end(manager: ocp.CheckpointManager) -> None:
    with contextlib.suppress(BaseException):  # raised again for who waits
        manager.wait_until_finished()


def _crc32(content: Any) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


def _listed(items: Iterable[object]) -> str:
    return ", ".join(map(str, items)) or "none"
