"""A run whose --run-dir is a URL: where it works here, and what it brings from its store.

The directory that it works in is what any run has (run_directory/directory.py); a mirror uploads
what is new in it (store/mirror.py). Here is what comes before: who goes on with the run on another
machine gets its config, logs and newest complete checkpoint. Two copies of a run are compared by
their starts, which events.jsonl has: the one whose starts are a part of the other's is older. If
each has starts that the other lacks, both have trained on, and nothing is overwritten.
"""

import contextlib
import fcntl
import hashlib
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from optimus_jax.config import CheckpointConfig, Config, StoreConfig
from optimus_jax.errors import ConfigError, OptimusError, RunDirectoryError, StoreError, explain
from optimus_jax.run_directory.directory import RunExistsError
from optimus_jax.store.download import Download
from optimus_jax.store.lease import LEASE, Lease, LeaseHeldError
from optimus_jax.store.mirror import Mirror, lost_to
from optimus_jax.store.objects import Objects
from optimus_jax.store.run_objects import (
    CHECKPOINTS,
    CONFIG,
    EVENTS,
    complete_steps,
    is_plain,
    local_steps,
    manifest_name,
    starts,
)
from optimus_jax.system.cache import cache_directory
from optimus_jax.system.paths import Url, UserPath, local_path, user_path


