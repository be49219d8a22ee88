"""Find, create, share and mirror the directory of a run.

Process 0 alone writes it. The directory of a run at a URL is local and is uploaded as it grows.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from optimus_jax.cluster.distributed import broadcast_from_0, is_writer
from optimus_jax.cluster.launch_detection import Launch
from optimus_jax.config import Config
from optimus_jax.errors import FaultError, RunDirectoryError, StoreError
from optimus_jax.faults.stopping import ImmediateStop
from optimus_jax.run.stored_run import StoredRun
from optimus_jax.run_directory.directory import RunDirectory, RunExistsError
from optimus_jax.run_directory.lock import LockedError
from optimus_jax.store.lease import LeaseHeldError
from optimus_jax.store.mirror import Mirror
from optimus_jax.system.paths import UserPath, user_path
from optimus_jax.system.resilient_io import print_to_stderr
from optimus_jax.training.trainer import Reason
from optimus_jax.training.watchers import Display

T = TypeVar("T")

PATIENCE_S = 120.0
"""Seconds to wait for the lock of another writer. If a writer's host dies, a file server may hold
its lock for a lease of 90 s."""


def locate(
    run_dir: UserPath | None, base: Config | UserPath | None, overrides: dict[str, Any]
) -> tuple[StoredRun | None, Path | None]:
    """The stored run, if `run_dir` is a URL, and the local directory; None for a new one."""
    path = None if run_dir is None else user_path(run_dir, what="--run-dir")
    if path is None or isinstance(path, Path):
        return None, path
    given = {name: value for name, value in overrides.items() if name == "store.local_dir"}
    config = (base if isinstance(base, Config) else Config()).with_values(given)
    stored = StoredRun.at(path, config.store.local_dir)
    return stored, stored.directory


def new_directory(
    run_dir: Path | None, config: Config, launch: Launch, display: Display, is_auto: bool
) -> RunDirectory | None:
    """A new run directory, created by process 0; None in other processes if only process 0 knows
    its path."""
    if is_writer():
        return open_as_writer(
            partial(RunDirectory.create, run_dir, config.model.name, warn=display.message),
            launch,
            is_auto,
        )
    return None if run_dir is None else RunDirectory(run_dir, writer=False)


def open_as_writer(open_it: Callable[..., T], launch: Launch, is_auto: bool) -> T:
    """Open the run directory or the store for writing, in process 0.

    Raises FaultError, so that the launcher restarts the job, if another process still writes there:
    a previous attempt that is about to end, or has just ended.
    """
    try:
        return open_it(patience_s=PATIENCE_S if is_auto else 0.0)
    except (LockedError, LeaseHeldError, RunExistsError) as error:
        if is_auto and launch.restarts:
            raise FaultError(str(error)) from error
        raise


def share_directory(run: RunDirectory | None, run_dir: Path | None) -> RunDirectory:
    """The run directory in every process: process 0 broadcasts its path if the user gave none.
    Every process must call this.
    """
    if run is not None and run_dir is not None:
        return run
    path = broadcast_from_0("" if run is None else str(run.path))
    return RunDirectory(path, writer=False) if run is None else run


def start_mirror(
    stored: StoredRun,
    run: RunDirectory,
    config: Config,
    resume: bool,
    display: Display,
    *,
    patience_s: float,
) -> Mirror:
    """Start uploading a run.

    If another writer takes over, the run saves its state and ends, as if its log could not be
    written.
    """

    def on_lost(error: RunDirectoryError) -> None:
        run.failure = run.failure or error

    mirror = stored.mirror(
        config.checkpoint,
        config.store,
        is_resumed=resume,
        warn=display.message,
        on_lost=on_lost,
        patience_s=patience_s,
    )
    run.address = str(stored.url)
    display.message(
        f"the run is stored at {stored.url}; its local directory {run.path} is uploaded as it grows"
    )
    return mirror


def finish_upload(mirror: Mirror | None, reason: Reason, display: Display) -> None:
    """Upload what is left. Raises StoreError if that fails, or FaultError if the run will be
    restarted anyway.
    """
    if mirror is None:
        return
    try:
        mirror.finish(display.message)
    except StoreError as error:
        if reason == "terminate":
            raise FaultError(str(error)) from error
        raise


def upload_after_error(mirror: Mirror, error: BaseException, run: RunDirectory | None) -> None:
    """Upload what is left after `error` ended the run, which stays the reported error. A user who
    interrupted twice does not wait for the upload.
    """
    if isinstance(error, ImmediateStop):
        mirror.abandon()
        print_to_stderr(
            "files that are not uploaded yet are in"
            f" {run.path if run else 'the local directory'}; --resume uploads them"
        )
        return
    try:
        mirror.finish(print_to_stderr)
    except StoreError as late:
        if not mirror.is_lost:
            error.add_note(str(late))
