"""Errors that explain why a source or a file cannot be used as training data."""

import errno
import glob
import os
import stat
from pathlib import Path

from optimus_jax.data.compressed import OPENERS, open_file, suffixes_of
from optimus_jax.data.file_kinds import head_of, kind_of_file, non_text_kind
from optimus_jax.data.formats import SUFFIXES, has_format
from optimus_jax.errors import DataError, explain

TEXTS_AS_RECORDS = "texts themselves are given in Python as records: [{'text': '...'}, ...]"
"""Advice for a text in place of a path."""
_SPECIAL = {
    stat.S_IFIFO: "a named pipe, which can be read only once",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
_EXPECTED = {
    ".parquet": "a Parquet file",
    ".gz": "gzip data",
    ".zst": "Zstandard data",
    ".zstd": "Zstandard data",
    ".bz2": "bzip2 data",
    ".xz": "xz data",
}
"""Kind that files with these suffixes should have by their first bytes; see file_kinds.py."""


def check_format(path: Path) -> None:
    """Raise DataError if a file's name does not indicate a readable format."""
    if has_format(path):
        return
    suffix, compression = suffixes_of(path)
    if compression and suffix in SUFFIXES:
        raise DataError(
            explain(
                f"{path}: compressed {suffix} files cannot be read",
                given=path.suffix,
                do="decompress it: tokens are mapped into memory, and tables are compressed inside",
            )
        )
    if compression:
        raise DataError(
            explain(
                f"{path}: the format of the compressed file is unknown",
                given=path.name,
                do=(
                    f"rename it to end in .jsonl{compression} or .txt{compression}, or unpack it if"
                    " it is an archive"
                ),
            )
        )
    kind, advice = kind_of_file(head_of(path)) or ("nothing known here", "give another file")
    raise DataError(
        explain(
            f"{path} has an unknown suffix",
            given=f"{path.suffix or 'no suffix'}; by its first bytes it is {kind}",
            do=(
                f"{advice} (supported: {' '.join(SUFFIXES)}, text formats also compressed as"
                f" {' '.join(OPENERS)})"
            ),
        )
    )


def check_content(path: Path) -> None:
    """Raise DataError if the first bytes show that a file to be read as text is not text."""
    if (found := non_text_kind(content_head(path))) is not None:
        kind, advice = found
        raise DataError(
            explain(f"{path} cannot be read: it is {kind}", given="its first bytes", do=advice)
        )


def content_head(path: Path) -> bytes:
    """The first bytes of a file after decompression; empty if it cannot be read."""
    return head_of(path, open_file)


def no_match_error(source: str) -> DataError:
    """The error for a source that is neither a file nor a folder and matches no file."""
    path, is_glob = Path(source), glob.has_magic(source)
    try:
        mode = path.stat().st_mode
    except OSError as error:
        if error.errno == errno.ELOOP:
            return DataError(
                explain("a link leads in a circle", given=source, do="give the file itself")
            )
        if path.is_symlink():
            return DataError(
                explain(
                    "a link leads nowhere",
                    given=f"{source} -> {os.readlink(path)}",
                    do="give the file itself",
                )
            )
        if not is_glob and error.errno not in (errno.ENOENT, errno.ENOTDIR):
            return DataError(
                explain(
                    "cannot access a data file",
                    given=f"{source}: {error.strerror}",
                    do="give a file that this user may read",
                )
            )
    else:
        kind = _SPECIAL.get(stat.S_IFMT(mode), "no file")
        return DataError(
            explain(
                "a data source is not a file",
                given=f"{source} is {kind}",
                do="write its content to a file first",
            )
        )
    return DataError(
        explain(
            "no file matches a glob" if is_glob else "no such data file",
            given=f"{source} (from {os.getcwd()})",
            do=(
                "check the path; for all files of a folder give the folder, "
                "or a glob such as 'FOLDER/**/*.txt'"
                + ("" if path.suffix and " " not in source else f"; {TEXTS_AS_RECORDS}")
            ),
        )
    )


def read_error(path: Path, error: Exception) -> DataError:
    """The error for a file that its library cannot read."""
    reason = f"{type(error).__name__}: {error}"
    if isinstance(error, OSError | UnicodeDecodeError) and str(error):
        reason = str(error)
    if isinstance(error, RecursionError):
        reason = "its values lie too deep inside one another"
    suffix, compression = suffixes_of(path)
    found = None if isinstance(error, PermissionError) else kind_of_file(head_of(path))
    if compression and found is not None and found[0] == _EXPECTED[compression]:
        found = kind_of_file(content_head(path))
        if found is not None and found[0].startswith("an empty"):
            found = None
    if (
        found is not None
        and found[0] != _EXPECTED.get(compression or suffix)
        and not found[0].startswith(("plain", "JSON", "an Arrow"))
    ):
        return DataError(
            explain(f"{path} cannot be read: it is {found[0]}", given=reason, do=found[1])
        )
    if isinstance(error, UnicodeDecodeError):
        advice = "give a file whose text is UTF-8: iconv -f ENCODING -t UTF-8"
    elif compression or suffix in (".parquet", ".arrow", ".feather"):
        advice = "give a whole file: this one is damaged or cut short"
    else:
        advice = "give a readable file whose text is UTF-8, or leave it out"
    return DataError(explain(f"{path} cannot be read", given=reason, do=advice))
