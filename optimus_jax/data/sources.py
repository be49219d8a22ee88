"""Finds the files that a config names as data sources, and reads documents from them.

A *source* is what the user typed: `stdlib`, a file, a glob or a folder. A *document* is one text: a
whole text file, one line of a JSONL file, or one row of a table. Documents come in the order of the
sources; the files of a glob or folder are sorted. Token files (.bin) hold no documents; `tokens.py`
reads them. `refused.py` has the errors for what cannot be read.
"""

import contextlib
import os
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from optimus_jax.config.data import STDLIB
from optimus_jax.data.compressed import suffixes_of
from optimus_jax.data.folders import data_folders, matching
from optimus_jax.data.formats import (
    HEADER_SUFFIX,
    READERS,
    SUFFIXES,
    TEXT_SUFFIXES,
    TOKEN_SUFFIX,
    SourceFile,
    has_format,
    reads_text,
)
from optimus_jax.data.record_reader import RecordReader
from optimus_jax.data.refused import check_content, check_format, no_match_error, read_error
from optimus_jax.data.skipped_input import SkippedInput
from optimus_jax.errors import DataError, explain
from optimus_jax.store.local_copies import local_copies
from optimus_jax.system.paths import Url, local_pattern, user_path

_DATASET_METADATA = ("dataset_dict.json", "dataset_info.json", "dataset_infos.json", "state.json")
"""Metadata files of Hugging Face's datasets library, which hold no documents."""


def find_files(sources: Sequence[str], skipped_input: SkippedInput | None = None) -> list[Path]:
    """The files of all sources except `stdlib`.

    Args:
      skipped_input: counts the files in folders whose format cannot be trained on.
    Raises:
      DataError: a source is missing or is not a file, a glob or folder yields no file, or a file's
        name does not indicate a format.
    """
    skipped_input = skipped_input or SkippedInput()
    found = [
        path for source in sources if source != STDLIB for path in _expand(source, skipped_input)
    ]
    _count_repeated(found, skipped_input)
    return found


def _count_repeated(paths: Sequence[Path], skipped_input: SkippedInput) -> None:
    """Record files that occur more than once, for example through both a glob and a folder."""
    seen: set[str] = set()
    for path in paths:
        if (real := os.path.realpath(path)) in seen and path not in skipped_input.repeated:
            skipped_input.repeated.append(path)
        seen.add(real)


def read_documents(
    sources: Sequence[str],
    text_field: str,
    *,
    skip_bad_lines: bool = False,
    skipped_input: SkippedInput | None = None,
    records: RecordReader | None = None,
) -> Iterator[Any]:
    """Yield every non-empty document of `sources`. All names are checked before anything is read.

    Args:
      text_field: name of the JSON field or column that holds the text.
      skip_bad_lines: whether to skip and count lines, rows and items that are not documents.
      skipped_input: counts what is skipped.
      records: reads JSON values and rows, which may be conversations; None: they must be texts.
    Raises:
      DataError: as `find_files`; or a file is a token file, cannot be read, is not UTF-8, holds no
        text, has a bad line that is not to be skipped, or has no text column `text_field`.
    """
    skipped_input = skipped_input or SkippedInput()
    found = [
        (source, [] if source == STDLIB else _expand(source, skipped_input)) for source in sources
    ]
    all_paths = [path for _, paths in found for path in paths]
    _count_repeated(all_paths, skipped_input)
    for path in all_paths:
        if is_token_file(path):
            raise DataError(
                explain(
                    f"{path} holds tokens, not text",
                    given=" ".join(sources),
                    do="train on .bin files alone, one or several; to add texts, tokenize them too",
                )
            )
    for source, paths in found:
        if source == STDLIB:
            yield from _read_stdlib()
            continue
        is_named, is_empty = paths == [user_path(source, what="--data")], True
        for path in paths:
            source_file = SourceFile(
                path=path,
                text_field=text_field,
                skip_bad_lines=skip_bad_lines,
                skipped_input=skipped_input,
                records=records,
            )
            is_text = suffixes_of(path)[0] in TEXT_SUFFIXES
            may_be_empty = not is_named and not (is_text and source_file.counts_each)
            for document in _read_file(source_file, may_be_empty=may_be_empty):
                is_empty = False
                yield document
        if is_empty:
            raise DataError(
                explain(
                    f"no file of {source} holds text",
                    given=f"{len(paths)} file(s)",
                    do="leave it out, or write them again",
                )
            )


