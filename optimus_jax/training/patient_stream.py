"""Output that outlives its reader: a terminal is closed, `tee` and `head` end, and the run goes on, or saves what it was asked to save."""

import contextlib
import os
from typing import Any, TextIO, cast


def patient(stream: TextIO) -> TextIO:
    """The same stream, whose `write` and `flush` never fail for the machine's reasons.

    When one would, for nobody reads any more or a disk is full, the file descriptor leads to nowhere from then on, so that nothing
    else that has it fails either, nor Python when it empties its buffers at its end. A run's record is in its directory.
    """
    return cast(TextIO, _Patient(stream))


class _Patient:
    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError:
            self._lead_nowhere()
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError:
            self._lead_nowhere()

    def _lead_nowhere(self) -> None:
        with contextlib.suppress(OSError), open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), self._stream.fileno())
