"""Opens files that may be compressed; the last suffix names the compression."""

import bz2
import gzip
import io
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
    # Unlike other libraries, this one reads several frames in a row and reports truncated ones.
    return zstd.ZstdFile(path)


_READ_BYTES = 1 << 16
"""Compressed bytes per read."""
_PADDING_UNIT = 4
"""Zero bytes between and after .xz streams come in multiples of this."""


class _Streams(io.RawIOBase):
    """The decompressed content of a file that holds one compressed stream after another.

    BZ2File and LZMAFile stop without an error when the data after the first stream is not a stream,
    so a damaged second stream would silently truncate the text. Here every byte must belong to a
    stream.

    Args:
      make: creates the decompressor of one stream.
      is_padded: whether zero bytes may follow a stream, as in .xz.
    Raises:
      EOFError, OSError or lzma.LZMAError on reading: a stream is damaged or cut short.
    """

    def __init__(self, path: Path, make: Callable[[], Any], *, is_padded: bool = False) -> None:
        self._file, self._make, self._is_padded = path.open("rb"), make, is_padded
        self._stream: Any = None
        """Decompressor of the current stream; None before the first stream and after each one."""
        self._rest, self._num_streams = b"", 0

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        self._file.close()
        super().close()

    def readinto(self, buffer: Any) -> int:
        while (stream := self._stream or self._next_stream()) is not None:
            compressed = b""
            if stream.needs_input:
                compressed, self._rest = self._rest or self._file.read(_READ_BYTES), b""
                if not compressed:
                    raise EOFError("a compressed stream ends before its end marker")
            data = stream.decompress(compressed, len(buffer))
            if stream.eof:
                self._rest, self._stream = stream.unused_data, None
            if data:
                buffer[: len(data)] = data
                return len(data)
        return 0

    def _next_stream(self) -> Any:
        """The decompressor of the next stream; None at the end of the file."""
        rest, num_zeros = self._rest or self._file.read(_READ_BYTES), 0
        while self._is_padded and self._num_streams and rest.startswith(b"\0"):
            num_zeros += len(rest) - len(rest := rest.lstrip(b"\0"))
            rest = rest or self._file.read(_READ_BYTES)
        if num_zeros % _PADDING_UNIT:
            raise lzma.LZMAError(f"{num_zeros} zero bytes follow a stream, no multiple of 4")
        if not rest:
            return None
        self._rest, self._stream = rest, self._make()
        self._num_streams += 1
        return self._stream


def _open_bz2(path: Path) -> Any:
    return io.BufferedReader(_Streams(path, bz2.BZ2Decompressor))


def _open_xz(path: Path) -> Any:
    return io.BufferedReader(_Streams(path, lzma.LZMADecompressor, is_padded=True))


OPENERS: dict[str, Callable[[Path], Any]] = {
    ".gz": gzip.GzipFile,
    ".bz2": _open_bz2,
    ".xz": _open_xz,
    ".zst": _open_zst,
    ".zstd": _open_zst,
}
"""Openers by lower-case suffix."""


def suffixes_of(path: Path) -> tuple[str, str]:
    """The lower-case suffixes of a file's format and of its compression ("" if there is none)."""
    suffix = path.suffix.lower()
    return (path.with_suffix("").suffix.lower(), suffix) if suffix in OPENERS else (suffix, "")


def open_file(path: Path) -> BinaryIO:
    """Open a file for reading, with decompression.

    Raises OSError, or DataError if a library is missing.
    """
    opener = OPENERS.get(suffixes_of(path)[1])
    return path.open("rb") if opener is None else cast(BinaryIO, opener(path))
