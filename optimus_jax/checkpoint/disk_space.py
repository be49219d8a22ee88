"""Check before the first step whether the disk has space for a run's checkpoints.

The estimate of the space needed is an upper bound, because arrays are compressed when they are
written. What the file system does not report (some do not report free files, few report quotas) is
not checked.
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
"""Files and folders per checkpoint, and additional ones per process that writes to it: twice the
numbers observed with Orbax."""
MIN_COMPRESSED_SHARE = 0.9
"""Lower bound of a checkpoint's size relative to its state: 0.92 was observed for float32 weights
and moments."""
MIN_CHECKPOINTS = 2
"""Number of checkpoints that must fit, because the old one is deleted only when the next is
complete."""


@dataclass(frozen=True, kw_only=True)
class DiskSpace:
    """Space that a file system has for a run's checkpoints."""

    free_bytes: int
    free_files: int | None
    """Number of files that can still be created; None if the file system does not report it."""
    used_bytes: int
    """Bytes used by the run's existing checkpoints."""
    num_checkpoints: int
    """Number of existing checkpoints."""


def disk_space_of(directory: Path) -> DiskSpace | None:
    """The space for a directory of checkpoints; None if the system does not report it."""
    existing = (
        [path for path in directory.iterdir() if path.name.isdecimal()]
        if directory.is_dir()
        else []
    )
    try:
        parent = next(path for path in (directory, *directory.parents) if path.exists())
        free, facts = shutil.disk_usage(parent).free, os.statvfs(parent)
    except (OSError, StopIteration):
        return None
    return DiskSpace(
        free_bytes=free,
        free_files=facts.f_favail if facts.f_files else None,
        used_bytes=_size(existing),
        num_checkpoints=len(existing),
    )


def max_checkpoints(
    config: CheckpointConfig, first_step: int, last_step: int, num_checkpoints: int
) -> int:
    """Maximum number of checkpoints that a run has at the same time, including the one being
    written.
    """
    steps = (
        []
        if not config.every
        else range(config.every * (first_step // config.every + 1), last_step, config.every)
    )
    num_saves = len(steps) + 1  # including the last step's
    lasting = (
        0
        if config.keep_every is None or not config.every
        else last_step // math.lcm(config.every, config.keep_every)
    )
    return min(config.keep + lasting + 1, num_checkpoints + num_saves)


def check_disk_space(
    space: DiskSpace | None, num_bytes: int, *, wanted: int, num_processes: int, directory: Path
) -> str | None:
    """Check that the checkpoints fit.

    Returns a warning if some may not fit; None if all do, or if the space is unknown.

    Args:
      num_bytes: bytes of the whole state.
      wanted: maximum number of checkpoints at the same time.
    Raises:
      CheckpointError: there is no space for the next checkpoint, or for MIN_CHECKPOINTS.
    """
    if space is None:
        return None
    files = FILES_OF_CHECKPOINT + FILES_OF_PROCESS * num_processes
    needed = f"{num_bytes:,} bytes and about {files} files each, before compression"
    have = (
        f"{space.free_bytes:,} bytes"
        + ("" if space.free_files is None else f" and {space.free_files:,} files")
        + f" free, and {space.num_checkpoints} checkpoint(s) of {space.used_bytes:,} bytes there"
    )
    fit = (space.free_bytes + space.used_bytes) // max(num_bytes, 1)
    has_files = space.free_files is None or space.free_files >= files
    least_bytes = MIN_COMPRESSED_SHARE * num_bytes
    if (
        space.free_bytes < least_bytes
        or not has_files
        or space.free_bytes + space.used_bytes < min(MIN_CHECKPOINTS, wanted) * least_bytes
    ):
        first = f"{min(MIN_CHECKPOINTS, wanted)} checkpoint(s)"
        raise CheckpointError(
            explain(
                f"there is no room for {'the next checkpoint' if space.num_checkpoints else first}"
                " of this run",
                given=f"{needed}; {have}, in {directory}",
                do="make room, raise the quota, or choose another --run-dir",
            )
        )
    if fit < wanted or (
        space.free_files is not None and space.free_files < files * (wanted - space.num_checkpoints)
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
