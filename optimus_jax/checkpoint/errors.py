"""What an error means that comes up while Orbax and TensorStore read or write a checkpoint: whose
trouble it is, in one line.

A damaged checkpoint is passed over for an older one; one that cannot be reached may be good; and
what another process or the network did says nothing about either.
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
    """A checkpoint lacks something, or holds something else than was saved."""


class UnreachableError(Exception):
    """The machine, not the checkpoint, is why it cannot be read."""


PATIENCE_S = 60.0
"""For a file server to show all hosts the same files: what it tells of a directory may be so
old."""
_POLL_S = 2.0
_GOOD, _DAMAGED, _UNREACHABLE = range(3)
"""How reading went on one process; the largest counts."""
_UNREACHABLE_IN_TENSORSTORE = (
    "PERMISSION_DENIED",
    "UNAVAILABLE",
    "DEADLINE_EXCEEDED",
    "RESOURCE_EXHAUSTED",
    "Input/output error",
)
"""TensorStore raises ValueError for everything; these of its words are the machine's trouble."""


def on_every_process(read: Callable[[], T], directory: Path) -> T:
    """What `read` returns; DamagedError on every process if it fails on one, so that all fall back
    together.

    Processes that do not see the same files in `directory`, which belong to what is read, try again
    for PATIENCE_S.

    Raises UnreachableError, on every process too, if one cannot get at the files.
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


def _try_read(read: Callable[[], T]) -> tuple[int, str, Any]:
    """How it went, why, and what came of it."""
    try:
        return _GOOD, "", read()
    except MemoryError:
        raise
    except DamagedError as error:
        return _DAMAGED, str(error), None
    except Exception as error:
        if is_runtime_error(error):  # the machine's trouble, not the checkpoint's
            raise
        return _UNREACHABLE if _is_unreachable(error) else _DAMAGED, in_one_line(error), None


def _view(directory: Path) -> int:
    """Of names and sizes of all files there: 31 bits that are the same in who sees the same."""
    try:
        files = sorted(
            f"{path.relative_to(directory)} {path.stat().st_size}"
            for path in directory.rglob("*")
            if path.is_file()
        )
    except OSError:  # one has gone between name and size
        return 0
    return zlib.crc32("\n".join(files).encode()) & 0x7FFFFFFF


def raise_if_peer_failure(error: Exception) -> None:
    """Raise what is at the root of an error if that says that another process or the network has
    failed, and nothing of the disk.
    """
    root = _root(error)
    if jax.process_count() > 1 and is_runtime_error(root):
        raise root


def _is_unreachable(error: BaseException) -> bool:
    """Whether an error of reading says nothing about what is on the disk."""
    root = _root(error)
    if isinstance(root, OSError):
        return not isinstance(root, FileNotFoundError | NotADirectoryError | IsADirectoryError)
    return any(word in str(root) for word in _UNREACHABLE_IN_TENSORSTORE)


class _FinishingLoop(asyncio.SelectorEventLoop):
    """Ends what is under way before it closes."""

    def close(self) -> None:
        async def finish() -> None:
            while others := asyncio.all_tasks() - {asyncio.current_task()}:  # which may start more
                await asyncio.gather(*others, return_exceptions=True)

        if not self.is_closed():
            self.run_until_complete(finish())
        super().close()


@contextlib.contextmanager
def event_loops_that_finish() -> Iterator[None]:
    """After one failed read or write Orbax closes its event loop while others are under way.

    Each of those would print a traceback for not finding the loop again: pages of them around the
    one warning that matters.
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
    """The error at the root in one line: TensorStore adds pages of its specification, and long
    paths.
    """
    error = _root(error)
    text = (str(error).splitlines() or [""])[0].split(" [tensorstore_spec")[0]
    return f"{type(error).__name__}: " + (
        text if len(text) <= 300 else f"{text[:100]} ... {text[-200:]}"
    )
