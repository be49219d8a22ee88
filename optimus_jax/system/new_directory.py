"""A directory that appears under its name when it is complete, or not at all.

Its files are written into a hidden directory beside it, which is renamed at the end. A killed
process leaves the hidden one, and the next attempt removes it: who writes there holds a lock.
"""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from optimus_jax.errors import ConfigError, explain


def check_free(path: Path, *, what: str) -> None:
    """Raise ConfigError unless a directory can be made at a path: nothing is there, or an empty
    directory.

    Args:
      what: name of the flag, for errors.
    """
    with _explained(path, what):
        if path.is_dir() and not any(path.iterdir()):
            return
        if os.path.lexists(path):
            raise ConfigError(
                explain(
                    f"{what} names what exists, and nothing is overwritten",
                    given=path,
                    do="name a new directory, or remove what is there",
                )
            )


@contextmanager
def new_directory(path: Path, *, what: str) -> Iterator[Path]:
    """Within the context, the directory to write to. It has its name, and is on the disk, when the
    context ends; after an error it is removed.

    Args:
      path: the directory, absolute; `check_free` says whether it can be made.
      what: name of the flag, for errors.
    Raises:
      ConfigError: it cannot be made, or another process is making it.
    """
    check_free(path, what=what)
    hidden = path.with_name(f".{path.name}.unfinished")
    with _explained(path, what):
        hidden.mkdir(parents=True, exist_ok=True)
        lock = os.open(hidden, os.O_RDONLY)
    try:
        with _explained(path, what):
            _lock(lock, hidden, path, what)
            for left in hidden.iterdir():  # by a killed process
                shutil.rmtree(left) if left.is_dir() else left.unlink()
        try:
            yield hidden
            with _explained(path, what):
                for each in [*hidden.iterdir(), hidden]:
                    _sync(each)
                os.rename(hidden, path)
                _sync(path.parent)
        except BaseException:
            shutil.rmtree(hidden, ignore_errors=True)
            raise
    finally:
        os.close(lock)


def _lock(descriptor: int, hidden: Path, path: Path, what: str) -> None:
    """Hold the hidden directory until its descriptor is closed. Raises ConfigError if another
    process does.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_same = os.path.samestat(os.fstat(descriptor), os.stat(hidden))
    except (BlockingIOError, FileNotFoundError):
        is_same = False
    except OSError:  # a file system without locks
        is_same = True
    if not is_same:
        raise ConfigError(
            explain(
                "another process is writing this directory",
                given=f"{what} {path}",
                do="wait until it has ended, or name another directory",
            )
        )


def _sync(path: Path) -> None:
    """Wait until a file or directory is on the disk, so that a power cut leaves it whole."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:
        if not path.is_dir():  # not every file system does it for directories
            raise
    finally:
        os.close(descriptor)


@contextmanager
def _explained(path: Path, what: str) -> Iterator[None]:
    """Turns errors of the system into a ConfigError."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            explain(
                f"{what} cannot be written: {error.strerror or error}",
                given=path,
                do="name a directory that can be written, with enough room",
            )
        ) from error
