"""A lease that gives a run in an object store a single writer: an object renewed by its holder.

A store has no locks. A new writer creates the object if it does not exist, which S3, GCS and Azure
do atomically. The lease of a dead writer is taken over: at once if that was a process of this host,
otherwise when it was not renewed for EXPIRE_S while this process watched (clocks are not compared).
A writer that was disconnected for that long finds at its next renewal that another holds the lease,
and stops writing. Two writers that take over at the same moment both believe they hold it until
their next renewal, at most RENEW_S.
"""

import contextlib
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from optimus_jax.errors import RunDirectoryError, StoreError, explain
from optimus_jax.store.objects import Objects

LEASE = "writer.json"
"""Name of the lease object."""
RENEW_S = 10.0
"""Time between renewals."""
EXPIRE_S = 45.0
"""Time without a renewal after which a writer counts as dead."""
POLL_S = 3.0
"""Time between checks of another holder's lease."""


class LeaseHeldError(RunDirectoryError):
    """Another process holds the lease of the run."""


class Lease:
    """A lease, held from construction until `release`, or EXPIRE_S after the process ends.

    Args:
      objects: the run's objects.
      directory: this writer's local directory, shown to other writers.
      warn: called with a message while waiting for another holder.
      patience_s: how long to wait for a live holder.
      on_lost: called once, from another thread, with the new holder when another writer takes over.
    Raises:
      LeaseHeldError: another process holds it.
      StoreError: the store cannot be reached or written.
    """

    def __init__(
        self,
        objects: Objects,
        directory: Path,
        *,
        warn: Callable[[str], object],
        patience_s: float = 0.0,
        on_lost: Callable[[str], object] = lambda holder: None,
        pause: Callable[[float], object] = time.sleep,
    ) -> None:
        self._objects, self._directory, self._on_lost = objects, directory, on_lost
        self._token, self._count = secrets.token_hex(8), 0
        self.is_lost = False
        """Whether another writer has taken over the lease."""
        self._take(warn, patience_s, pause)
        self._released = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="lease", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Check that this process still holds the lease; sets `is_lost`. StoreError: unknown."""
        held = self._read()
        if not self.is_lost and held is not None and held.get("token") != self._token:
            self.is_lost = True
            self._on_lost(_described(held))

    def release(self) -> None:
        """Give up the lease. If the store cannot be reached, the lease expires by itself."""
        self._released.set()
        self._thread.join()
        with contextlib.suppress(StoreError):
            self.check()
            if not self.is_lost:
                self._objects.delete([LEASE])

    def _take(
        self,
        warn: Callable[[str], object],
        patience_s: float,
        pause: Callable[[float], object],
    ) -> None:
        seen: dict[str, Any] | None = None
        watched_s = waited_s = 0.0
        while not self._objects.create(LEASE, self._content()):
            held = self._read()
            if held is None:
                continue
            if _died_on_this_host(held) or watched_s >= EXPIRE_S:
                self._objects.write(LEASE, self._content())
                self.check()
                if not self.is_lost:
                    return
                self.is_lost = False
                continue
            is_alive = seen is not None and held != seen
            if is_alive and waited_s >= patience_s:
                raise LeaseHeldError(
                    explain(
                        "another process is writing this run",
                        given=f"{self._objects.url}, in use by {_described(held)}",
                        do="wait for it or stop it, or choose another --run-dir",
                    )
                )
            if seen is None:
                warn(
                    f"{self._objects.url} is in use by {_described(held)}, or was until that died: "
                    f"watching it for up to {max(EXPIRE_S, patience_s):.0f} s"
                )
            watched_s = 0.0 if held != seen else watched_s + POLL_S
            waited_s, seen = waited_s + POLL_S, held
            pause(POLL_S)

    def _renew(self) -> None:
        while not self._released.wait(RENEW_S):
            with contextlib.suppress(StoreError):  # retried at the next renewal
                self.check()
                if self.is_lost:
                    return
                self._count += 1
                self._objects.write(LEASE, self._content())

    def _read(self) -> dict[str, Any] | None:
        content = self._objects.read(LEASE)
        if content is None:
            return None
        try:
            held = json.loads(content)
        except ValueError:
            held = None
        return held if isinstance(held, dict) else {"token": repr(content)}

    def _content(self) -> bytes:
        return json.dumps(
            {
                "token": self._token,
                "renewed": self._count,
                "time_s": time.time(),
                "host": socket.gethostname(),
                "process": os.getpid(),
                "directory": str(self._directory),
                "system": _boot_and_pid_namespace(),
                "process_start": _start_of(os.getpid()),
            }
        ).encode()


def _described(held: dict[str, Any]) -> str:
    process, host, directory = (held.get(name) for name in ("process", "host", "directory"))
    return f"process {process} on {host}, which works in {directory}"


def _died_on_this_host(held: dict[str, Any]) -> bool:
    """Whether the holder was a process of this host and PID namespace that has ended."""
    system, process = held.get("system"), held.get("process")
    if system is None or system != _boot_and_pid_namespace() or not isinstance(process, int):
        return False
    return _start_of(process) != held.get("process_start")


def _boot_and_pid_namespace() -> str | None:
    """Equal for processes that can see each other: the same boot of a host and PID namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # not Linux
        return None


def _start_of(process: int) -> str | None:
    """Start time of a process, in clock ticks since boot; None: it no longer exists."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in ("Z", "X") else fields[19]
