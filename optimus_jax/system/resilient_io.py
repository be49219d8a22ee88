"""Standard streams that survive the loss of their reader: when a terminal is closed, or `tee` or
`head` exits, the run continues, or finishes saving.
"""

import contextlib
import functools
import io
import os
import stat
import sys
import threading
from collections.abc import Iterable, Iterator
from typing import Any, TextIO, cast

from optimus_jax.errors import OutputError, explain

FLUSH_TIMEOUT_S = 5.0
"""Time limit for writing a last message to standard error: its reader may have stopped."""


def print_to_stderr(text: str) -> None:
    """Print a message on standard error at once."""
    print(text, file=sys.stderr, flush=True)


def flush_with_timeout(text: str, *, after: Iterable[TextIO] = ()) -> None:
    """Write to standard error from any thread, within FLUSH_TIMEOUT_S: for a process that is
    exiting, or a thread that others wait for.

    Args:
      after: streams to flush first.
    """

    def write() -> None:
        left = text.encode(errors="replace")
        with contextlib.suppress(OSError):
            for stream in after:
                stream.flush()
            while left:
                left = left[os.write(2, left) :]

    thread = threading.Thread(target=write, name="flush", daemon=True)
    thread.start()
    thread.join(FLUSH_TIMEOUT_S)


@functools.cache
def nonblocking_stderr() -> int:
    """A non-blocking file descriptor for emergency messages of C code: what a full pipe or a
    stopped terminal does not accept is lost.
    """
    try:
        mode = os.fstat(2).st_mode
        if stat.S_ISREG(mode):  # writing to a regular file never blocks on a reader
            return 2
        # reopened, so that other users of the descriptor keep blocking writes
        if stat.S_ISFIFO(mode) or stat.S_ISCHR(mode):
            return os.open(
                "/proc/self/fd/2", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
            )
    except OSError:
        pass
    return os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)


def open_closed_streams() -> None:
    """Redirect closed standard streams (`>&-`) to /dev/null.

    Python sets them to None, and the next file opened would get their descriptor number: C code
    that writes to standard error would then write into that file.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            nowhere = os.open(os.devnull, os.O_RDWR)
            if nowhere != number:
                os.dup2(nowhere, number)
                os.close(nowhere)
            os.set_inheritable(number, True)
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8", errors="replace"))  # noqa: SIM115 - for as long as Python runs


def ignoring_write_errors(stream: TextIO) -> TextIO:
    """The same stream, whose `write` and `flush` never raise OSError.

    After the first failure (no reader, or a full disk) the file descriptor is redirected to
    /dev/null, so that other users of it do not fail either, nor Python when it flushes at exit. The
    run's record is in its directory.
    """
    _replace_unknown(stream)
    return cast(TextIO, _IgnoringWriteErrors(stream))


def _replace_unknown(stream: TextIO) -> None:
    """Print a replacement for characters outside the stream's encoding instead of raising."""
    if isinstance(stream, io.TextIOWrapper) and stream.errors in ("strict", "surrogateescape"):
        stream.reconfigure(errors="replace")


def raising_output_errors(stream: TextIO) -> TextIO:
    """The same stream, for a script whose result is its output: a failure raises OutputError, or
    BrokenPipeError if the reader has gone.

    After that the descriptor is redirected to /dev/null, as by `ignoring_write_errors`. Characters
    outside the stream's encoding are replaced.
    """
    _replace_unknown(stream)
    return cast(TextIO, _RaisingOutputErrors(stream))


class _IgnoringWriteErrors:
    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError:
            self._redirect_to_devnull()
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError:
            self._redirect_to_devnull()

    def _redirect_to_devnull(self) -> None:
        with contextlib.suppress(OSError), open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), self._stream.fileno())


class _RaisingOutputErrors(_IgnoringWriteErrors):
    def write(self, text: str) -> int:
        with self._output_errors_explained():
            return self._stream.write(text)

    def flush(self) -> None:
        with self._output_errors_explained():
            self._stream.flush()

    @contextlib.contextmanager
    def _output_errors_explained(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:
            self._redirect_to_devnull()
            raise
        except OSError as error:
            self._redirect_to_devnull()
            raise OutputError(
                explain(
                    "standard output cannot be written, and the output is incomplete",
                    given=error.strerror or error,
                    do="free disk space, or send the output elsewhere",
                )
            ) from error
