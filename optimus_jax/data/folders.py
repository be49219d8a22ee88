"""Walks folders and expands globs without looping on symbolic links, and knows the folders of data
sets that Hugging Face's library has saved.

Each real folder is visited once, under the path that goes through the fewest links. The standard
library's `glob` follows every link at every depth: two links back to their own folder give 2^40
names.
"""

import contextlib
import glob
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from optimus_jax.errors import DataError, explain

_ANY_DEPTH = "**"


def walk(top: Path) -> Iterator[tuple[Path, list[str], list[str]]]:
    """Yield `top` and its subfolders at any depth, as (path, subfolder names, other names).

    Hidden names are left out; the others are sorted. Links are followed only after everything in
    `top` itself has been visited. Remove a name from the list of subfolders to skip that folder.

    Raises:
      OSError: a folder cannot be read.
    """
    seen: set[tuple[int, int]] = set()
    waiting, links = [top], list[Path]()
    while waiting or links:
        folder = waiting.pop() if waiting else links.pop(0)
        status = os.stat(folder)
        if (status.st_dev, status.st_ino) in seen:
            continue
        seen.add((status.st_dev, status.st_ino))
        with os.scandir(folder) as entries:
            found = sorted(
                (entry.name, os.path.isdir(entry))
                for entry in entries
                if not entry.name.startswith(".")
            )
        subfolders = [name for name, is_dir in found if is_dir]
        yield folder, subfolders, [name for name, is_dir in found if not is_dir]
        for path in (folder / name for name in reversed(subfolders)):
            if path.is_symlink():
                links.append(path)
            else:
                waiting.append(path)


def data_folders(top: Path) -> Iterator[tuple[Path, list[str], bool]]:
    """Yield `top` and its subfolders as (path, names of files, whether these are the shards of a
    data set that Hugging Face's library has saved).

    Raises:
      DataError: a folder is a datasets.DatasetDict with several splits.
      OSError: a folder cannot be read.
    """
    for folder, subfolders, names in walk(top):
        if "dataset_dict.json" in names and len(subfolders) > 1:
            raise DataError(
                explain(
                    "a folder holds several splits of a data set",
                    given=f"{folder}: {', '.join(subfolders)}",
                    do=f"name one to train on: {folder / subfolders[-1]}",
                )
            )
        shards = _shards(folder, names)
        if shards:
            subfolders.clear()
        yield folder, shards or names, bool(shards)


def _shards(folder: Path, names: Sequence[str]) -> list[str]:
    """The files of a data set written by datasets.Dataset.save_to_disk, or of one in its cache;
    none: the folder is no such data set.

    Files that `map` and similar calls left in the cache are excluded.

    Args:
      names: of the files in it.
    """
    if "dataset_info.json" not in names and "state.json" not in names:
        return []
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        state = json.loads((folder / "state.json").read_bytes())
        return [os.path.basename(file["filename"]) for file in state["_data_files"]]
    return [name for name in names if name.endswith(".arrow") and not name.startswith("cache-")]


def matching(pattern: str) -> Iterator[str]:
    """Yield the names that a glob matches, some of them twice; `**` matches folders at any depth.

    Raises:
      OSError: a folder that `**` matches cannot be read.
    """
    parts = pattern.split(os.sep)
    if _ANY_DEPTH not in parts:
        yield from glob.iglob(pattern)
        return
    first = parts.index(_ANY_DEPTH)
    behind = parts[first + 1 :]
    while behind[:1] == [_ANY_DEPTH]:
        behind.pop(0)
    above = os.sep.join(parts[:first]) or (os.sep if first else os.curdir)
    for top in glob.iglob(above):
        if os.path.isdir(top):
            for folder, _, _ in walk(Path(top)):
                yield from matching(os.path.join(glob.escape(str(folder)), *(behind or ["*"])))
