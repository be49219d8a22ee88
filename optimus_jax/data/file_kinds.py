"""Detects a file's kind by its first bytes, for errors about files that cannot be used."""

from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from optimus_jax.system.command import typed_command

_HEAD_BYTES = 1 << 16
"""Bytes read from the start of a file: tar's magic is at byte 257, and text needs a longer look."""

TEXT_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
"""The byte order mark of UTF-8. It carries no information there and is not part of the text."""

_WIDE_MARKS = {
    b"\xff\xfe\x00\x00": "UTF-32",
    b"\x00\x00\xfe\xff": "UTF-32",
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
}
_TAKE_OUT = "write its text out as .txt, .jsonl or .parquet"
_UNPACK = "unpack it, and give the files or their folder"
_KINDS = (
    (b"\x1f\x8b", "gzip data", "let its name end with .txt.gz or .jsonl.gz, by what is inside"),
    (
        b"\x28\xb5\x2f\xfd",
        "Zstandard data",
        "let its name end with .txt.zst or .jsonl.zst, by what is inside",
    ),
    (b"BZh", "bzip2 data", "let its name end with .txt.bz2 or .jsonl.bz2, by what is inside"),
    (b"\xfd7zXZ\x00", "xz data", "let its name end with .txt.xz or .jsonl.xz, by what is inside"),
    (b"PAR1", "a Parquet file", "let its name end with .parquet"),
    (b"ARROW1", "an Arrow file", "let its name end with .arrow"),
    (b"FEA1", "a Feather file of version 1", "write it again as .arrow or .parquet"),
    (
        b"PK\x03\x04",
        "a zip archive (.docx, .xlsx, .npz and PyTorch's checkpoints are such too)",
        _UNPACK,
    ),
    (b"7z\xbc\xaf\x27\x1c", "a 7-Zip archive", _UNPACK),
    (b"Rar!", "a RAR archive", _UNPACK),
    (b"%PDF", "a PDF document", _TAKE_OUT),
    (b"{\\rtf", "a Rich Text document", _TAKE_OUT),
    (b"\xd0\xcf\x11\xe0", "a document of an old Microsoft Office", _TAKE_OUT),
    (
        b"\x93NUMPY",
        "a NumPy array",
        "write texts as .txt, .jsonl or .parquet;"
        f" {typed_command('tokenize')} makes tokens of them",
    ),
    (b"\x89HDF", "an HDF5 file", _TAKE_OUT),
    (b"SQLite format 3", "an SQLite database", _TAKE_OUT),
    (b"Obj\x01", "an Avro file", _TAKE_OUT),
    (b"GGUF", "a GGUF model", "give texts or tokens to train on"),
    (b"\x7fELF", "a program", "give texts or tokens to train on"),
    (b"\x89PNG", "an image", "give texts or tokens to train on"),
    (b"\xff\xd8\xff", "an image", "give texts or tokens to train on"),
    (b"\x80\x02", "a Python pickle, which could run anything when it is read", _TAKE_OUT),
    (b"\x80\x03", "a Python pickle, which could run anything when it is read", _TAKE_OUT),
    (b"\x80\x04", "a Python pickle, which could run anything when it is read", _TAKE_OUT),
    (b"\x80\x05", "a Python pickle, which could run anything when it is read", _TAKE_OUT),
)


_LFS_POINTER = "a pointer of git-lfs, not the file itself"
_UTF8_KINDS = ("JSON", "plain text", "an HTML page")


def _open(path: Path) -> BinaryIO:
    return path.open("rb")


def wide_encoding(head: bytes) -> str | None:
    """The encoding (UTF-16 or UTF-32) that the first bytes of a file suggest, else None."""
    for mark, name in _WIDE_MARKS.items():
        if head.startswith(mark):
            return name
    sample = head[: len(head) // 4 * 4]
    # ASCII in UTF-16 has a zero in every second byte, and is also valid UTF-8.
    if (
        len(sample) >= 8
        and 4 * sample.count(0) >= len(sample)
        and (not any(sample[::2]) or not any(sample[1::2]))
    ):
        return "UTF-16"
    return None


def head_of(path: Path, open_file: Callable[[Path], BinaryIO] = _open) -> bytes:
    """The first bytes of a file opened with `open_file`; empty if it cannot be read."""
    try:
        with open_file(path) as file:
            return file.read(_HEAD_BYTES)
    except Exception:  # libraries raise all kinds of errors for damaged files
        return b""


def non_text_kind(head: bytes) -> tuple[str, str] | None:
    """Like `kind_of_file`, but None if the file can be read as text.

    Archives of texts and git-lfs pointers do not count as text, though they decode as UTF-8.
    """
    found = kind_of_file(head)
    if found is None or found[0] in _UTF8_KINDS or wide_encoding(head) is not None or not head:
        return None
    return None if _is_utf8(head) and found[0] != _LFS_POINTER else found


def kind_of_file(head: bytes) -> tuple[str, str] | None:
    """What a file is, judged by its first bytes, and what to do with it; None: unknown."""
    if (wide := wide_encoding(head)) is not None:
        return f"text in {wide}", f"convert it: iconv -f {wide} -t UTF-8"
    for magic, kind, advice in _KINDS:
        if head.startswith(magic):
            return kind, advice
    if head.startswith(b"version https://git-lfs.github.com/") and b"\noid sha256:" in head[:1024]:
        return _LFS_POINTER, "fetch the file: git lfs pull"
    if head[257:262] == b"ustar":
        return "a tar archive", _UNPACK
    if head.lstrip()[:14].lower().startswith((b"<!doctype html", b"<html")):
        return "an HTML page", _TAKE_OUT + ", or name it .txt to train on its tags too"
    if not head:
        return "an empty file", "leave it out"
    if _is_utf8(head):
        if head.lstrip().startswith((b"{", b"[")):
            return (
                "JSON",
                (
                    "let its name end with .jsonl if each line is an object, with .json if it is"
                    " one array"
                ),
            )
        return (
            "plain text",
            (
                "let its name end with .txt if the whole file is one document, "
                "with .jsonl if each line is a JSON object"
            ),
        )
    return None


def _is_utf8(head: bytes) -> bool:
    try:
        head[:-4].decode() if len(head) == _HEAD_BYTES else head.decode()
    except UnicodeDecodeError as error:
        return (
            len(head) == _HEAD_BYTES and error.start >= len(head) - 8
        )  # the end of the head may cut a character
    return b"\x00" not in head
