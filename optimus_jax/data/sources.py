"""Where documents come from: names in a config -> texts.

A *source* is what the user typed: `stdlib`, a file or a glob. A *document* is one text: a whole
text file, one line of a JSONL file, one row of a Parquet file. Documents come in the order of the
sources, files of a glob sorted. Token files (.bin) hold no documents; `tokens.py` reads those.
"""

import contextlib
import glob
import json
import os
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

from optimus_jax.errors import DataError, explain
from optimus_jax.paths import Url, local_pattern, user_path
from optimus_jax.store.local_copies import local_copies

STDLIB = "stdlib"
"""The source that every machine has: the .py files of Python's own library."""
TOKEN_SUFFIX = ".bin"
HEADER_SUFFIX = ".json"
"""Of a token file's header, behind the name of the file."""
TEXT_SUFFIXES = (".txt", ".md", ".rst", ".tex", ".py", ".c", ".h", ".cpp", ".rs", ".go", ".java", ".js")
SUFFIXES = (*TEXT_SUFFIXES, ".jsonl", ".parquet", TOKEN_SUFFIX)


def find_files(sources: Sequence[str]) -> list[Path]:
    """The files behind all sources but `stdlib`.

    Raises:
      DataError: a file is missing, a glob matches nothing, or a suffix is not in SUFFIXES.
    """
    return [path for source in sources if source != STDLIB for path in _expand(source)]


def read_documents(sources: Sequence[str], text_field: str) -> Iterator[str]:
    """Every document of `sources`, none empty. All names are checked before anything is read.

    Args:
      text_field: name of the text in a JSONL line or a Parquet column.
    Raises:
      DataError: as `find_files`; or a file is a token file, cannot be read, is not UTF-8, holds no
        text, or has a line or column that is not what `text_field` says.
    """
    files = find_files(sources)
    for path in files:
        if path.suffix == TOKEN_SUFFIX:
            raise DataError(explain(f"{path} holds tokens, not text", given=" ".join(sources),
                                    do="train on one .bin file alone; to join several, tokenize their texts into one"))
    for source in sources:
        if source == STDLIB:
            yield from _read_stdlib()
        else:
            for path in _expand(source):
                yield from _read_file(path, text_field)


def _expand(source: str) -> list[Path]:
    path = user_path(source, what="--data")
    if isinstance(path, Url):
        paths = local_copies(path, beside={TOKEN_SUFFIX: HEADER_SUFFIX})
    elif path.is_file():  # its name may have characters of a glob
        paths = [path]
    else:
        paths = sorted(map(Path, glob.glob(local_pattern(source, what="--data"), recursive=True)))
    paths = [path for path in paths if path.is_file()]
    if not paths:
        raise DataError(explain("no file matches a glob" if glob.has_magic(source) else "no such data file",
                                given=f"{source} (from {os.getcwd()})",
                                do="check the path; for all files of a folder give a glob such as 'FOLDER/**/*.txt'"))
    for path in paths:
        if path.suffix not in SUFFIXES:
            raise DataError(explain(f"{path} has a suffix that says nothing about its format",
                                    given=path.suffix or "no suffix", do="rename it to one of " + " ".join(SUFFIXES)))
    return paths


def _read_stdlib() -> Iterator[str]:
    files = []
    for folder, subfolders, names in os.walk(sysconfig.get_path("stdlib")):
        subfolders[:] = [name for name in subfolders if name not in ("site-packages", "dist-packages")]
        files += [os.path.join(folder, name) for name in names if name.endswith(".py")]
    for file in sorted(files):
        # A few of the library's own tests are in other encodings on purpose; they are left out.
        with contextlib.suppress(UnicodeDecodeError):
            if text := Path(file).read_bytes().decode():
                yield text


def _read_file(path: Path, text_field: str) -> Iterator[str]:
    read = {".jsonl": _read_jsonl, ".parquet": _read_parquet}.get(path.suffix, _read_text)
    is_empty = True
    try:
        for text in read(path, text_field):
            if text:
                is_empty = False
                yield text
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, not Parquet
        raise DataError(explain(f"{path} cannot be read", given=error,
                                do="give a readable file whose text is UTF-8, or leave it out")) from error
    if is_empty:
        raise DataError(explain(f"{path} holds no text", given=f"{path.stat().st_size} bytes",
                                do="leave it out, or write it again"))


def _read_text(path: Path, _text_field: str) -> Iterator[str]:
    yield path.read_bytes().decode()


def _read_jsonl(path: Path, text_field: str) -> Iterator[str]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.isspace():
                continue
            try:
                text = json.loads(line)[text_field]
                text.encode()  # half a surrogate pair is legal in JSON, yet is no text
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise DataError(explain(
                    f"{path}, line {number}, is not a JSON object with a text named {text_field!r}",
                    given=f"{line[:80]!r} ({type(error).__name__}: {error})",
                    do="mend the line, or name the field: --set data.text_field=NAME")) from error
            yield text


def _read_parquet(path: Path, text_field: str) -> Iterator[str]:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise DataError(explain("Parquet files need pyarrow, which is not installed", given=path,
                                do="pip install 'optimus-jax[parquet]'")) from error
    with pyarrow.parquet.ParquetFile(path) as table:
        columns = {field.name: str(field.type) for field in table.schema_arrow}
        if columns.get(text_field) not in ("string", "large_string", "string_view"):
            raise DataError(explain(
                f"{path} has no column of text named {text_field!r}",
                given=", ".join(f"{name}: {kind}" for name, kind in columns.items()),
                do="name the column: --set data.text_field=NAME"))
        for rows in table.iter_batches(columns=[text_field]):
            yield from rows.column(0).to_pylist()
