"""A run whose --run-dir is a URL: its local working directory, and downloads from the store.

The working directory is an ordinary run directory (run_directory/directory.py); a mirror uploads
what is new in it (store/mirror.py). This module prepares it: to resume on another machine, it
downloads the config, logs and newest complete checkpoint. Two copies of a run are compared by their
starts in events.jsonl: a copy whose starts are a prefix of the other's is older. If each has starts
that the other lacks, both have trained independently, and nothing is overwritten.
"""

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from optimus_jax.config import CheckpointConfig, Config, StoreConfig
from optimus_jax.errors import ConfigError, OptimusError, RunDirectoryError, StoreError, explain
from optimus_jax.run.named_run import check_names_run
from optimus_jax.run_directory.directory import RunDirectory, RunExistsError
from optimus_jax.store.download import Download
from optimus_jax.store.lease import LEASE, Lease, LeaseHeldError
from optimus_jax.store.mirror import Mirror, lease_lost_error
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
    """A run in a store and its local working directory."""

    url: Url
    objects: Objects
    directory: Path

    @classmethod
    def at(cls, url: Url, local_dir: str | None) -> "StoredRun":
        """The run at a URL.

        Args:
          local_dir: working directory; None: the one in the run's config, otherwise a directory in
            the cache that is named after the URL.
        Raises:
          ConfigError: the store is read-only.
          StoreError: the store cannot be reached.
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
            with contextlib.suppress(OptimusError, UnicodeDecodeError):  # raised again on resume
                local_dir = Config.from_json(text.decode()).store.local_dir
        if local_dir is None:
            directory = cache_directory() / "runs" / _cache_name(url)
        else:
            directory = local_path(local_dir, what="store.local_dir").absolute()
        return cls(url=url, objects=objects, directory=directory)

    @property
    def is_begun(self) -> bool:
        """Whether the run can be resumed, from the store or the working directory."""
        return (self.directory / CONFIG).exists() or self.objects.read(CONFIG) is not None

    def check_free(self) -> None:
        """Raise ConfigError if the store holds a run or other objects at the URL.

        The working directory is checked separately, as that of any run.
        """
        names = self.objects.sizes().keys() - {LEASE}
        if CONFIG in names:
            raise RunExistsError(
                explain(
                    "the store already holds a run there, and runs are never overwritten",
                    given=self.url,
                    do=f"resume it with --run-dir {self.url} --resume, or name another",
                )
            )
        if names:
            raise ConfigError(
                explain(
                    "the store holds objects there that do not belong to a run",
                    given=self.url / min(names),
                    do="choose a --run-dir that is new or empty",
                )
            )

    def fetch(self, say: Callable[[str], object]) -> None:
        """Bring the working directory up to date with the store, unless it is as new itself.

        Processes of a host that share the directory take turns; the first one downloads.

        Raises:
          ConfigError: there is no run, neither in the store nor locally.
          StoreError: both copies have trained independently, or the download fails.
        """
        with self._directory_lock():
            remote, local = self.objects.read(CONFIG), self.directory / CONFIG
            if remote is None and not local.exists():
                raise ConfigError(
                    explain(
                        "there is no run to resume",
                        given=f"{self.url}, which has no {CONFIG}, and {self.directory}",
                        do="give --run-dir the URL of a run, or start a new run without --resume",
                    )
                )
            if remote is None:
                say(f"{self.url} has no run yet: uploading it from {self.directory}")
            elif (missing := self._missing_locally()) == "all":
                self._download(say).run()
            elif missing is not None:
                self._download(say).checkpoint(missing)

    def fetch_copy(
        self, checkpoint: int | Literal["none"] | None, say: Callable[[str], object]
    ) -> None:
        """`run_to_read` into the working directory."""
        with self._directory_lock():
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
                manifest = self.directory / f"{step}.manifest"
                if (
                    content is not None
                    and _read(manifest) == content
                    and step in local_steps(self.directory)
                ):
                    break
                if (content := download.checkpoint(step)) is not None:
                    manifest.write_bytes(content)
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
        """Start uploading as the only writer.

        Args:
          is_resumed: whether the run is resumed; a new run requires an empty store.
          on_lost: called from another thread if another writer takes over the run.
          patience_s: seconds to wait for another writer to release its lease.
        Raises:
          LeaseHeldError: another process holds the lease, or wrote after `fetch`.
          ConfigError: another process started a run there after `check_free`.
          StoreError: the store cannot be written.
        """
        lease = Lease(
            self.objects,
            self.directory,
            warn=warn,
            patience_s=patience_s,
            on_lost=lambda holder: on_lost(lease_lost_error(self.url, self.directory, holder)),
        )
        try:
            if not is_resumed:
                self.check_free()
            elif self._missing_locally() is not None:
                raise LeaseHeldError(
                    explain(
                        "another process continued the run while this one waited for the lease",
                        given=self.url,
                        do="start again, with --resume",
                    )
                )
        except BaseException:
            lease.release()
            raise
        for stale in self._staging.glob("upload-*"):  # left by a killed process; uses disk
            shutil.rmtree(stale, ignore_errors=True)
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

    def _missing_locally(self) -> int | Literal["all"] | None:
        """What the store has and the working directory lacks: the step of a checkpoint, "all", or
        None for nothing.

        Raises:
          StoreError: both copies have trained independently.
        """
        if not (self.directory / CONFIG).exists():
            return "all"
        remote = starts(self.objects.read(EVENTS) or b"")
        local = starts(_read(self.directory / EVENTS))
        steps, newest = local_steps(self.directory), self._newest_remote_step()
        if remote == local:
            return newest if newest is not None and newest > max(steps, default=0) else None
        if remote == local[: len(remote)]:
            return None  # the local copy is newer
        if local == remote[: len(local)] and (
            not local or max(steps, default=0) <= remote[len(local)].step
        ):
            return "all"  # the local copy has saved nothing since the store's copy was continued
        raise StoreError(
            explain(
                "the run in the store and its local directory have both been trained "
                "since they were last equal",
                given=f"{self.url}, started {len(remote)} time(s), newest checkpoint {newest}; "
                f"{self.directory}, started {len(local)} time(s), "
                f"newest checkpoint {max(steps, default=None)}",
                do=f"to continue the store's copy: move {self.directory} away; to continue the "
                f"local copy: --run-dir {self.directory} --resume, which does not change the store",
            )
        )

    def _newest_remote_step(self) -> int | None:
        return max(complete_steps(self.objects.sizes()), default=None)

    @contextlib.contextmanager
    def _directory_lock(self) -> Iterator[None]:
        """Lock the working directory against other processes of the host; explain I/O errors."""
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
                    do="free disk space, fix permissions, or name another directory:"
                    " --set store.local_dir=DIR",
                )
            ) from error

    def _download(self, say: Callable[[str], object]) -> Download:
        return Download(
            objects=self.objects, directory=self.directory, staging=self._staging, say=say
        )

    @property
    def _staging(self) -> Path:
        """Directory beside the working directory for files in transfer to or from the store."""
        return self.directory.with_name(f"{self.directory.name}.transfer")


def run_to_read(
    text: UserPath,
    *,
    what: str,
    checkpoint: int | Literal["none"] | None = None,
    say: Callable[[str], object],
) -> Path:
    """The directory of a run that is only read: the given directory, or a local copy of a URL.

    The copy is brought up to date on each call; checkpoints that it has are not downloaded again.

    Args:
      text: directory or URL, as typed.
      what: name of the argument in error messages, such as the flag.
      checkpoint: step of the checkpoint to download; None: the newest complete one; "none": none.
      say: called with progress messages.
    Raises:
      ConfigError: there is no run, or no such checkpoint; or something else is named.
      StoreError: the download fails.
    """
    url = user_path(text, what=what)
    check_names_run(os.fspath(text), what=what)
    if isinstance(url, Path):
        return url
    run = StoredRun(
        url=url, objects=Objects(url), directory=cache_directory() / "read" / _cache_name(url)
    )
    run.fetch_copy(checkpoint, say)
    return run.directory


def config_of_run(run: RunDirectory, given: object, *, purpose: str, or_else: str = "") -> Config:
    """The config of a run that is only read.

    Args:
      given: how the user named it.
      purpose: what it is read for, such as "to export", for errors.
      or_else: what else could have been given.
    Raises:
      ConfigError: there is no run.
    """
    try:
        return Config.from_json(run.config_text())
    except OSError as error:
        raise ConfigError(
            explain(
                f"there is no run {purpose}",
                given=f"{given}, which has no {CONFIG}",
                do=f"give the directory of a run{or_else}",
            )
        ) from error


def _cache_name(url: Url) -> str:
    readable = re.sub(r"[^A-Za-z0-9._-]+", "-", str(url))[-80:].strip("-.")
    return f"{readable}-{hashlib.blake2b(str(url).encode(), digest_size=4).hexdigest()}"


def _read(path: Path) -> bytes:
    return path.read_bytes() if path.exists() else b""
