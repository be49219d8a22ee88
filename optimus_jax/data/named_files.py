"""Examples that are files of their own, or rows of tables: images and recordings."""

import hashlib
import os
import tarfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, Generic, NamedTuple, Self, TypeVar

import numpy as np

from optimus_jax.config import ModelConfig
from optimus_jax.data.batch import HostBatch
from optimus_jax.data.folders import walk
from optimus_jax.data.formats import arrow_batches
from optimus_jax.data.sampler import ExampleOrder, example_order
from optimus_jax.errors import DataError, explain

TABLES = (".parquet", ".arrow", ".feather")
SHARD = ".tar"
"""Of files with samples in several parts."""
MOST_THREADS = min(32, os.cpu_count() or 1)
"""Threads of a process that decode."""
_ROWS_AT_ONCE = 256
"""Rows of a Parquet file that are decoded at once."""
EncodedFile = Path | bytes
"""An encoded file, or its bytes."""


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
            size = len(place) if isinstance(place, bytes) else place.stat().st_size
            found.update(f"{name}\0{text}\0{size}\n".encode())
        return found.hexdigest()

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


def files_of(source: Path, suffixes: Sequence[str]) -> list[Path]:
    """The files of a folder with one of these suffixes, at any depth; without any, its tables and
    tar files. The source itself, if it is no folder.
    """
    if not source.is_dir():
        return [source]
    found = [folder / name for folder, _, names in walk(source) for name in names]
    encoded = [file for file in found if file.suffix.lower() in suffixes]
    # Beside files, a tar file may be that from which they came.
    return encoded or [file for file in found if file.suffix in (*TABLES, SHARD)]


def samples_in_shard(path: Path, what: str) -> Iterator[tuple[str, dict[str, bytes]]]:
    """Names and parts of the samples in a tar file, as WebDataset has them: members in a row whose
    names are alike up to the first dot, by what follows it.

    Args:
      what: what the samples are, for messages.
    Raises:
      DataError: the file is damaged.
    """
    try:
        with tarfile.open(path) as shard:
            name, parts = "", dict[str, bytes]()
            for member in shard:
                if not member.isfile():
                    continue
                folder, _, file = member.name.rpartition("/")
                stem, _, suffix = file.partition(".")
                key = f"{folder}/{stem}".lstrip("/")
                if key != name and parts:
                    yield f"{path.name}, {name}", parts
                    parts = {}
                content = shard.extractfile(member)
                assert content is not None, "of a file"
                name, parts[suffix.lower()] = key, content.read()
            if parts:
                yield f"{path.name}, {name}", parts
    except (OSError, tarfile.TarError) as error:
        raise DataError(
            explain(
                f"a tar file of {what} cannot be read", given=f"{path}: {error}", do="replace it"
            )
        ) from error


def rows_of_table(
    path: Path, columns: Sequence[str], what: str
) -> Iterator[tuple[str, bytes, tuple[Any, ...]]]:
    """Name, bytes and other values of the rows of a Parquet or Arrow file that have bytes; none if
    it lacks the first of the columns.

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

    def batches(source: Any) -> Iterator[Any]:
        if path.suffix == ".parquet":
            table = pyarrow.parquet.ParquetFile(source)
            present = [name for name in columns if name in table.schema_arrow.names]
            yield from table.iter_batches(_ROWS_AT_ONCE, columns=present)
            return
        yield from arrow_batches(source).batches

    try:
        number = 0
        with pyarrow.memory_map(str(path)) as source:
            for batch in batches(source):
                if columns[0] not in batch.schema.names:
                    return
                values = [
                    batch.column(name).to_pylist()
                    if name in batch.schema.names
                    else [None] * batch.num_rows
                    for name in columns
                ]
                for first, *others in zip(*values, strict=True):
                    data = first.get("bytes") if isinstance(first, dict) else first
                    number += 1
                    if isinstance(data, bytes):
                        yield f"{path.name}, row {number}", data, tuple(others)
    except (OSError, ValueError) as error:
        raise DataError(
            explain(f"a table of {what} cannot be read", given=f"{path}: {error}", do="replace it")
        ) from error
