"""Mirrors a run directory to an object store while the run continues.

The run writes to its local directory as usual. The mirror watches that directory from its own
thread and uploads what is new: logs, config and plan every few seconds, a checkpoint as soon as it
is complete. A checkpoint counts as stored once its manifest is, which is written last. A checkpoint
that was deleted locally is deleted in the store only after a newer one is complete there.

A failed upload is reported at once and retried while the run continues. `finish` uploads what is
left at the end of the run before it returns.
"""

import contextlib
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from optimus_jax.errors import RunDirectoryError, StoreError, explain, first_line
from optimus_jax.store.download import NUM_TRANSFERS
from optimus_jax.store.lease import Lease
from optimus_jax.store.objects import Objects
from optimus_jax.store.run_objects import (
    CHECKPOINTS,
    CONFIG,
    FileChecksum,
    FileIdentity,
    Manifest,
    complete_steps,
    files_below,
    local_checkpoints,
    local_steps,
    manifest_name,
    plain_files,
)

FINAL_TRIES = 6
"""Consecutive failed uploads at the end of a run that are an error."""
_POLL_S = 0.5
"""Time between checks for new checkpoints."""
_LEAST_BACKOFF_S, _MOST_BACKOFF_S = 2.0, 120.0
_PAUSE_RATIO = 4.0
"""Pause between uploads, as a multiple of the last upload's duration: large logs must not be
uploaded continuously."""
_PROGRESS_S = 10.0
"""Time between progress messages at the end of a run."""

_Signature = tuple[int, int, int]


