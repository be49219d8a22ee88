"""Opening files that may be compressed: the last suffix says how."""

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
    # Unlike other libraries this one reads several frames in a row, and tells of one cut short.
    return zstd.ZstdFile(path)


_READ_BYTES = 1 << 16
"""Compressed bytes read in one go."""
_PADDING_UNIT = 4
"""Zero bytes between and behind streams of .xz come in multiples of this."""


class _Streams(io.RawIOBase):
    """The content of whole streams in a row.

    BZ2File and LZMAFile take whatever follows the first stream for the end if it is no stream, so
    a damaged second one would cut the text without a word. Here every byte must be of a stream.

    Args:
      make: a decompressor of one stream.
      is_padded: whether zero bytes may follow a stream, as in .xz.
    Raises:
      EOFError, OSError or lzma.LZMAError on reading: a stream is damaged or cut short.
    """

    def __init__(self, path: Path, make: Callable[[], Any], *, is_padded: bool = False) -> None:
        self._file, self._make, self._is_padded = path.open("rb"), make, is_padded
        self._stream: Any = None
        """The stream that is being read; None before the first and behind each."""
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
        """What decompresses the stream that follows; None: the file ends."""
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