def is_token_file(path: Path) -> bool:
    return path.suffix.lower() == TOKEN_SUFFIX


def _expand(source: str, skipped_input: SkippedInput) -> list[Path]:
    try:
        return _files_of(source, skipped_input)
    except (OSError, ValueError) as error:  # ValueError: a zero byte in a name
        raise DataError(
            explain(
                "cannot access a data source",
                given=error,
                do="give files that this user may read, or leave it out",
            )
        ) from error


def _files_of(source: str, skipped_input: SkippedInput) -> list[Path]:
    if not source:
        raise DataError(
            explain(
                "a data source has no name",
                given=repr(source),
                do="give a file, a glob, a folder or `stdlib`",
            )
        )
    path = user_path(source, what="--data")
    if isinstance(path, Url):
        copies = local_copies(path, sidecars={TOKEN_SUFFIX: HEADER_SUFFIX})
        paths = [copy for copy in copies if not _is_header(copy)]
        for copy in paths:
            check_format(copy)
        return paths
    # A file may have glob characters in its name, so the name itself is tried first.
    if path.is_file():
        check_format(path)
        return [path]
    if path.is_dir():
        files = sorted(_files_in(path, skipped_input))
        if not files:
            raise DataError(
                explain(
                    "a folder holds no file to train on",
                    given=source,
                    do="give a folder with some of " + " ".join(SUFFIXES),
                )
            )
        return files
    pattern = local_pattern(source, what="--data")
    paths = sorted(
        path
        for path in map(Path, set(matching(pattern)))
        if path.is_file() and not _is_header(path) and not _is_in_circle(path)
    )
    if not paths:
        raise no_match_error(source)
    for path in paths:
        check_format(path)
    return paths


def _files_in(top: Path, skipped_input: SkippedInput) -> Iterator[Path]:
    """Yield the files to train on in a folder and its subfolders, without hidden ones."""
    for folder, names, are_shards in data_folders(top):
        if are_shards:
            yield from (folder / name for name in names)
            continue
        for name in names:
            path = folder / name
            if not path.is_file() or name in _DATASET_METADATA or _is_header(path):
                continue
            if has_format(path):
                yield path
            else:
                skipped_input.other_files[path.suffix.lower()] += 1


def _is_header(path: Path) -> bool:
    """Whether a file is the header of a token file beside it."""
    return (
        path.name.lower().endswith(TOKEN_SUFFIX + HEADER_SUFFIX) and path.with_suffix("").exists()
    )


def _is_in_circle(path: Path) -> bool:
    """Whether a path goes through a link that leads back to a folder above it.

    A glob would find such a file dozens of times.
    """
    parents = map(os.stat, Path(os.path.abspath(path)).parents)
    above = [(status.st_dev, status.st_ino) for status in parents]
    return len(set(above)) < len(above)


def _read_stdlib() -> Iterator[str]:
    files = []
    for folder, subfolders, names in os.walk(sysconfig.get_path("stdlib")):
        subfolders[:] = [
            name for name in subfolders if name not in ("site-packages", "dist-packages")
        ]
        files += [os.path.join(folder, name) for name in names if name.endswith(".py")]
    for file in sorted(files):
        # A few of the library's own tests are in other encodings on purpose; they are left out.
        with contextlib.suppress(UnicodeDecodeError):
            if text := Path(file).read_bytes().decode():
                yield text


def _read_file(source_file: SourceFile, *, may_be_empty: bool) -> Iterator[Any]:
    path, is_empty = source_file.path, True
    if reads_text(path):
        check_content(path)
    documents = READERS[suffixes_of(path)[0]](source_file)
    while True:
        try:
            document = next(documents)
        except StopIteration:
            break
        except DataError:
            raise
        except Exception as error:  # libraries raise all kinds of errors for damaged files
            raise read_error(path, error) from error
        if document:
            is_empty = False
            yield document
    if is_empty and may_be_empty:
        source_file.skipped_input.empty_files.append(path)
    elif is_empty:
        bad = len(source_file.skipped_input.bad_lines.get(path, ()))
        skipped = f", {bad:,} bad line(s) skipped" if bad else ""
        raise DataError(
            explain(
                f"{path} holds no text",
                given=f"{path.stat().st_size} bytes{skipped}",
                do="leave it out, or write it again",
            )
        )
