"""Examples that are files of their own, or rows of tables: images and recordings."""

import hashlib
import io
import os
import tarfile
import zlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, ClassVar, Generic, NamedTuple, Self, TypeVar

import numpy as np

from optimus_jax.config import ModelConfig
from optimus_jax.data.batch import HostBatch
from optimus_jax.data.encoded_files import (
    ROWS_AT_ONCE,
    EncodedFile,
    FileRange,
    ParquetCell,
    bytes_of,
    row_group_notes,
    size_of,
)
from optimus_jax.data.folders import data_folders
from optimus_jax.data.formats import arrow_batches
from optimus_jax.data.sampler import ExampleOrder, example_order
from optimus_jax.errors import DataError, counted, explain

TABLES = (".parquet", ".arrow", ".feather")
SHARDS = (".tar", ".tar.gz", ".tgz")
"""Of files with samples in several parts. Compressed ones are held in memory."""
MOST_THREADS = min(32, os.cpu_count() or 1)
"""Threads of a process that decode."""


class NamedFile(NamedTuple):
    """What a file is known by."""

    name: str
    """Where it is, for messages and for its hash: a path within its folder, or a row of a table."""
    text: str
    """Its label, or what is said in it."""
    place: EncodedFile


Item = TypeVar("Item")


@dataclass(frozen=True, kw_only=True, eq=False)
class FileExamples(ABC, Generic[Item]):
    """Files to cut examples from, each of which is one."""

    what: ClassVar[str]
    """What the files are, in the plural."""
    name: str
    """Where they come from, for messages."""
    items: Sequence[Item]
    model: ModelConfig
    """Says how large examples are."""

    @staticmethod
    @abstractmethod
    def file_of(item: Item) -> NamedFile:
        """The file of an example."""

    @abstractmethod
    def cut_examples(
        self, examples: np.ndarray, *, seq_len: int, respect_documents: bool
    ) -> HostBatch:
        """The per-token arrays of a batch of the files numbered `examples` [R], [R, seq_len], and
        `patches`, [R, seq_len, P]."""

    def __len__(self) -> int:
        return len(self.items) * self.model.max_length

    def count_examples(self, seq_len: int) -> int:
        """Number of files."""
        return len(self.items)

    def example_order(self, seq_len: int, seed: int) -> ExampleOrder:
        """An endless sequence of example numbers, a function of the seed alone."""
        return example_order(len(self.items), seed)

    @property
    def digest(self) -> str:
        """Sixteen hex digits that differ if names, texts or sizes of files differ."""
        found = hashlib.blake2b(digest_size=8)
        for name, text, place in map(self.file_of, self.items):
            found.update(f"{name}\0{text}\0{size_of(place)}\n".encode())
        return found.hexdigest()

    def slow_notes(self) -> list[str]:
        """What a user should know about files that are read slowly."""
        return row_group_notes(self.file_of(item).place for item in self.items)

    def mixed(self) -> Self:
        """The files in the order of the hashes of their names, in which the first ones are of all
        folders.
        """
        return self._with(np.argsort(self._hashes(), kind="stable"))

    def split(self, eval_fraction: float) -> tuple[Self, Self | None]:
        """Files to train on and those held out, by the hashes of their names; at least one of each.

        Those held out are `mixed`. Raises DataError if there are too few.
        """
        if eval_fraction == 0:
            return self, None
        if len(self.items) < 2:
            raise DataError(
                explain(
                    f"{self.name} has too few {self.what} to hold some out",
                    given=f"{len(self.items)}; data.eval_fraction={eval_fraction}",
                    do="give more, or --set data.eval_fraction=0",
                )
            )
        hashes = self._hashes()
        order = np.argsort(hashes, kind="stable")
        is_held_out = hashes < np.uint64(eval_fraction * 2.0**63) * 2
        is_held_out[order[0]], is_held_out[order[-1]] = True, False
        held_out = self._with(order[is_held_out[order]])
        return (
            self._with(np.flatnonzero(~is_held_out)),
            replace(held_out, name=f"{self.name} (held out)"),
        )

    def _hashes(self) -> np.ndarray:
        """Of the name of each file, uint64 [N]."""
        names = [self.file_of(item).name for item in self.items]
        digests = [hashlib.blake2b(name.encode(), digest_size=8).digest() for name in names]
        return np.array([int.from_bytes(digest, "little") for digest in digests], np.uint64)

    def _with(self, numbers: np.ndarray) -> Self:
        """The files with these numbers."""
        return replace(self, items=[self.items[number] for number in numbers.tolist()])


