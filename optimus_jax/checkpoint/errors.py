"""Classify errors of Orbax and TensorStore.

The cause is a damaged checkpoint, one that cannot be reached, or a failure of another process or
the network.

A damaged checkpoint is skipped in favour of an older one. One that cannot be reached may be good. A
failure of another process says nothing about the checkpoint.
"""

import asyncio
import contextlib
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import jax

from optimus_jax.cluster.distributed import gather_from_all, is_runtime_error

T = TypeVar("T")


class DamagedError(Exception):
    """A checkpoint is incomplete, or differs from what was saved."""


class UnreachableError(Exception):
    """A checkpoint cannot be read because of a problem with the machine, and may be good."""


PATIENCE_S = 60.0
"""How long a file server may take to show all hosts the same files, since its listings may be
cached."""
_POLL_S = 2.0
_GOOD, _DAMAGED, _UNREACHABLE = range(3)
"""Result of reading on one process. The largest over all processes is used."""
_UNREACHABLE_IN_TENSORSTORE = (
    "PERMISSION_DENIED",
    "UNAVAILABLE",
    "DEADLINE_EXCEEDED",
    "RESOURCE_EXHAUSTED",
    "Input/output error",
)
"""TensorStore raises ValueError for all errors. These words mean that the machine is the cause."""


def on_every_process(read: Callable[[], T], directory: Path) -> T:
    """Return `read()`; if it fails on one process, raise DamagedError on all.

    So all processes fall back to an older checkpoint together.

    While processes see different files in `directory`, from which `read` reads, it is repeated for
    up to PATIENCE_S.

    Raises UnreachableError on every process if one of them cannot reach the files.
    """
    until_s = time.monotonic() + PATIENCE_S
    while True:
        code, reason, result = _try_read(read)
        worst = max(gather_from_all(code))
        if worst > code:
            reason = "another process cannot read it"
        if worst == _GOOD:
            return result
        if worst == _UNREACHABLE:
            raise UnreachableError(reason)
        views = gather_from_all(_view(directory))
        if len(set(views)) == 1:
            raise DamagedError(reason)
        if any(gather_from_all(int(time.monotonic() > until_s))):
            other = next(process for process, view in enumerate(views) if view != views[0])
            raise UnreachableError(f"process {other} does not see the files that process 0 sees")
        time.sleep(_POLL_S)


def on_this_process(read: Callable[[], T]) -> T:
    """Return `read()`, without a word to other processes.

    Raises DamagedError or UnreachableError if it fails.
    """
    code, reason, result = _try_read(read)
    if code == _GOOD:
        return result
    raise (UnreachableError if code == _UNREACHABLE else DamagedError)(reason)


def _try_read(read: Callable[[], T]) -> tuple[int, str, Any]:
    """The code, the reason of a failure, and the result of `read`."""
    try:
        return _GOOD, "", read()
    except MemoryError:
        raise
    except DamagedError as error:
        return _DAMAGED, str(error), None
    except Exception as error:
        if is_runtime_error(error):  # the machine is the cause, not the checkpoint
            raise
        return _UNREACHABLE if _is_unreachable(error) else _DAMAGED, in_one_line(error), None


def _view(directory: Path) -> int:
    """A 31-bit hash of the names and sizes of all files in a directory."""
    try:
        files = sorted(
            f"{path.relative_to(directory)} {path.stat().st_size}"
            for path in directory.rglob("*")
            if path.is_file()
        )
    except OSError:  # a file was deleted between listing it and reading its size
        return 0
    return zlib.crc32("\n".join(files).encode()) & 0x7FFFFFFF


def raise_if_peer_failure(error: Exception) -> None:
    """Raise the root cause of an error if another process or the network failed, not the disk."""
    root = _root(error)
    if jax.process_count() > 1 and is_runtime_error(root):
        raise root


def _is_unreachable(error: BaseException) -> bool:
    """Whether a read error comes from the machine and says nothing about the files."""
    root = _root(error)
    if isinstance(root, OSError):
        return not isinstance(root, FileNotFoundError | NotADirectoryError | IsADirectoryError)
    return any(word in str(root) for word in _UNREACHABLE_IN_TENSORSTORE)


class _FinishingLoop(asyncio.SelectorEventLoop):
    """An event loop that finishes its pending tasks before it closes."""

    def close(self) -> None:
        async def finish() -> None:
            while others := asyncio.all_tasks() - {asyncio.current_task()}:  # which may start more
                await asyncio.gather(*others, return_exceptions=True)

        if not self.is_closed():
            self.run_until_complete(finish())
        super().close()


@contextlib.contextmanager
def event_loops_that_finish() -> Iterator[None]:
    """Make event loops that are created in the body finish their pending tasks before they close.

    After a failed read or write, Orbax closes its event loop while other tasks are pending. Each of
    them would print a traceback around the one warning that matters.
    """
    plain, asyncio.new_event_loop = asyncio.new_event_loop, _FinishingLoop
    try:
        yield
    finally:
        asyncio.new_event_loop = plain


def _root(error: BaseException) -> BaseException:
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def in_one_line(error: BaseException) -> str:
    """The root cause in one line: without TensorStore's specification, and shortened if long."""
    error = _root(error)
    text = (str(error).splitlines() or [""])[0].split(" [tensorstore_spec")[0]
    return f"{type(error).__name__}: " + (
        text if len(text) <= 300 else f"{text[:100]} ... {text[-200:]}"
    )
