"""Reads the leaves of a checkpoint slice by slice, in one process and without devices.

Restoring puts whole leaves on devices and needs every process (`checkpoints.py`); this serves those
who want to pass a large checkpoint on with little memory. The checksums that `save` has written are
compared as they are in a restore, once every slice of a leaf has been read.
"""

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import tensorstore

from optimus_jax.checkpoint.errors import DamagedError, on_this_process
from optimus_jax.checkpoint.reading import STATE, own_manifest
from optimus_jax.mesh.boxes import Box, sizes, split
from optimus_jax.reshard.checksum import checksum_of_part


@dataclass
class StoredLeaf:
    """A leaf of a checkpoint. Several threads may read at the same time."""

    path: Path
    """The checkpoint's directory."""
    name: str
    """Its path in the state, such as `params/embedding/table`."""
    shape: tuple[int, ...]
    dtype: np.dtype
    checksum: int
    """Of the whole leaf, as it was saved."""
    _sum: int = 0
    _num_read: int = 0
    _lock: Any = field(default_factory=threading.Lock)

    @property
    def num_bytes(self) -> int:
        """Bytes of the leaf, before compression."""
        return prod(self.shape) * self.dtype.itemsize

    def boxes(self, dims: Sequence[int], most_bytes: int) -> Iterator[Box]:
        """Parts that together are the leaf, of at most `most_bytes` unless a chunk on the disk is
        larger: a chunk is never read for two of them.

        Args:
          dims: the dimensions in the sequence in which they are split.
        """
        whole = tuple(slice(0, size) for size in self.shape)
        return split(whole, dims, most_bytes // self.dtype.itemsize, self.chunk)

    @property
    def chunk(self) -> tuple[int, ...]:
        """Sizes of a chunk on the disk, of which all is read at once. Raises as `read` does."""
        return self._store.chunk_layout.read_chunk.shape or self.shape

    def read(self, box: Box) -> np.ndarray:
        """The values of a part. Parts that are read must not overlap.

        Raises DamagedError or UnreachableError.
        """
        values = on_this_process(lambda: self._store[box].read().result())
        share = checksum_of_part(values, [each.start for each in box])
        with self._lock:
            self._sum = (self._sum + share) % 2**32
            self._num_read += prod(sizes(box))
        return values

    def check(self) -> None:
        """Raise DamagedError unless the whole leaf has been read and is what was saved."""
        assert self._num_read == prod(self.shape), (self.name, self._num_read, self.shape)
        if self._sum != self.checksum:
            raise DamagedError(f"the checksum of {self.name} is not what was saved")

    @cached_property
    def _store(self) -> Any:
        """The array on the disk. Raises as `read` does."""

        def open_store() -> Any:
            base = {"driver": "file", "path": f"{self.path / STATE}/"}
            spec = {"driver": "zarr", "kvstore": {"driver": "ocdbt", "base": base}}
            store = tensorstore.open({**spec, "path": self.name}, open=True, read=True).result()
            if (store.shape, store.dtype.numpy_dtype) != (self.shape, self.dtype):
                raise DamagedError(f"{self.name} has another shape or dtype than when it was saved")
            return store

        return on_this_process(open_store)


@dataclass(frozen=True)
class StoredCheckpoint:
    """A checkpoint on the disk."""

    step: int
    metadata: Mapping[str, Any]
    """As given to `Checkpoints.save`."""
    leaves: Mapping[str, StoredLeaf]
    """By path."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all leaves, before compression."""
        return sum(leaf.num_bytes for leaf in self.leaves.values())

    @classmethod
    def at(cls, path: Path) -> "StoredCheckpoint":
        """The checkpoint in the directory `path`, which is named after its step.

        Raises DamagedError or UnreachableError.
        """
        manifest = on_this_process(lambda: own_manifest(path))
        leaves = {
            name: StoredLeaf(
                path.absolute(),
                name,
                tuple(leaf["shape"]),
                np.dtype(jnp.dtype(leaf["dtype"])),
                leaf["checksum"],
            )
            for name, leaf in manifest["leaves"].items()
        }
        return cls(int(path.name), manifest["metadata"], leaves)