def in_threads(decode: Callable[[int], np.ndarray], numbers: Sequence[int]) -> list[np.ndarray]:
    """`decode` of every number, in their order; libraries that decode leave other threads free."""
    return list(_pool().map(decode, numbers))


@lru_cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=MOST_THREADS, thread_name_prefix="decode")


def is_shard(file: Path) -> bool:
    """Whether a file has samples in several parts, by its name."""
    return file.name.lower().endswith(SHARDS)


def files_of(
    source: Path, suffixes: Sequence[str], beside: Callable[[Path], bool] = lambda file: False
) -> tuple[list[Path], list[str]]:
    """The files of a folder with one of these suffixes, at any depth; without any, its tables and
    tar files. The source itself, if it is no folder. And a sentence about the files of the folder
    that are not read, if there are some.

    Args:
      beside: whether a file says more about those with these suffixes, and is no other one.
    """
    if not source.is_dir():
        return [source], []
    found = list(_files_in(source))
    files, read = [file for file in found if file.suffix.lower() in suffixes], tuple(suffixes)
    others = Counter(file.suffix.lower() for file in found if not beside(file))
    if not files:  # Beside files, a tar file may be that from which they came.
        read = (*TABLES, *SHARDS)
        files = [file for file in found if file.suffix in TABLES or is_shard(file)]
        others = Counter(file.suffix.lower() for file in found if not is_shard(file))
    for suffix in read:
        others.pop(suffix, None)
    if not files or not others:
        return files, []
    kinds = ", ".join(
        f"{count:,} {suffix or 'without a suffix'}" for suffix, count in sorted(others.items())
    )
    left_out = counted(others.total(), "file")
    return files, [f"{left_out} in {source} left out, where {', '.join(read)} are read: {kinds}"]


def _files_in(top: Path) -> Iterator[Path]:
    """The files of a folder, at any depth; of a data set that Hugging Face's library has saved, its
    tables. Raises DataError if there are several splits of one.
    """
    for folder, names, _ in data_folders(top):
        yield from (folder / name for name in names if name != "dataset_dict.json")


def samples_in_shard(
    path: Path, what: str, *, texts: Collection[str] = ()
) -> Iterator[tuple[str, dict[str, EncodedFile], dict[str, bytes]]]:
    """Names and parts of the samples in a tar file, as WebDataset has them: members in a row whose
    names are alike up to the first dot, by what follows it. Parts are ranges of the file, or bytes
    if it is compressed; those that are texts are bytes, and apart from the others.

    Args:
      what: what the samples are, for messages.
      texts: names of the parts that are read at once.
    Raises:
      DataError: the file is damaged.
    """
    try:
        with tarfile.open(path) as shard:
            is_plain = isinstance(shard.fileobj, io.BufferedReader)
            name, parts, said = "", dict[str, EncodedFile](), dict[str, bytes]()
            for member in shard:
                if not member.isfile():
                    continue
                folder, _, file = member.name.rpartition("/")
                stem, _, suffix = file.partition(".")
                key, part = f"{folder}/{stem}".lstrip("/"), suffix.lower()
                if key != name and (parts or said):
                    yield f"{path.name}, {name}", parts, said
                    parts, said = {}, {}
                name = key
                if part in texts or not is_plain or member.issparse():
                    content = shard.extractfile(member)
                    assert content is not None, "of a file"
                    into = said if part in texts else parts
                    into[part] = content.read()
                else:
                    parts[part] = FileRange(path, member.offset_data, member.size)
            if parts or said:
                yield f"{path.name}, {name}", parts, said
    except (OSError, EOFError, zlib.error, tarfile.TarError) as error:
        raise DataError(
            explain(
                f"a tar file of {what} cannot be read", given=f"{path}: {error}", do="replace it"
            )
        ) from error


