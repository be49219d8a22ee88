"""A run's objects, downloaded into the directory that it works in.

Each file is whole or not there, and a checkpoint appears in one go, as where it was saved. Who
fetches a run gets its config last, so that what was broken off is no run yet.
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
    is_plain,
    manifest_name,
)

NUM_TRANSFERS = 4
"""Files on their way at the same time."""


@dataclass(frozen=True, kw_only=True)
class Download:
    """From a run in a store to a directory.

    Args:
      objects: of the run.
      directory: of the run.
      staging: a directory on the same disk, for what is on its way.
      say: told what is fetched, and what is passed over.
    """

    objects: Objects
    directory: Path
    staging: Path
    say: Callable[[str], object]

    def run(self) -> None:
        """The newest checkpoint that is whole, logs, plan and config."""
        names = self.objects.sizes()
        for step in reversed(complete_steps(names)):
            if self.checkpoint(step) is not None:
                break
        self.say(f"fetching the logs of {self.objects.url} into {self.directory}")
        last = [CONFIG, EVENTS]  # these make it newer than it was, or a run at all
        if not (self.directory / CONFIG).exists():
            last.reverse()
        plain = [name for name in names if is_plain(name)]
        self.files(
            [*(name for name in plain if name not in last), *(n for n in last if n in plain)]
        )

    def files(self, names: list[str]) -> None:
        """Plain files, one after the other; each replaces the one that is there."""
        self.staging.mkdir(parents=True, exist_ok=True)
        part = self.staging / "file"
        for name in names:
            target = self.directory / name
            if ".." in target.parts:
                continue  # no name that we write
            target.parent.mkdir(parents=True, exist_ok=True)
            if self.objects.get(name, part):
                os.replace(part, target)

    def checkpoint(self, step: int) -> bytes | None:
        """A checkpoint, put in place in one go; its manifest, or None if it is not whole."""
        where = f"the checkpoint of step {step} in {self.objects.url}"
        content = self.objects.read(manifest_name(step)) or b""
        try:
            manifest = Manifest.from_json(content)
        except ValueError as error:
            self.say(f"{where} is passed over: {error}")
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
            self.say(f"{where} is damaged and passed over: {', '.join(wrong)}")
            shutil.rmtree(folder)
            return None
        target = self.directory / CHECKPOINTS / str(step)
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.exists():  # of the same course, so the same, unless it was damaged
            shutil.rmtree(target)
        os.rename(folder, target)
        return content