class Mirror:
    """Uploads from construction until `finish` or `abandon`.

    Args:
      directory: the run directory; it may still be empty.
      objects: the run's objects in the store.
      staging: a directory on the same disk; checkpoints are hard-linked there during upload, so
        that the run may delete them meanwhile.
      every_s: time between uploads of the logs.
      keep: number of newest checkpoints kept in the store, besides all in the directory.
      keep_every: checkpoints of steps divisible by this are kept forever; None: no such rule.
      warn: called from another thread with a message about a failure that the run survives.
      settle_s: a checkpoint whose files are unchanged after this time is not being deleted.
    """

    def __init__(
        self,
        directory: Path,
        objects: Objects,
        *,
        staging: Path,
        lease: Lease | None,
        every_s: float,
        keep: int,
        keep_every: int | None,
        warn: Callable[[str], object],
        settle_s: float = 0.5,
    ) -> None:
        self._directory, self._objects = directory, objects
        self._staging, self._lease, self._settle_s = staging, lease, settle_s
        self._every_s, self._keep, self._keep_every, self._warn = every_s, keep, keep_every, warn
        self._sent: dict[str, _Signature] = {}
        self._complete: set[int] | None = None
        """Steps of complete checkpoints in the store; None: not yet listed."""
        self._same: dict[int, FileIdentity] = {}
        """Steps in the store whose checkpoint is identical to the local one, present or past."""
        self._uploaded: set[int] = set()
        self._left: tuple[int, int] = 0, 0
        self._failure: Exception | None = None
        self._is_ending, self._is_given_up = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="mirror", daemon=True)
        self._thread.start()

    def finish(self, say: Callable[[str], object]) -> None:
        """Upload what is left, then stop. Ctrl-C gives up.

        Args:
          say: called with progress messages.
        Raises:
          StoreError: the upload failed; the local directory is unchanged.
        """
        self._is_ending.set()
        told_s = time.monotonic() + _POLL_S
        with self._giving_up_on_ctrl_c():
            while self._thread.is_alive() and not self._is_given_up.is_set():
                self._thread.join(0.1)
                if self._thread.is_alive() and time.monotonic() >= told_s:
                    told_s = time.monotonic() + _PROGRESS_S
                    num_files, num_bytes = self._left
                    rest = f"{num_files} file(s), {num_bytes:,} bytes" if num_files else "logs"
                    say(f"uploading to {self._objects.url}: {rest} to go")
        if self._is_given_up.is_set() and not self.is_lost:
            raise self._error("was given up by Ctrl-C")
        shutil.rmtree(self._staging, ignore_errors=True)
        if self._lease is not None:
            self._lease.release()
        if self.is_lost:
            raise StoreError(str(lease_lost_error(self._objects.url, self._directory)))
        if self._failure is not None:
            raise self._error(f"failed {FINAL_TRIES} times") from self._failure
        if (self._directory / CONFIG).exists():
            say(f"uploaded: all of the run is in {self._objects.url}")

    @property
    def is_lost(self) -> bool:
        """Whether another writer has taken over the run in the store."""
        return self._lease is not None and self._lease.is_lost

    def abandon(self) -> None:
        """Stop at once. What is not uploaded stays in the directory; the lease expires by
        itself."""
        self._is_given_up.set()
        self._is_ending.set()

    def _error(self, what: str) -> StoreError:
        why = "" if self._failure is None else f"\n    {first_line(self._failure)}"
        return StoreError(
            explain(
                f"the upload of what is new in the run {what}{why}",
                given=f"{self._directory} is complete; {self._objects.url} is not",
                do="when the store can be written: --resume with the same --run-dir uploads it; "
                f"or resume without the store with --run-dir {self._directory} --resume",
            )
        )

    @contextlib.contextmanager
    def _giving_up_on_ctrl_c(self) -> Iterator[None]:
        """Context in which Ctrl-C gives up the upload; otherwise it is ignored at the end of a
        run."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.signal(signal.SIGINT, lambda *_: self._is_given_up.set())
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def _run(self) -> None:
        """The upload loop; ends after the upload that follows `finish`."""
        last_s, took_s, num_failures = time.monotonic(), 0.0, 0
        while not self._is_given_up.is_set():
            is_last = self._is_ending.is_set()
            waited_s = time.monotonic() - last_s
            is_due = (
                waited_s >= max(self._every_s, _PAUSE_RATIO * took_s) or self._has_new_checkpoint()
            )
            if is_last or is_due:
                began_s = time.monotonic()
                try:
                    self._upload_what_is_new()
                except Exception as error:  # a bug in the mirror must not end the run either
                    num_failures += 1
                    self._failed(error, num_failures)
                    if is_last and num_failures >= FINAL_TRIES:
                        return
                    self._back_off(num_failures, is_last)
                    continue
                if self._failure is not None:
                    self._warn(f"uploads to {self._objects.url} work again")
                self._failure, num_failures = None, 0
                last_s, took_s = time.monotonic(), time.monotonic() - began_s
                if is_last:
                    return
            self._is_ending.wait(_POLL_S)

    def _back_off(self, num_failures: int, is_last: bool) -> None:
        for_s = min(_MOST_BACKOFF_S, _LEAST_BACKOFF_S * 2 ** (num_failures - 1))
        (self._is_given_up if is_last else self._is_ending).wait(for_s)

    def _failed(self, error: Exception, num_failures: int) -> None:
        self._failure = error
        self._complete = None  # list the store again
        if num_failures == 1 and not self.is_lost:
            self._warn(
                f"an upload to {self._objects.url} failed and is tried again; "
                f"the run continues in {self._directory}: {first_line(error)}"
            )

    def _has_new_checkpoint(self) -> bool:
        return bool(self._waiting())

    def _waiting(self) -> list[int]:
        """Steps of local checkpoints that the store does not have, oldest first."""
        here = local_checkpoints(self._directory)
        return [step for step, which in here.items() if self._same.get(step) != which]

    def _upload_what_is_new(self) -> None:
        if not (self._directory / CONFIG).exists():
            self._remove_discarded_run()
            return
        if self._complete is None:
            self._complete, self._same = self._look_up()
        for step in reversed(self._waiting()):  # newest first
            self._upload_checkpoint(step)
        self._upload_plain_files()
        self._rotate(set(local_steps(self._directory)))

    def _look_up(self) -> tuple[set[int], dict[int, FileIdentity]]:
        """Complete checkpoints in the store, and those that are identical to local ones."""
        sizes, same = self._objects.sizes(), {}
        checkpoints = local_checkpoints(self._directory)
        for step in complete_steps(sizes):
            files = files_below(self._directory / CHECKPOINTS / str(step))
            here = {name: path.stat().st_size for name, path in files.items()}
            prefix = f"{CHECKPOINTS}/{step}/"
            there = {
                name.removeprefix(prefix): size
                for name, size in sizes.items()
                if name.startswith(prefix)
            }
            if step in checkpoints and here == there:
                same[step] = checkpoints[step]
        return set(complete_steps(sizes)), same

    def _upload_checkpoint(self, step: int) -> None:
        """Upload a checkpoint's files, then the logs up to now, then the manifest."""
        assert self._complete is not None
        which = local_checkpoints(self._directory).get(step)
        with self._pinned(step) as folder:
            if folder is None or which is None:
                return
            files = files_below(folder)
            # the manifest of an abandoned branch of the run
            self._objects.delete([manifest_name(step)])
            self._complete.discard(step)
            prefix = f"{CHECKPOINTS}/{step}/"
            stray = self._objects.sizes(prefix.rstrip("/")).keys() - {
                prefix + name for name in files
            }
            self._objects.delete(sorted(stray))
            self._left = len(files), sum(path.stat().st_size for path in files.values())
            checksums: dict[str, FileChecksum] = {}

            def upload(name: str, path: Path) -> None:
                if self._is_given_up.is_set():
                    return
                checksums[name] = FileChecksum.of(path)
                self._objects.put(path, prefix + name)
                self._left = self._left[0] - 1, self._left[1] - checksums[name].size

            with ThreadPoolExecutor(NUM_TRANSFERS, thread_name_prefix="upload") as pool:
                for future in [pool.submit(upload, name, path) for name, path in files.items()]:
                    future.result()
            if self._is_given_up.is_set():
                return
        self._upload_plain_files()
        if self._lease is not None:
            self._lease.check()
        self._check_lease()
        checksums = {name: checksums[name] for name in sorted(checksums)}
        self._objects.write(manifest_name(step), Manifest(step=step, files=checksums).to_json())
        self._complete.add(step)
        self._same[step] = which
        self._uploaded.add(step)

    @contextlib.contextmanager
    def _pinned(self, step: int) -> Iterator[Path | None]:
        """A hard-linked copy of a checkpoint, stable during its upload; None: it is being deleted.

        On a file system without hard links the checkpoint itself is yielded, and its upload fails
        if it is deleted meanwhile.
        """
        source, pinned = self._directory / CHECKPOINTS / str(step), self._staging / f"upload-{step}"
        shutil.rmtree(pinned, ignore_errors=True)
        try:
            self._staging.mkdir(parents=True, exist_ok=True)
            shutil.copytree(source, pinned, copy_function=os.link)
            folder = pinned
        except (OSError, shutil.Error):
            folder = source
        try:
            before = files_below(folder).keys()
            time.sleep(self._settle_s)
            yield folder if before and files_below(source).keys() == before else None
        finally:
            shutil.rmtree(pinned, ignore_errors=True)

    def _upload_plain_files(self) -> None:
        for name, path in plain_files(self._directory).items():
            try:
                status = path.stat()
                signature = status.st_mtime_ns, status.st_size, status.st_ino
                if self._sent.get(name) == signature:
                    continue
                content = path.read_bytes()
            except FileNotFoundError:
                continue  # a temporary file
            self._check_lease()
            self._objects.write(name, content)
            self._sent[name] = signature

    def _rotate(self, local: set[int]) -> None:
        """Delete checkpoints that neither the directory nor the settings keep, once the newest is
        uploaded.
        """
        assert self._complete is not None
        if not self._uploaded or not local or max(local) not in self._same:
            return
        newest = max(local)
        left = {step for step in self._complete - local if step > newest}  # of an abandoned branch
        counted = sorted(self._complete - left)[-self._keep :]
        kept = {
            step for step in self._complete if self._keep_every and step % self._keep_every == 0
        }
        for step in sorted(left | self._complete - local - set(counted) - kept):
            self._check_lease()
            # manifest first: without it the checkpoint is incomplete
            self._objects.delete([manifest_name(step)])
            self._complete.discard(step)
            self._objects.delete(self._objects.sizes(f"{CHECKPOINTS}/{step}"))

    def _remove_discarded_run(self) -> None:
        """Delete the objects of a run that was discarded before its first step."""
        if self._sent and not self._uploaded:
            self._objects.delete([CONFIG, *self._sent])
            self._sent.clear()

    def _check_lease(self) -> None:
        if self.is_lost:
            self._is_given_up.set()
            raise lease_lost_error(self._objects.url, self._directory)


def lease_lost_error(
    url: object, directory: Path, holder: str = "another process"
) -> RunDirectoryError:
    """The error that ends a run when another writer has taken over its lease."""
    return RunDirectoryError(
        explain(
            "another process has taken over this run in the store, so this one has stopped writing",
            given=f"{url}, taken over by {holder}",
            do=f"decide which process should continue; this one's results are in {directory}",
        )
    )
