"""Encoded images and recordings: files, ranges of files, cells of Parquet files, or bytes.

A range is a member of a tar file, or a value of an Arrow file. A cell is read with its row group,
the unit that Parquet files are read in; a process caches row groups of up to CACHE_BYTES, and
decodes others of up to DECODED_BYTES at once. What is compressed otherwise (a tar file with gzip, a
Feather file with LZ4) is held in memory.

Files are on this machine. Any number of threads may ask at once.
"""

import io
import threading
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from optimus_jax.errors import counted

CACHE_BYTES = 2**31
"""Most bytes of row groups that a process caches, unless one row group has more."""
DECODED_BYTES = 2**30
"""Most bytes of row groups that a process decodes at once, besides those cached, unless one row
group has more."""
LARGE_BYTES = 2**26
"""Bytes of a row group from which it is slow to decode it for one cell."""
ROWS_AT_ONCE = 256
"""Rows of a Parquet file that are decoded at once."""


class FileRange(NamedTuple):
    """Consecutive bytes of a file."""

    path: Path
    offset: int
    """Bytes before them."""
    size: int
    """How many they are."""


class ParquetCell(NamedTuple):
    """Bytes in a column of a Parquet file."""

    path: Path
    column: str
    row_group: int
    row: int
    """In its row group, from 0."""
    size: int
    """How many bytes they are."""


EncodedFile = Path | FileRange | ParquetCell | bytes
"""Where the bytes of an encoded file are, or the bytes."""


def size_of(place: EncodedFile) -> int:
    """Number of its bytes."""
    if isinstance(place, bytes):
        return len(place)
    return place.stat().st_size if isinstance(place, Path) else place.size


def opened(place: EncodedFile) -> Path | io.BytesIO:
    """What libraries that decode open. Raises OSError if it is no longer there."""
    return place if isinstance(place, Path) else io.BytesIO(read(place))


def read(place: EncodedFile) -> bytes:
    """Its bytes. Raises OSError if they are no longer there."""
    match place:
        case bytes():
            return place
        case Path():
            return place.read_bytes()
        case FileRange(path, offset, size):
            with path.open("rb") as file:
                file.seek(offset)
                found = file.read(size)
        case ParquetCell(row=row, size=size):
            values = _values_beside(place)
            found = bytes_of(values[row].as_py()) if row < len(values) else None
    if found is None or len(found) != size:
        raise OSError(f"{place.path} has changed since it was opened")
    return found


def row_group_notes(places: Iterable[EncodedFile]) -> list[str]:
    """What a user should know about Parquet files of which most cells are read with a large row
    group, since the cache cannot hold all of them."""
    sizes = Counter[tuple[Path, int]]()
    for place in places:
        if isinstance(place, ParquetCell):
            sizes[place.path, place.row_group] += place.size
    if sizes.total() <= max(CACHE_BYTES, LARGE_BYTES * len(sizes)):
        return []
    path, _ = max(sizes, key=sizes.__getitem__)
    return [
        f"Parquet files are read slowly: {counted(len(sizes), 'row group')} have"
        f" {sizes.total() / 2**30:,.1f} GiB, of which {CACHE_BYTES / 2**30:g} GiB are cached, and"
        f" one of {sizes.total() / len(sizes) / 2**20:,.0f} MiB is decoded for an example that is"
        f" not; write them with smaller ones (row_group_size=100), such as {path}"
    ]


def bytes_of(value: object) -> bytes | None:
    """Those of a value of a table: bytes, or Hugging Face's object with `bytes`."""
    data = value.get("bytes") if isinstance(value, dict) else value
    return data if isinstance(data, bytes) else None


class _RowGroup(NamedTuple):
    """A row group of a column of a Parquet file, as the file is now."""

    path: Path
    column: str
    number: int
    written: tuple[int, int]
    """When the file was last written, in nanoseconds, and its bytes: another file may have taken
    its place."""


class _RowGroups:
    """Row groups, of which those used last are cached."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reading: dict[_RowGroup, threading.Lock] = {}
        self._cached: OrderedDict[_RowGroup, Any] = OrderedDict()
        self._num_bytes = 0

    def values(self, wanted: _RowGroup) -> Any:
        """Those of a row group, an Arrow array. Raises OSError."""
        with self._lock:
            reading = self._reading.setdefault(wanted, threading.Lock())
        with reading:  # one thread reads it; others read other row groups at the same time
            try:
                with self._lock:
                    found = self._cached.get(wanted)
                if found is None:
                    found = _read_row_group(wanted)
                with self._lock:
                    self._keep(wanted, found)
            finally:
                with self._lock:
                    self._reading.pop(wanted, None)
        return found

    def _keep(self, wanted: _RowGroup, found: Any) -> None:
        if wanted not in self._cached:
            self._num_bytes += found.nbytes
        self._cached[wanted] = found
        self._cached.move_to_end(wanted)
        while self._num_bytes > CACHE_BYTES and len(self._cached) > 1:
            self._num_bytes -= self._cached.popitem(last=False)[1].nbytes


_ROW_GROUPS = _RowGroups()


class ByteBudget:
    """Bytes that threads use at the same time, each until it is done with them."""

    def __init__(self, most: int) -> None:
        self._most, self._used = most, 0
        self._changed = threading.Condition()

    @contextmanager
    def taken(self, num_bytes: int) -> Iterator[None]:
        """Waits until there is room for these bytes; what needs more than all waits to be alone."""
        with self._changed:
            self._changed.wait_for(lambda: not self._used or self._used + num_bytes <= self._most)
            self._used += num_bytes
        try:
            yield
        finally:
            with self._changed:
                self._used -= num_bytes
                self._changed.notify_all()


_DECODED = ByteBudget(DECODED_BYTES)


def _values_beside(cell: ParquetCell) -> Any:
    """The values of the row group that a cell is in."""
    status = cell.path.stat()
    written = (status.st_mtime_ns, status.st_size)
    return _ROW_GROUPS.values(_RowGroup(cell.path, cell.column, cell.row_group, written))


def _read_row_group(wanted: _RowGroup) -> Any:
    import pyarrow.parquet

    try:
        metadata = _metadata(wanted.path, wanted.written)
        with (
            _DECODED.taken(metadata.row_group(wanted.number).total_byte_size),
            pyarrow.parquet.ParquetFile(wanted.path, metadata=metadata) as table,
        ):
            # In parts, since Arrow has no array of objects with more than 2 GiB.
            parts = table.iter_batches(
                ROWS_AT_ONCE, row_groups=[wanted.number], columns=[wanted.column]
            )
            return pyarrow.chunked_array([part.column(0) for part in parts])
    except (ValueError, IndexError) as error:  # the file is damaged, or another one
        raise OSError(f"{wanted.path}: {error}") from error


@lru_cache(maxsize=64)
def _metadata(path: Path, written: tuple[int, int]) -> Any:
    """What a Parquet file says of its row groups, which can be long."""
    import pyarrow.parquet

    return pyarrow.parquet.read_metadata(path)
