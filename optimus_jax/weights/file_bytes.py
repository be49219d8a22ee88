"""Ranges of bytes of files that may be damaged, cut short or hostile.

No size that stands in a file is believed before it is compared with the file's own size or with a
limit.
"""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from optimus_jax.errors import CheckpointError, explain

MAX_HEADER_BYTES = 16 << 20
"""Largest header of a safetensors file, or index: 150,000 tensors. What Python makes of
it is up to 30 times as large."""
MAX_CONFIG_BYTES = 1 << 20
"""Largest config.json, or another file of a model's settings."""
LFS_POINTER = b"version https://git-lfs"
"""How the file begins that git leaves in place of a large one."""


def damaged(path: Path, what: object) -> CheckpointError:
    """The error for a file that is not what it should be."""
    return CheckpointError(
        explain(
            f"{path} cannot be read as a model's weights",
            given=what,
            do="download the file again, and compare its size and checksum with the publisher's",
        )
    )


@contextmanager
def open_file(path: Path) -> Iterator[int]:
    """The descriptor of a regular file, opened for reading.

    Links are followed: caches of downloads consist of them.

    Raises CheckpointError if it cannot be opened, or read inside the context.
    """
    descriptor = None
    try:
        # without O_NONBLOCK, opening a pipe would wait for a writer
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise damaged(path, "it is not a regular file")
        yield descriptor
    except OSError as error:
        raise damaged(path, error.strerror or error) from error
    finally:
        if descriptor is not None:
            os.close(descriptor)


def size_of(descriptor: int) -> int:
    """Bytes of an open file."""
    return os.fstat(descriptor).st_size


def read_range(path: Path, descriptor: int, offset: int, size: int) -> bytes:
    """Some bytes of an open file. The caller has checked that `size` may be allocated."""
    buffer = np.empty(size, np.uint8)
    read_into(path, descriptor, offset, buffer)
    return buffer.tobytes()


def read_into(path: Path, descriptor: int, offset: int, buffer: np.ndarray) -> None:
    """Fill a contiguous uint8 array with bytes of an open file.

    Raises CheckpointError if the file ends before.
    """
    done = 0
    while done < buffer.size:
        count = os.preadv(descriptor, [buffer[done:].data], offset + done)
        if count == 0:
            raise damaged(path, f"it ends at byte {offset + done}, before a tensor does")
        done += count


def read_whole(path: Path, limit: int = MAX_HEADER_BYTES) -> bytes:
    """A whole small file. Raises CheckpointError if it has more than `limit` bytes."""
    with open_file(path) as descriptor:
        if (size := size_of(descriptor)) > limit:
            raise damaged(path, f"{size:,} bytes, more than {limit:,}")
        return read_range(path, descriptor, 0, size)


def check_not_pointer(path: Path, descriptor: int) -> None:
    """Raise CheckpointError if git has left a pointer in place of the file."""
    if read_range(path, descriptor, 0, min(64, size_of(descriptor))).startswith(LFS_POINTER):
        raise CheckpointError(
            explain(
                f"{path} is a pointer of Git LFS, not the file itself",
                given=f"{size_of(descriptor)} bytes",
                do="run `git lfs pull` in that directory, or download the file",
            )
        )
