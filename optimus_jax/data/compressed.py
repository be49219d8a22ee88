"""Opening files that may be compressed: the last suffix says how."""

import bz2
import gzip
import lzma
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, cast

from optimus_jax.errors import DataError, explain


def _open_zst(path: Path) -> Any:
    try:
        if sys.version_info >= (3, 14):
            from compression import zstd  # pyright: ignore[reportMissingImports]
        else:
            from backports import zstd
    except ImportError as error:
        raise DataError(
            explain(
                "Zstandard files need the backports.zstd library, which is not installed",
                given=path,
                do="pip install 'optimus-jax[zstd]', or decompress the file: zstd -d",
            )
        ) from error
    # Unlike other libraries this one reads several frames in a row, and tells of one cut short.
    return zstd.ZstdFile(path)


OPENERS: dict[str, Callable[[Path], Any]] = {
    ".gz": gzip.GzipFile,
    ".bz2": bz2.BZ2File,
    ".xz": lzma.LZMAFile,
    ".zst": _open_zst,
    ".zstd": _open_zst,
}
"""By suffix, in lower case."""


def suffixes_of(path: Path) -> tuple[str, str]:
    """The suffix that names a file's format, and that of its compression or ""; in lower case."""
    suffix = path.suffix.lower()
    return (path.with_suffix("").suffix.lower(), suffix) if suffix in OPENERS else (suffix, "")


def open_file(path: Path) -> BinaryIO:
    """A file for reading, decompressed on the way.

    Raises OSError, or DataError if a library is missing.
    """
    opener = OPENERS.get(suffixes_of(path)[1])
    return path.open("rb") if opener is None else cast(BinaryIO, opener(path))
