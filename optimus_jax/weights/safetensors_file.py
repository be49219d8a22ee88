"""Reads the header of a safetensors file: where each tensor is.

The format: 8 bytes with the header's length, the header in JSON, then the tensors' bytes without
gaps (https://github.com/huggingface/safetensors). A header that contradicts itself or the file is
refused, also where the tensors wanted might be intact.
"""

from math import prod
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from optimus_jax.system.json_input import JSONInputError, parse_json
from optimus_jax.weights.file_bytes import (
    MAX_HEADER_BYTES,
    check_not_pointer,
    damaged,
    open_file,
    read_range,
    size_of,
)
from optimus_jax.weights.stored_tensor import StoredTensor

DTYPES: dict[str, np.dtype] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(jnp.bfloat16),
    "F8_E4M3": np.dtype(jnp.float8_e4m3fn),
    "F8_E5M2": np.dtype(jnp.float8_e5m2),
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "I16": np.dtype("<i2"),
    "I8": np.dtype("i1"),
    "U64": np.dtype("<u8"),
    "U32": np.dtype("<u4"),
    "U16": np.dtype("<u2"),
    "U8": np.dtype("u1"),
    "BOOL": np.dtype("?"),
}
LENGTH_BYTES = 8
METADATA = "__metadata__"
MAX_DIMS = 16
"""Most dimensions of a tensor."""


def read_safetensors(path: Path) -> dict[str, StoredTensor]:
    """Every tensor of a file, from its header alone.

    Raises:
      CheckpointError: the file cannot be read, or its header is not what the format says.
    """
    with open_file(path) as descriptor:
        check_not_pointer(path, descriptor)
        size = size_of(descriptor)
        if size < LENGTH_BYTES:
            raise damaged(path, f"it has {size} bytes; the header's length alone takes 8")
        header_size = int.from_bytes(read_range(path, descriptor, 0, LENGTH_BYTES), "little")
        data_start = LENGTH_BYTES + header_size
        if data_start > size or header_size > MAX_HEADER_BYTES:
            raise damaged(
                path,
                f"a header of {header_size:,} bytes in a file of {size:,};"
                f" at most {MAX_HEADER_BYTES:,} are read",
            )
        text = read_range(path, descriptor, LENGTH_BYTES, header_size)
    try:
        header = parse_json(text)
    except JSONInputError as error:
        raise damaged(path, f"its header is not JSON: {error}") from error
    if not text.startswith(b"{") or not isinstance(header, dict):
        raise damaged(path, "its header is not a JSON object")
    metadata = header.pop(METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise damaged(path, f"{METADATA} of its header is not an object of texts")
    tensors, ends = {}, {}
    for name, entry in header.items():
        dtype, shape, begin, end = _parsed(path, name, entry)
        tensors[name] = StoredTensor.contiguous(path, dtype, shape, data_start + begin)
        ends[name] = data_start + end
    place = data_start
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].offset, ends[item[0]])):
        if tensor.offset != place:
            problem = "overlaps another" if tensor.offset < place else "follows a gap"
            raise damaged(
                path, f"tensor {name[:200]!r} {problem}: begins at {tensor.offset}, not {place}"
            )
        place = ends[name]
    if place != size:
        raise damaged(path, f"its tensors end at byte {place:,}, the file at {size:,}")
    return tensors


def _parsed(path: Path, name: str, entry: object) -> tuple[np.dtype, tuple[int, ...], int, int]:
    """Dtype, shape, and first and last byte after the header of a tensor."""
    label = repr(name[:200])
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise damaged(path, f"tensor {label} is not described by dtype, shape and data_offsets")
    dtype = DTYPES.get(entry["dtype"]) if isinstance(entry["dtype"], str) else None
    if dtype is None:
        given = repr(entry["dtype"])[:40]
        raise damaged(path, f"tensor {label} has dtype {given}; read are {', '.join(DTYPES)}")
    shape, offsets = entry["shape"], entry["data_offsets"]
    if not _are_sizes(shape) or len(shape) > MAX_DIMS or not _are_sizes(offsets):
        raise damaged(path, f"tensor {label} has a shape or data_offsets that are no sizes")
    if len(offsets) != 2 or offsets[1] - offsets[0] != prod(shape) * dtype.itemsize:
        raise damaged(
            path,
            f"tensor {label} of shape {shape} and dtype {dtype} is said to be at bytes {offsets}",
        )
    return dtype, tuple(shape), offsets[0], offsets[1]


def _are_sizes(values: Any) -> bool:
    """Whether a value is a list of whole numbers, none negative or beyond what files can have."""
    return isinstance(values, list) and all(
        type(each) is int and 0 <= each < 1 << 63 for each in values
    )