def rows_of_table(
    path: Path, columns: Sequence[str], what: str
) -> Iterator[tuple[str, EncodedFile, tuple[Any, ...]]]:
    """Name, bytes and other values of the rows of a Parquet or Arrow file that have bytes; none if
    it lacks the first of the columns. Bytes stay in the file, unless it is a compressed Arrow file.

    Args:
      columns: the first has bytes, or Hugging Face's objects with `bytes`; the values of others
        are None if they are missing.
      what: what the bytes are, for messages.
    Raises:
      DataError: pyarrow is missing, or the file is damaged.
    """
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise DataError(
            explain(
                f"tables of {what} need pyarrow, which is not installed",
                given=path,
                do="pip install 'optimus-jax[parquet]'",
            )
        ) from error

    try:
        number = 0
        with pyarrow.memory_map(str(path)) as source:
            is_parquet = path.suffix == ".parquet"
            read = _parquet_batches if is_parquet else _arrow_batches
            for batch, place_of in read(path, source, columns):
                if columns[0] not in batch.schema.names:
                    return
                values = [
                    batch.column(name).to_pylist()
                    if name in batch.schema.names
                    else [None] * batch.num_rows
                    for name in columns
                ]
                for row, (first, *others) in enumerate(zip(*values, strict=True)):
                    number += 1
                    if (data := bytes_of(first)) is not None:
                        yield f"{path.name}, row {number}", place_of(row, data), tuple(others)
    except (OSError, ValueError) as error:
        raise DataError(
            explain(f"a table of {what} cannot be read", given=f"{path}: {error}", do="replace it")
        ) from error


_Batches = Iterator[tuple[Any, Callable[[int, bytes], EncodedFile]]]
"""Batches of rows, each with where the bytes of a row are, given its number and these bytes."""


def _parquet_batches(path: Path, source: Any, columns: Sequence[str]) -> _Batches:
    import pyarrow.parquet

    table = pyarrow.parquet.ParquetFile(source)
    present = [name for name in columns if name in table.schema_arrow.names]
    for group in range(table.num_row_groups):
        first = 0
        for batch in table.iter_batches(ROWS_AT_ONCE, row_groups=[group], columns=present):
            yield batch, partial(_parquet_cell, path, columns[0], group, first)
            first += batch.num_rows


def _parquet_cell(
    path: Path, column: str, group: int, first: int, row: int, data: bytes
) -> ParquetCell:
    return ParquetCell(path, column, group, first + row, len(data))


def _arrow_batches(path: Path, source: Any, columns: Sequence[str]) -> _Batches:
    whole = source.read_buffer()
    source.seek(0)
    for batch in arrow_batches(source).batches:
        starts = None
        if columns[0] in batch.schema.names:
            starts = _starts_in_file(whole, batch.column(columns[0]))
        yield batch, partial(_arrow_range, path, starts)


def _starts_in_file(whole: Any, values: Any) -> np.ndarray | None:
    """Where in a mapped file each value of an Arrow array begins; None: they are not in it, since
    it is compressed.
    """
    import pyarrow.types as types

    if types.is_struct(values.type) and values.type.get_field_index("bytes") >= 0:
        values = values.field("bytes")
    if not (types.is_binary(values.type) or types.is_large_binary(values.type)):
        return None
    _, offsets, data = values.buffers()
    if data is None or not 0 <= data.address - whole.address <= whole.size - data.size:
        return None
    dtype = np.int32 if types.is_binary(values.type) else np.int64
    starts = np.frombuffer(offsets, dtype)[values.offset :]
    return starts + np.int64(data.address - whole.address)


def _arrow_range(path: Path, starts: np.ndarray | None, row: int, data: bytes) -> EncodedFile:
    return data if starts is None else FileRange(path, int(starts[row]), len(data))
