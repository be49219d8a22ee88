"""Define the file format of snapshots: the shards of one process at one step, with checksums.

    <root>/<step>/<process>.bin     the pieces, one behind the other, as they lay in memory
    <root>/<step>/<process>.json    the manifest: step, metadata, every leaf's shape and dtype,
    every piece's place and checksum

The manifest is written last, by renaming, and has its own checksum: a snapshot with a readable
manifest is complete. A shard is the part of a leaf between bounds. If several devices of a process
hold the same shard, it is written once. Only JSON and raw bytes are stored, so that reading never
executes stored code.
"""

import contextlib
import json
import os
import shutil
import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from optimus_jax.system.json_input import parse_json, read_json

Bounds = tuple[tuple[int, int], ...]
"""Position of a shard in its leaf: start and stop along each dimension."""
Key = tuple[str, Bounds]
"""A shard's identity: path of the leaf, and bounds."""


@dataclass(frozen=True, kw_only=True)
class StoredShard:
    """Location and checksum of a shard in a file."""

    file: Path
    offset: int
    """Start of the shard in the file, in bytes."""
    num_bytes: int
    crc32: int

    def read(self) -> bytes | None:
        """The shard's bytes; None if they cannot be read or the checksum differs."""
        try:
            with open(self.file, "rb") as file:
                file.seek(self.offset)
                found = file.read(self.num_bytes)
        except OSError:
            return None
        return found if len(found) == self.num_bytes and zlib.crc32(found) == self.crc32 else None


@dataclass(frozen=True, kw_only=True)
class HostSnapshot:
    """The shards of one step that are in the files of this host."""

    step: int
    metadata: dict[str, Any]
    leaves: dict[str, tuple[tuple[int, ...], str]]
    """Shape and dtype of each leaf of the whole state, by path."""
    shards: dict[Key, tuple[StoredShard, ...]]
    """All copies of each shard that processes of this host have written, by shard."""

    def intact_shards(self) -> dict[Key, StoredShard]:
        """The first copy of each shard whose checksum is right. Reads the files."""
        found = {
            key: next((shard for shard in copies if shard.read() is not None), None)
            for key, copies in self.shards.items()
        }
        return {key: shard for key, shard in found.items() if shard is not None}

    def checksums_of(self, key: Key) -> list[int]:
        """Distinct checksums of a shard's copies; more than one if the processes disagreed."""
        return sorted({shard.crc32 for shard in self.shards[key]})


def write(
    root: Path,
    step: int,
    process: int,
    metadata: Mapping[str, Any],
    leaves: Mapping[str, tuple[tuple[int, ...], str]],
    shards: Iterable[tuple[Key, np.ndarray]],
) -> None:
    """Write the shards of a process. They are complete when this returns.

    Raises:
      OSError: they could not be written. Files of other processes of this host for the step are
        deleted too, because an incomplete snapshot is useless.
    """
    folder = root / str(step)
    folder.mkdir(parents=True, exist_ok=True)
    data, manifest = folder / f"{process}.bin", folder / f"{process}.json"
    manifest.unlink(missing_ok=True)
    listed, offset = [], 0
    try:
        with open(data, "wb", buffering=0) as file:
            for (path, bounds), array in shards:
                content = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
                _write_all(file.fileno(), content)
                listed.append([path, bounds, offset, content.nbytes, zlib.crc32(content)])
                offset += content.nbytes
        value = {
            "step": step,
            "metadata": dict(metadata),
            "leaves": {path: [list(shape), dtype] for path, (shape, dtype) in leaves.items()},
            "pieces": listed,
        }
        text = json.dumps(value)
        part = manifest.with_suffix(".part")
        part.write_text(
            json.dumps({"content": text, "crc32": zlib.crc32(text.encode())}), encoding="utf-8"
        )
        os.replace(part, manifest)
    except OSError:
        delete(root, step)
        raise


def steps(root: Path) -> list[int]:
    """Steps that have any files, oldest first."""
    return (
        sorted(int(path.name) for path in root.iterdir() if path.name.isdecimal())
        if root.is_dir()
        else []
    )


def read(root: Path, step: int) -> HostSnapshot | None:
    """What all processes of this host have written for a step; None if nothing is complete."""
    metadata, leaves, shards = None, {}, defaultdict[Key, tuple[StoredShard, ...]](tuple)
    for path in sorted((root / str(step)).glob("*.json")):
        if (value := _manifest(path)) is None or value["step"] != step:
            continue
        metadata = value["metadata"]
        leaves = {name: (tuple(shape), dtype) for name, (shape, dtype) in value["leaves"].items()}
        for name, bounds, offset, num_bytes, crc32 in value["pieces"]:
            key = name, tuple((start, stop) for start, stop in bounds)
            shards[key] += (
                StoredShard(
                    file=path.with_suffix(".bin"), offset=offset, num_bytes=num_bytes, crc32=crc32
                ),
            )
    return (
        None
        if metadata is None
        else HostSnapshot(step=step, metadata=metadata, leaves=leaves, shards=shards)
    )


def delete(root: Path, step: int) -> None:
    """Delete the files of one step of all processes on this host. Several processes may call it."""
    shutil.rmtree(root / str(step), ignore_errors=True)


def as_array(content: bytes, dtype: str, bounds: Bounds) -> np.ndarray:
    """The bytes of a shard as a read-only array."""
    return np.frombuffer(content, jnp.dtype(dtype)).reshape(
        [stop - start for start, stop in bounds]
    )


def _manifest(path: Path) -> dict[str, Any] | None:
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        wrapped = read_json(path)
        if zlib.crc32(wrapped["content"].encode()) == wrapped["crc32"]:
            return parse_json(wrapped["content"])
    return None


def _write_all(descriptor: int, content: memoryview) -> None:
    while content.nbytes:
        content = content[os.write(descriptor, content) :]
