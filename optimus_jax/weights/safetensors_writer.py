"""Makes the safetensors files of a model: their headers first, then tensors slice by slice.

The files are laid out as safetensors' own library does (tensors by name, the header padded with
spaces so that data are aligned), and named and indexed as transformers does.
"""

import json
import re
from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path

import numpy as np

from optimus_jax.weights.directory import INDEX_SUFFIX, SAFETENSORS
from optimus_jax.weights.new_tensor import NewTensor
from optimus_jax.weights.safetensors_file import DTYPES, LENGTH_BYTES, METADATA

ALIGNMENT = 8
"""Data begin at a multiple of this."""
WRITTEN_BY = {"format": "pt"}
"""Metadata of a file, without which transformers refuses it."""

Shapes = Mapping[str, tuple[int, ...]]


def create_weights(
    directory: Path, shapes: Shapes, dtype: np.dtype, max_shard_bytes: int
) -> dict[str, NewTensor]:
    """Make the files of a model's weights in a directory, and the index if they are several.

    Args:
      shapes: every tensor, by its full name.
      max_shard_bytes: most bytes of a file's tensors; a larger tensor has a file of its own.
    Returns:
      The tensors, to be written; zero until then.
    Raises:
      OSError: a file cannot be made.
    """
    sizes = {name: prod(shapes[name]) * dtype.itemsize for name in sorted(shapes, key=_natural)}
    shards = split_into_shards(sizes, max_shard_bytes)
    if len(shards) == 1:
        return create_file(directory / SAFETENSORS, shapes, dtype)
    stem, suffix = SAFETENSORS.split(".")
    tensors, shard_of = {}, {}
    for number, names in enumerate(shards, 1):
        file = f"{stem}-{number:05d}-of-{len(shards):05d}.{suffix}"
        tensors |= create_file(directory / file, {name: shapes[name] for name in names}, dtype)
        shard_of |= dict.fromkeys(names, file)
    index = {
        "metadata": {
            "total_parameters": sum(map(prod, shapes.values())),
            "total_size": sum(sizes.values()),
        },
        "weight_map": shard_of,
    }
    text = json.dumps(index, indent=2, sort_keys=True) + "\n"
    (directory / (SAFETENSORS + INDEX_SUFFIX)).write_text(text, encoding="utf-8")
    return tensors


def split_into_shards(sizes: Mapping[str, int], max_shard_bytes: int) -> list[list[str]]:
    """Tensors in their order, as many together as fit into a shard; one that does not fit alone."""
    shards: list[list[str]] = []
    room = 0
    for name, size in sizes.items():
        if not shards or size > room:
            shards.append([])
            room = max_shard_bytes
        shards[-1].append(name)
        room -= size
    return shards


def create_file(path: Path, shapes: Shapes, dtype: np.dtype) -> dict[str, NewTensor]:
    """Make one file with its header, and with zeros for the tensors.

    Raises OSError if it exists, or cannot be made.
    """
    header, offsets = header_of(shapes, dtype)
    tensors = {
        name: NewTensor.contiguous(path, dtype, shapes[name], len(header) + offset)
        for name, offset in offsets.items()
    }
    with open(path, "xb") as file:
        file.write(header)
        file.truncate(len(header) + _num_bytes(shapes.values(), dtype))
    return tensors


def header_of(shapes: Shapes, dtype: np.dtype) -> tuple[bytes, dict[str, int]]:
    """A file's bytes before the data, and where in the data each tensor begins."""
    name_of_dtype = next(name for name, each in DTYPES.items() if each == dtype)
    offsets, place, entries = {}, 0, {}
    for name in sorted(shapes):
        offsets[name] = place
        place += prod(shapes[name]) * dtype.itemsize
        entries[name] = {
            "dtype": name_of_dtype,
            "shape": list(shapes[name]),
            "data_offsets": [offsets[name], place],
        }
    text = json.dumps({METADATA: WRITTEN_BY, **entries}, separators=(",", ":"), ensure_ascii=False)
    content = text.encode()
    content += b" " * (-len(content) % ALIGNMENT)
    return len(content).to_bytes(LENGTH_BYTES, "little") + content, offsets


def _num_bytes(shapes: Iterable[tuple[int, ...]], dtype: np.dtype) -> int:
    return sum(map(prod, shapes)) * dtype.itemsize


def _natural(name: str) -> list[tuple[int, str]]:
    """A key that sorts layer 10 after layer 9."""
    return [
        (int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)
    ]
