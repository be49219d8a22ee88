"""Writes files that survive a kill at any moment: a file is replaced atomically, and of a log only
the last line can be torn.
"""

import contextlib
import errno
import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from optimus_jax.errors import RunDirectoryError, explain
from optimus_jax.system.json_input import JSONInputError, parse_json


def finite(value: Any) -> Any:
    """`value` with null for every NaN and infinity, which JSON does not have."""
    match value:
        case float():
            return value if math.isfinite(value) else None
        case Mapping():
            return {key: finite(item) for key, item in value.items()}
        case list() | tuple():
            return [finite(item) for item in value]
    return value


def event_line(values: Mapping[str, Any]) -> bytes:
    """A line of a log: one JSON object."""
    return json.dumps(finite(values), allow_nan=False).encode() + b"\n"


def append(path: Path, lines: bytes, *, on_disk: bool = False) -> None:
    """Append whole lines or nothing, by one unbuffered write, which survives this process, and with
    `on_disk` (fsync) its host. The file is opened each time, so there is nothing to close.

    A torn line left by a kill or a full disk is ended first, so that it does not swallow the next.
    """
    with open(path, "a+b", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        if size and os.pread(file.fileno(), 1, size - 1) != b"\n":
            lines = b"\n" + lines
        if file.write(lines) != len(lines):
            os.ftruncate(file.fileno(), size)  # or the next line would be added to half of this one
            raise OSError(errno.ENOSPC, "the disk took only a part of a line")
        if on_disk:
            os.fsync(file.fileno())


def complete_lines(path: Path) -> list[bytes]:
    data = path.read_bytes() if path.exists() else b""
    return data[: data.rfind(b"\n") + 1].split(b"\n")[:-1]


def cut_torn_line(path: Path) -> None:
    if path.exists():
        os.truncate(path, path.read_bytes().rfind(b"\n") + 1)


def replace(path: Path, content: bytes) -> None:
    """Write a file whole or not at all: a reader sees the old content or the new."""
    temporary = unfinished(path)
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def unfinished(path: Path) -> Path:
    """Temporary name of a file while it is written."""
    return path.with_suffix(".tmp")


@contextlib.contextmanager
def explained(path: Path) -> Iterator[None]:
    """Turns an OSError in the body into a RunDirectoryError that names the file."""
    try:
        yield
    except OSError as error:
        raise file_error(path, error) from error


def file_error(path: Path, error: OSError) -> RunDirectoryError:
    """The error that explains an OSError of a file or folder of a run."""
    if (wrong := _wrong_kind(path, error)) is not None:
        return RunDirectoryError(
            explain(
                f"{path.name} of the run is {wrong}",
                given=path,
                do=(
                    "put the right one back, or move this one away; then start again, with --resume"
                    " if the run had started"
                ),
            )
        )
    try:
        free = f"{shutil.disk_usage(path.parent).free:,} bytes are free there"
    except OSError:
        free = "how much is free there is unknown"
    return RunDirectoryError(
        explain(
            f"{path.name} of the run cannot be read or written: {error.strerror or error}",
            given=f"{path}; {free}",
            do=(
                "make room, raise the limit or fix the permissions; then start again, with"
                " --resume if the run had started"
            ),
        )
    )


def _wrong_kind(path: Path, error: OSError) -> str | None:
    """A description, if the cause is a folder in place of a file or a file in place of a folder."""
    match error:
        case IsADirectoryError() if path.is_dir():
            return "a folder, where a file should be"
        case FileExistsError() | NotADirectoryError() if path.exists() and not path.is_dir():
            return "a file, where a folder should be"
    return None


def event_of(line: bytes) -> dict[str, Any] | None:
    """Parse a line of an event log; None: not an event, which has `event`, `step` and `time_s`."""
    values = json_object(line)
    if (
        values is None
        or not isinstance(values.get("event"), str)
        or type(values.get("step")) is not int
        or type(values.get("time_s")) not in (int, float)
    ):
        return None
    return values


def json_object(line: bytes) -> dict[str, Any] | None:
    try:
        values = parse_json(line, finite=False)
    except JSONInputError:
        return None
    return values if isinstance(values, dict) else None