@dataclass(frozen=True, kw_only=True)
class StoredRun:
    """A run in a store, and where it works here."""

    url: Url
    objects: Objects
    directory: Path

    @classmethod
    def at(cls, url: Url, local_dir: str | None) -> "StoredRun":
        """The run of a URL.

        Args:
          local_dir: where it is to work; None: where its config says, else a directory in the
            cache that is named after the URL.
        Raises:
          ConfigError: the store is one that is only read.
          StoreError: it cannot be reached.
        """
        if not url.is_writable:
            raise ConfigError(
                explain(
                    f"no run can be kept in a {url.scheme}:// URL",
                    given=f"--run-dir {url}",
                    do="give a directory, or a URL of s3://, gs:// or az://",
                )
            )
        objects = Objects(url)
        if local_dir is None and (text := objects.read(CONFIG)) is not None:
            with contextlib.suppress(OptimusError, UnicodeDecodeError):  # told when it is resumed
                local_dir = Config.from_json(text.decode()).store.local_dir
        if local_dir is None:
            return cls(url=url, objects=objects, directory=cache_directory() / "runs" / _named(url))
        directory = local_path(local_dir, what="store.local_dir").absolute()
        return cls(url=url, objects=objects, directory=directory)

    @property
    def is_begun(self) -> bool:
        """Whether the run can be resumed, from the store or from here."""
        return (self.directory / CONFIG).exists() or self.objects.read(CONFIG) is not None

    def check_free(self) -> None:
        """Raise ConfigError if the store holds a run there, or other objects.

        The directory is checked as that of any run.
        """
        names = self.objects.sizes().keys() - {LEASE}
        if CONFIG in names:
            raise RunExistsError(
                explain(
                    "the store already holds a run there, and runs are never overwritten",
                    given=self.url,
                    do=f"go on with it by --run-dir {self.url} --resume, or name another",
                )
            )
        if names:
            raise ConfigError(
                explain(
                    "the store holds objects there that are not a run's",
                    given=self.url / min(names),
                    do="choose a --run-dir that is new or empty",
                )
            )

    def fetch(self, say: Callable[[str], object]) -> None:
        """Bring the directory to where the run is: from the store, unless it is as new itself.

        Processes of a host that share the directory take turns, and the first fetches.

        Raises:
          ConfigError: there is no run, neither there nor here.
          StoreError: both have trained on since they were the same, or it cannot be fetched.
        """
        with self._in_turn():
            there, here = self.objects.read(CONFIG), self.directory / CONFIG
            if there is None and not here.exists():
                raise ConfigError(
                    explain(
                        "there is no run to resume",
                        given=f"{self.url}, which has no {CONFIG}, and {self.directory}",
                        do="give --run-dir the URL of a run, or start a new run without --resume",
                    )
                )
            if there is None:
                say(f"{self.url} has no run yet: it is uploaded from {self.directory}")
            elif (lacking := self._lacking()) == "all":
                self._download(say).run()
            elif lacking is not None:
                self._download(say).checkpoint(lacking)

    def fetch_to_read(
        self, checkpoint: int | Literal["none"] | None, say: Callable[[str], object]
    ) -> None:
        """As `run_to_read`, into the directory."""
        with self._in_turn():
            names = self.objects.sizes()
            if CONFIG not in names:
                raise ConfigError(
                    explain(
                        "there is no run there",
                        given=f"{self.url}, which has no {CONFIG}",
                        do="give the URL of a run",
                    )
                )
            steps = complete_steps(names)
            if isinstance(checkpoint, int) and checkpoint not in steps:
                raise ConfigError(
                    explain(
                        f"the store has no complete checkpoint of step {checkpoint}",
                        given=f"{self.url}, steps {', '.join(map(str, steps)) or 'none'}",
                        do="choose another step",
                    )
                )
            download = self._download(say)
            download.files([name for name in names if is_plain(name)])
            wanted = (
                []
                if checkpoint == "none"
                else [checkpoint]
                if checkpoint is not None
                else steps[::-1]
            )
            for step in wanted:
                content = self.objects.read(manifest_name(step))
                kept = self.directory / f"{step}.manifest"
                if (
                    content is not None
                    and _read(kept) == content
                    and step in local_steps(self.directory)
                ):
                    break
                if (content := download.checkpoint(step)) is not None:
                    kept.write_bytes(content)
                    break
            for other in local_steps(self.directory) if wanted else []:
                if other not in steps or (checkpoint is None and other > step):
                    shutil.rmtree(self.directory / CHECKPOINTS / str(other))

    def mirror(
        self,
        checkpoint: CheckpointConfig,
        store: StoreConfig,
        *,
        is_resumed: bool,
        warn: Callable[[str], object],
        on_lost: Callable[[RunDirectoryError], object],
        patience_s: float,
    ) -> Mirror:
        """Begin to upload, as the only writer.

        Args:
          is_resumed: whether the run goes on; a new one finds nothing there.
          on_lost: told, from another thread, that another writer has taken the run's place.
          patience_s: for so long another writer is waited for.
        Raises:
          LeaseHeldError: another process writes there, or did until after `fetch`.
          ConfigError: another process has begun a run there since `check_free`.
          StoreError: the store cannot be written.
        """
        lease = Lease(
            self.objects,
            self.directory,
            warn=warn,
            patience_s=patience_s,
            on_lost=lambda holder: on_lost(lost_to(self.url, self.directory, holder)),
        )
        try:
            if not is_resumed:
                self.check_free()
            elif self._lacking() is not None:
                raise LeaseHeldError(
                    explain(
                        "the run went on while this process waited for its turn",
                        given=self.url,
                        do="start again, with --resume",
                    )
                )
        except BaseException:
            lease.release()
            raise
        for left in self._staging.glob("upload-*"):  # by a process that was killed; it holds disk
            shutil.rmtree(left, ignore_errors=True)
        return Mirror(
            self.directory,
            self.objects,
            staging=self._staging,
            lease=lease,
            every_s=store.every_s,
            keep=checkpoint.keep,
            keep_every=checkpoint.keep_every,
            warn=warn,
        )

    def _lacking(self) -> int | Literal["all"] | None:
        """What the store has and the directory lacks: a checkpoint, by its step, or all of it.

        Raises:
          StoreError: the directory has been trained on, and so has the run in the store.
        """
        if not (self.directory / CONFIG).exists():
            return "all"
        there = starts(self.objects.read(EVENTS) or b"")
        here = starts(_read(self.directory / EVENTS))
        steps, newest = local_steps(self.directory), self._newest_there()
        if there == here:
            return newest if newest is not None and newest > max(steps, default=0) else None
        if there == here[: len(there)]:
            return None  # what is here goes on from there
        if here == there[: len(here)] and (
            not here or max(steps, default=0) <= there[len(here)].step
        ):
            return "all"  # nothing was saved here since the store's went on
        raise StoreError(
            explain(
                "the run in the store and its directory here have both been trained on "
                "since they were the same",
                given=f"{self.url}, started {len(there)} time(s), newest checkpoint {newest}; "
                f"{self.directory}, started {len(here)} time(s), "
                f"newest checkpoint {max(steps, default=None)}",
                do=f"to go on with the store's: move {self.directory} away; to go on with what is "
                f"here: --run-dir {self.directory} --resume, which leaves the store as it is",
            )
        )

    def _newest_there(self) -> int | None:
        return max(complete_steps(self.objects.sizes()), default=None)

    @contextlib.contextmanager
    def _in_turn(self) -> Iterator[None]:
        """One of the processes that share the directory at a time, with trouble explained."""
        try:
            self._staging.mkdir(parents=True, exist_ok=True)
            with open(self._staging / "lock", "ab") as file:
                with contextlib.suppress(OSError):
                    fcntl.flock(file, fcntl.LOCK_EX)
                yield
        except OSError as error:
            raise StoreError(
                explain(
                    f"the run's working directory cannot be written: {error.strerror or error}",
                    given=f"{self.directory}, for --run-dir {self.url}",
                    do="make room, mend permissions, or name another: --set store.local_dir=DIR",
                )
            ) from error

    def _download(self, say: Callable[[str], object]) -> Download:
        return Download(
            objects=self.objects, directory=self.directory, staging=self._staging, say=say
        )

    @property
    def _staging(self) -> Path:
        """Beside the directory: what is on its way to or from the store."""
        return self.directory.with_name(f"{self.directory.name}.transfer")


def run_to_read(
    text: UserPath,
    *,
    what: str,
    checkpoint: int | Literal["none"] | None = None,
    say: Callable[[str], object],
) -> Path:
    """The directory of a run that is only read: as typed, or a copy of what a URL names.

    The copy is brought up to date each time; a checkpoint that it has is not fetched again.

    Args:
      what: what to call it in errors: the flag.
      checkpoint: step of the checkpoint to fetch; None: the newest that is whole; "none": none.
      say: told what is fetched.
    Raises:
      ConfigError: there is no run, or no such checkpoint.
      StoreError: it cannot be fetched.
    """
    url = user_path(text, what=what)
    if isinstance(url, Path):
        return url
    run = StoredRun(
        url=url, objects=Objects(url), directory=cache_directory() / "read" / _named(url)
    )
    run.fetch_to_read(checkpoint, say)
    return run.directory


def _named(url: Url) -> str:
    readable = re.sub(r"[^A-Za-z0-9._-]+", "-", str(url))[-80:].strip("-.")
    return f"{readable}-{hashlib.blake2b(str(url).encode(), digest_size=4).hexdigest()}"


def _read(path: Path) -> bytes:
    return path.read_bytes() if path.exists() else b""
