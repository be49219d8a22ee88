"""Walks folders and expands globs without looping on symbolic links.

Each real folder is visited once, under the path that goes through the fewest links. The standard
library's `glob` follows every link at every depth: two links back to their own folder give 2^40
names.
"""

import glob
import os
from collections.abc import Iterator
from pathlib import Path

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
