"""Finds the tensors of a file that `torch.save` wrote.

Since PyTorch 1.6 such a file is a zip archive of uncompressed members: `data.pkl`, which says how
tensors lie in storages, and one member for each storage. Before, it was five pickles one after
another (a magic number, a version, facts about the machine, the tensors, the storages' keys) and
then every storage with its number of elements in front. The pickles are read by `torch_pickle.py`.
"""

import io
import struct
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optimus_jax.errors import CheckpointError
from optimus_jax.weights.file_bytes import (
    check_not_pointer,
    damaged,
    open_file,
    read_range,
    size_of,
)
from optimus_jax.weights.stored_tensor import StoredTensor, is_overlapping, span
from optimus_jax.weights.torch_pickle import (
    MAX_PICKLE_BYTES,
    PickledTensor,
    RefusedPickleError,
    evaluate,
)

MAX_DIRECTORY_BYTES = 4 << 20
"""Largest directory of a zip archive: 50,000 storages."""
LOCAL_HEADER = struct.Struct("<4s22xHH")
"""What is in front of a member: a signature, and the lengths of its name and of extra fields."""
LOCAL_SIGNATURE = b"PK\x03\x04"
FIRST_OF_LEGACY = b"\x80\x02\x8a\x0a"
MAGIC_NUMBER, LEGACY_VERSION = 0x1950A86A20F9469CFC6C, 1001
"""The values of the first two pickles of a file from before PyTorch 1.6."""
COUNT_BYTES = 8


@dataclass(frozen=True)
class Extent:
    """Bytes of a file."""

    start: int
    size: int


def read_torch_file(path: Path) -> dict[str, StoredTensor]:
    """Every tensor of a file, without reading one.

    Raises:
      CheckpointError: the file cannot be read, is not of either form, or holds anything but a
        mapping of names to tensors of numbers.
    """
    with open_file(path) as descriptor:
        check_not_pointer(path, descriptor)
        first = read_range(path, descriptor, 0, min(4, size_of(descriptor)))
        try:
            if first == LOCAL_SIGNATURE:
                state_dict, storages = _read_zip(path, descriptor)
            elif first == FIRST_OF_LEGACY:
                state_dict, storages = _read_legacy(path, descriptor)
            else:
                raise damaged(path, f"it begins with {first!r}, like no file of torch.save")
        except RefusedPickleError as error:
            raise damaged(path, error) from error
    if type(state_dict) is not dict:
        raise damaged(path, f"it holds a {type(state_dict).__name__}, not a mapping of tensors")
    return {name: _placed(path, name, tensor, storages) for name, tensor in state_dict.items()}


def _placed(path: Path, name: str, tensor: object, storages: Mapping[str, Extent]) -> StoredTensor:
    """A tensor in its storage. Raises CheckpointError if it is not within it."""
    label = repr(name[:200])
    if not isinstance(tensor, PickledTensor):
        raise damaged(path, f"{label} is a {type(tensor).__name__}, not a tensor")
    storage, item = tensor.storage, tensor.storage.dtype.itemsize
    extent = storages.get(storage.key)
    if extent is None or extent.size < storage.num_elements * item:
        given = "no bytes" if extent is None else f"{extent.size:,} bytes"
        raise damaged(
            path,
            f"tensor {label} is in a storage of {storage.num_elements:,} elements of"
            f" {storage.dtype}, for which the file has {given}",
        )
    numbers = (tensor.offset, *tensor.shape, *tensor.strides)
    strides = tuple(stride * item for stride in tensor.strides)
    is_empty = 0 in tensor.shape
    if (
        len(tensor.shape) != len(strides)
        or min(numbers) < 0
        or (
            not is_empty
            and tensor.offset * item + span(tensor.shape, strides, item)
            > storage.num_elements * item
        )
    ):
        raise damaged(path, f"tensor {label} is not within its storage")
    if not is_empty and is_overlapping(tensor.shape, strides, item):
        raise damaged(path, f"tensor {label} has elements that share memory")
    return StoredTensor(
        path, storage.dtype, tensor.shape, strides, extent.start + tensor.offset * item
    )


def _read_zip(path: Path, descriptor: int) -> tuple[Any, dict[str, Extent]]:
    """The value of `data.pkl`, and the members of `data/` by their names in it."""
    members = _members(path, descriptor)
    pickles = [name for name in members if name.partition("/")[2] == "data.pkl"]
    if len(pickles) != 1:
        raise damaged(path, f"it has {len(pickles)} members */data.pkl, where torch.save writes 1")
    folder = pickles[0].partition("/")[0]
    byteorder = members.get(f"{folder}/byteorder")
    if byteorder is not None and _bytes_of(path, descriptor, byteorder, 16) != b"little":
        raise damaged(path, "its numbers are not little-endian")
    pickled = _bytes_of(path, descriptor, members[pickles[0]], MAX_PICKLE_BYTES)
    state_dict, end = evaluate(pickled)
    if end != len(pickled):
        raise damaged(path, "data.pkl does not end with its value")
    data = f"{folder}/data/"
    return state_dict, {
        name.removeprefix(data): extent for name, extent in members.items() if name.startswith(data)
    }


