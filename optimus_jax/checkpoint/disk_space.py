"""Whether the disk has room for a run's checkpoints: known before the first step instead of after
the first save that fails.

An estimate from above, as the arrays are compressed when they are written. What the file system
does not say (some have no number of files, few say anything of quotas) is unknown and not judged.
"""

import contextlib
import math
import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from optimus_jax.config import CheckpointConfig
from optimus_jax.errors import CheckpointError, explain

FILES_OF_CHECKPOINT, FILES_OF_PROCESS = 16, 16
"""Files and folders of a checkpoint, and further ones for every process that writes to it: twice
what Orbax was seen to make."""
COMPRESSED = 0.9
"""Share of a state's bytes that its checkpoint has at least: 0.92 was seen of float32 weights and
moments."""
FEWEST = 2
"""Checkpoints that there has to be room for: one is only deleted when the next is whole."""


@dataclass(frozen=True, kw_only=True)
class Room:
    """What a file system has for a run's checkpoints."""

    free_bytes: int
    free_files: int | None
    """None: it does not say."""
    used_bytes: int
    """By checkpoints of the run that are there."""
    num_there: int
    """How many those are."""


def room_in(directory: Path) -> Room | None:
    """The room in a directory of checkpoints; None: it cannot be asked."""
    there = (
        [path for path in directory.iterdir() if path.name.isdecimal()]
        if directory.is_dir()
        else []
    )
    try:
        parent = next(path for path in (directory, *directory.parents) if path.exists())
        free, facts = shutil.disk_usage(parent).free, os.statvfs(parent)
    except (OSError, StopIteration):
        return None
    return Room(
        free_bytes=free,
        free_files=facts.f_favail if facts.f_files else None,
        used_bytes=_size(there),
        num_there=len(there),
    )


def num_wanted(config: CheckpointConfig, first_step: int, last_step: int, num_there: int) -> int:
    """Checkpoints that a run will have at the same time, the one that is being written included."""
    steps = (
        []
        if not config.every
        else range(config.every * (first_step // config.every + 1), last_step, config.every)
    )
    num_saves = len(steps) + 1  # and the last step's
    lasting = (
        0
        if config.keep_every is None or not config.every
        else last_step // math.lcm(config.every, config.keep_every)
    )
    return min(config.keep + lasting + 1, num_there + num_saves)


def check_room(
    room: Room | None, num_bytes: int, *, wanted: int, num_processes: int, directory: Path
) -> str | None:
    """What is to be said before the run begins, in one sentence; None: there is room.

    Args:
      num_bytes: of the whole state.
      wanted: checkpoints that there will be at the same time.
    Raises:
      CheckpointError: there is no room for the next checkpoint, or not for FEWEST.
    """
    if room is None:
        return None
    files = FILES_OF_CHECKPOINT + FILES_OF_PROCESS * num_processes
    needed = f"{num_bytes:,} bytes and about {files} files each, before compression"
    have = (
        f"{room.free_bytes:,} bytes"
        + ("" if room.free_files is None else f" and {room.free_files:,} files")
        + f" free, and {room.num_there} checkpoint(s) of {room.used_bytes:,} bytes there"
    )
    fit = (room.free_bytes + room.used_bytes) // max(num_bytes, 1)
    has_files = room.free_files is None or room.free_files >= files
    least_bytes = COMPRESSED * num_bytes
    if (
        room.free_bytes < least_bytes
        or not has_files
        or room.free_bytes + room.used_bytes < min(FEWEST, wanted) * least_bytes
    ):
        first = f"{min(FEWEST, wanted)} checkpoint(s)"
        raise CheckpointError(
            explain(
                f"there is no room for {'the next checkpoint' if room.num_there else first}"
                " of this run",
                given=f"{needed}; {have}, in {directory}",
                do="make room, raise the quota, or choose another --run-dir",
            )
        )
    if fit < wanted or (
        room.free_files is not None and room.free_files < files * (wanted - room.num_there)
    ):
        return (
            "there may be no room for all checkpoints that the run will have at the same time:"
            f" {wanted} of {needed}; {have}, in {directory}"
        )
    return None


def _size(folders: Iterable[Path]) -> int:
    total = 0
    for folder in folders:
        for path in folder.rglob("*"):
            with contextlib.suppress(OSError):  # it is being deleted
                total += path.stat().st_size if path.is_file() else 0
    return total
