"""The lock that allows one writer per run; it is released when its process ends."""

import contextlib
import errno
import fcntl
import os
import socket
import time
import warnings
from collections.abc import Callable
from pathlib import Path

from optimus_jax.errors import RunDirectoryError, explain

POLL_S = 1.0
"""Interval between two tries."""
LOOK_S = 0.05
"""A lock that is held for less is that of `is_held`, which lets go at once."""


class LockedError(RunDirectoryError):
    """Another process holds the run's lock."""


class RunLock:
    """An `flock` on a file in the run's directory, held from construction until `release` or the
    end of the process.

    The system drops an `flock` however its holder ends, so locks never become stale; the file stays
    and names the last holder. A second lock in this process is refused like that of another
    process.

    On network file systems: NFS (Linux, version 4, or 3 with its lock daemon) and Lustre mounted
    with `flock` also lock against other machines. Mounts with local locks (`local_lock`, Lustre's
    `localflock`) lock against processes of the same machine only. Without lock support the run
    continues unlocked, with a warning.

    After a host dies, an NFS server may keep its locks for a while (the lease of version 4, often
    90 s): automatic restarts should set `patience_s`.

    Args:
      path: the lock's file; its directory exists.
      warn: called if the file system has no locks, or while waiting for another holder.
      patience_s: how long to wait for another holder.
    Raises:
      LockedError: another process holds it.
      RunDirectoryError: the file cannot be written.
    """

    def __init__(
        self, path: Path, warn: Callable[[str], object] = warnings.warn, patience_s: float = 0.0
    ) -> None:
        try:
            self._file: int | None = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise RunDirectoryError(
                explain(
                    "the run directory cannot be written",
                    given=f"{path}: {error.strerror}",
                    do="fix its permissions, or choose another --run-dir",
                )
            ) from error
        try:
            self._lock(self._file, path, warn, time.monotonic() + max(patience_s, LOOK_S))
            if not _is_same_file(
                path, self._file
            ):  # its holder has removed the file and its new run
                raise BlockingIOError
        except BlockingIOError as error:
            holder = os.pread(self._file, 200, 0).decode(errors="replace").strip()
            self.release()
            raise LockedError(
                explain(
                    "another process is writing this run",
                    given=f"{path.parent}, in use by {holder or 'a process that has just begun'}",
                    do="wait for it or stop it, or choose another --run-dir",
                )
            ) from error
        except OSError as error:
            warn(
                f"{path}: no lock ({errno.errorcode.get(error.errno or 0, error)}), so nothing"
                " keeps a second process out of this run"
            )
            return
        # on a full disk the lock holds, but does not name its holder
        with contextlib.suppress(OSError):
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)

    @staticmethod
    def _lock(file: int, path: Path, warn: Callable[[str], object], until_s: float) -> None:
        """Raises BlockingIOError if another process still holds it at `until_s`."""
        is_announced = False
        while True:
            try:
                return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                left_s = until_s - time.monotonic()
                if left_s <= 0:
                    raise
                if not is_announced and left_s > LOOK_S:
                    warn(
                        f"{path.parent} is locked by another process, or by one that has just died:"
                        f" waiting up to {left_s:.0f} s for it"
                    )
                    is_announced = True
                time.sleep(min(POLL_S, left_s))

    def release(self) -> None:
        """Release the lock; a second call does nothing."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


def is_held(path: Path) -> bool | None:
    """Whether a process holds the lock in a file; None: it cannot be known, as without a file or
    locks, or if the last holder was on another machine, whose lock this one may not see.
    """
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        holder = os.pread(file, 200, 0).decode(errors="replace").strip()
        return False if holder.endswith(f" on {socket.gethostname()}") else None
    except BlockingIOError:
        return True
    except OSError:
        return None
    finally:
        os.close(file)


def _is_same_file(path: Path, file: int) -> bool:
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except FileNotFoundError:
        return False