def _bytes_of(path: Path, descriptor: int, extent: Extent, limit: int) -> bytes:
    if extent.size > limit:
        raise damaged(path, f"a member has {extent.size:,} bytes, where at most {limit:,} are read")
    return read_range(path, descriptor, extent.start, extent.size)


def _members(path: Path, descriptor: int) -> dict[str, Extent]:
    """The members of a zip archive.

    Raises CheckpointError if one is compressed or encrypted, does not lie where the directory
    says, overlaps another, or has a name that another has too.
    """
    try:
        with _SmallReads(descriptor, closefd=False) as file, zipfile.ZipFile(file) as archive:
            listed, directory_start = archive.infolist(), archive.start_dir
    except CheckpointError:
        raise
    except (
        zipfile.BadZipFile,
        NotImplementedError,
        EOFError,
        OSError,  # a position before the file's begin
        OverflowError,
        ValueError,
        struct.error,
    ) as error:
        raise damaged(path, f"it is no whole zip archive: {error}") from error
    members, place = {}, 0
    for info in sorted(listed, key=lambda info: info.header_offset):
        label = repr(info.filename[:200])
        if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
            raise damaged(path, f"member {label} is compressed or encrypted")
        name_start = info.header_offset + LOCAL_HEADER.size
        if info.header_offset < place or name_start > directory_start:
            raise damaged(path, f"member {label} is not where the archive's directory says")
        signature, name_size, extra_size = LOCAL_HEADER.unpack(
            read_range(path, descriptor, info.header_offset, LOCAL_HEADER.size)
        )
        start = name_start + name_size + extra_size
        place = start + info.file_size
        if signature != LOCAL_SIGNATURE or place > directory_start:
            raise damaged(path, f"member {label} is not where the archive's directory says")
        if info.compress_size != info.file_size:
            raise damaged(path, f"member {label} has two sizes")
        if info.filename in members:
            raise damaged(path, f"two members are called {label}")
        members[info.filename] = Extent(start, info.file_size)
    return members


class _SmallReads(io.FileIO):
    """A file of which no large part can be read at once: the sizes come from the file itself."""

    def read(self, size: int | None = -1, /) -> bytes:
        """At most MAX_DIRECTORY_BYTES."""
        limit = MAX_DIRECTORY_BYTES + 1
        part = super().read(limit if size is None or size < 0 else min(size, limit)) or b""
        if len(part) == limit:
            raise ValueError(f"its directory has more than {MAX_DIRECTORY_BYTES:,} bytes")
        return part


def _read_legacy(path: Path, descriptor: int) -> tuple[Any, dict[str, Extent]]:
    """The value of the fourth pickle, and the storages by their keys."""
    size = size_of(descriptor)
    pickles = read_range(path, descriptor, 0, min(size, MAX_PICKLE_BYTES))
    values, place = [], 0
    for _ in range(5):
        value, place = evaluate(pickles, place)
        values.append(value)
    magic, version, machine, state_dict, keys = values
    if magic != MAGIC_NUMBER or version != LEGACY_VERSION:
        raise damaged(path, "it does not begin with the magic number and version of torch.save")
    if type(machine) is not dict or machine.get("little_endian") is not True:
        raise damaged(path, "its numbers are not little-endian")
    if type(keys) is not list or any(type(key) is not str for key in keys):
        raise damaged(path, "its list of storages is not one of texts")
    dtypes = {
        tensor.storage.key: tensor.storage.dtype
        for tensor in (state_dict.values() if type(state_dict) is dict else ())
        if isinstance(tensor, PickledTensor)
    }
    storages = {}
    for key in keys:
        if key in storages or key not in dtypes:
            raise damaged(path, f"storage {key[:80]!r} is listed twice, or belongs to no tensor")
        if place + COUNT_BYTES > size:
            raise damaged(path, f"it ends before storage {key[:80]!r}")
        (count,) = struct.unpack("<q", read_range(path, descriptor, place, COUNT_BYTES))
        extent = Extent(place + COUNT_BYTES, count * dtypes[key].itemsize)
        place = extent.start + extent.size
        if count < 0 or place > size:
            raise damaged(path, f"storage {key[:80]!r} of {count:,} elements is beyond its end")
        storages[key] = extent
    return state_dict, storages
