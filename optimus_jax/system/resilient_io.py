"""Output that outlives its reader: a terminal is closed, `tee` and `head` end, and the run goes on,
or saves what it was asked to save.
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
"""How long standard error may take for what has to be said: who should read it may have stopped."""


def flush_with_timeout(text: str, *, after: Iterable[TextIO] = ()) -> None:
    """Write to standard error, from any thread, in LAST_WORDS_S at most: for a process that ends,
    or a thread that others wait for.

    Args:
      after: streams that are flushed before.
    """

    def write() -> None:
        left = text.encode(errors="replace")
        with contextlib.suppress(OSError):
            for stream in after:
                stream.flush()
            while left:
                left = left[os.write(2, left) :]

    thread = threading.Thread(target=write, name="last words", daemon=True)
    thread.start()
    thread.join(FLUSH_TIMEOUT_S)


@functools.cache
def nonblocking_stderr() -> int:
    """A file descriptor for what C code has to say in an emergency: what a full pipe or a stopped
    terminal does not take is lost.
    """
    try:
        mode = os.fstat(2).st_mode
        if stat.S_ISREG(mode):  # never full of what nobody has read
            return 2
        # opened anew, for whoever else has the old one is to wait as before
        if stat.S_ISFIFO(mode) or stat.S_ISCHR(mode):
            return os.open(
                "/proc/self/fd/2", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
            )
    except OSError:
        pass
    return os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)


def open_closed_streams() -> None:
    """Lead standard streams that are closed (`>&-`) to nowhere.

    Python has None for them, and the next file that is opened would have their number: what C code
    then says on standard error would be written into it.
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
    """The same stream, whose `write` and `flush` never fail for the machine's reasons.

    When one would, for nobody reads any more or a disk is full, the file descriptor leads to
    nowhere from then on, so that nothing else that has it fails either, nor Python when it empties
    its buffers at its end. A run's record is in its directory.
    """
    _replace_unknown(stream)
    return cast(TextIO, _IgnoringWriteErrors(stream))


def _replace_unknown(stream: TextIO) -> None:
    """Show another character for one that the stream lacks, as a terminal without Unicode does,
    instead of failing.
    """
    if isinstance(stream, io.TextIOWrapper) and stream.errors in ("strict", "surrogateescape"):
        stream.reconfigure(errors="replace")


def raising_output_errors(stream: TextIO) -> TextIO:
    """The same stream, for a script whose result is what it prints: trouble is an error in words,
    or BrokenPipeError if nobody reads on.

    From then on it leads to nowhere, as a patient one does. A character that it lacks is shown as
    another.
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
                    "standard output takes nothing more, and what was printed is not whole",
                    given=error.strerror or error,
                    do="make room, or send the output elsewhere",
                )
            ) from error
