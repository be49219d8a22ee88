"""Downloads a run from an object store into its working directory.

Each file appears atomically, and so does a whole checkpoint. The config is downloaded last, so that
an interrupted download does not look like a run.
"""

import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from optimus_jax.store.objects import Objects
from optimus_jax.store.run_objects import (
    CHECKPOINTS,
    CONFIG,
    EVENTS,
    FileChecksum,
    Manifest,
    complete_steps,
    is_inside,
    is_plain,
    manifest_name,
)

NUM_TRANSFERS = 4
"""Concurrent transfers."""


@dataclass(frozen=True, kw_only=True)
class Download:
    """A download of one run.

    Args:
      objects: the run's objects.
      directory: the run's local directory.
      staging: a directory on the same disk for partial downloads.
      say: called with a message about what is fetched or skipped.
    """

    objects: Objects
    directory: Path
    staging: Path
    say: Callable[[str], object]

    def run(self) -> None:
        """Download the newest complete checkpoint, then logs, plan and config."""
        names = self.objects.sizes()
        for step in reversed(complete_steps(names)):
            if self.checkpoint(step) is not None:
                break
        self.say(f"fetching the logs of {self.objects.url} into {self.directory}")
        last = [CONFIG, EVENTS]  # last: these make the directory a run, or a newer one
        if not (self.directory / CONFIG).exists():
            last.reverse()
        plain = [name for name in names if is_plain(name)]
        self.files(
            [*(name for name in plain if name not in last), *(n for n in last if n in plain)]
        )

    def files(self, names: list[str]) -> None:
        """Download plain files in order; each replaces the local one."""
        self.staging.mkdir(parents=True, exist_ok=True)
        part = self.staging / "file"
        for name in names:
            if not is_inside(name):
                continue  # not a name that this package writes
            target = self.directory / name
            target.parent.mkdir(parents=True, exist_ok=True)
            if self.objects.get(name, part):
                os.replace(part, target)

    def checkpoint(self, step: int) -> bytes | None:
        """Download a checkpoint and install it atomically.

        Returns its manifest; None if the checkpoint is incomplete or damaged.
        """
        where = f"the checkpoint of step {step} in {self.objects.url}"
        content = self.objects.read(manifest_name(step)) or b""
        try:
            manifest = Manifest.from_json(content)
        except ValueError as error:
            self.say(f"{where} is skipped: {error}")
            return None
        num_bytes = sum(file.size for file in manifest.files.values())
        self.say(f"fetching {where}, {num_bytes:,} bytes")
        folder = self.staging / f"fetch-{step}"
        shutil.rmtree(folder, ignore_errors=True)

        def is_damaged(name: str) -> bool:
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            is_there = self.objects.get(f"{CHECKPOINTS}/{step}/{name}", target)
            return not is_there or FileChecksum.of(target) != manifest.files[name]

        with ThreadPoolExecutor(NUM_TRANSFERS, thread_name_prefix="fetch") as pool:
            damage = dict(zip(manifest.files, pool.map(is_damaged, manifest.files), strict=True))
        if wrong := [name for name, is_wrong in damage.items() if is_wrong]:
            self.say(f"{where} is damaged and skipped: {', '.join(wrong)}")
            shutil.rmtree(folder)
            return None
        target = self.directory / CHECKPOINTS / str(step)
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.exists():  # the same checkpoint of the same run, unless the local one is damaged
            shutil.rmtree(target)
        os.rename(folder, target)
        return content
