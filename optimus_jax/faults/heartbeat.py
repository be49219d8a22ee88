"""Heartbeats of the processes of one run: each writes a small file in the run directory with its
current activity, and reads the files of others.

The silence of a process is measured on the reader's clock, since the last change of its file that
the reader saw: no clocks of hosts or file servers are compared, and a file left by an earlier
start, which never changes, is ignored. Silence does not grow while the reader cannot read, as when
a file server does not answer. A process whose file has not changed since this one started is
*unknown*, not silent: perhaps the directory is not shared.

Each process watches process 0 and the processes with the next indices, at most MAX_WATCHED, which
bounds the reads per second on a file server.

A separate thread writes and reads the files, so that the watchdog (faults/watchdog.py) never waits
for them.
"""

import json
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from optimus_jax.faults.progress import Progress
from optimus_jax.faults.stopping import EXIT_RESTART
from optimus_jax.run_directory.directory import PROGRESS_DIR
from optimus_jax.run_directory.files import explained
from optimus_jax.system.json_input import parse_json
from optimus_jax.system.resilient_io import flush_with_timeout

HEARTBEAT_S = 1.0
"""Interval between two heartbeats."""
MAX_GAP_S = 2 * HEARTBEAT_S
"""Longest interval between two reads that counts as silence; if it is longer, a file server did not
answer, or this process was stopped."""
MAX_WATCHED = 32
State = Literal["running", "done", "failed"]


@dataclass(frozen=True, kw_only=True)
class Peer:
    """Another process, as of its last heartbeat."""

    process: int
    """Index of the process."""
    is_known: bool
    """Whether its file has changed since this process started."""
    silent_s: float
    """Time from its last heartbeat, or from our first read, to our last read."""
    state: State = "running"
    why: str = ""
    """Why it failed."""
    exit_code: int = EXIT_RESTART
    """Exit code of the failed process."""
    host: str = ""
    doing: str = ""
    doing_s: float = 0.0
    """Duration of the activity at the time of the heartbeat."""
    entered: int = 0
    """Newest step that was dispatched to its devices."""
    done: int = 0
    """Newest step whose metrics it has read."""


class Heartbeats:
    """Writes the heartbeats of one process, and reads those of others.

    Args:
      run_directory: directory of the run, shared by its hosts; each process has a file named by its
        index.
      process: index of this process.
      num_processes: number of processes of the run.
      progress: status of this process.
      clock: seconds that only grow.
    """

    def __init__(
        self,
        run_directory: Path,
        process: int,
        num_processes: int,
        progress: Progress,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.process, self.num_processes = process, num_processes
        self._directory, self._progress, self._clock = run_directory / PROGRESS_DIR, progress, clock
        self._state: tuple[State, str, int] = ("running", "", EXIT_RESTART)
        self._is_failing, self._number = False, 0
        self._watched = sorted(
            {(process + ahead) % num_processes for ahead in range(1, 1 + MAX_WATCHED)} | {0}
        )
        self._seen: dict[int, tuple[str, float]] = {}
        """By process: the newest text of its file, and when it changed, plus all time during which
        it could not be read."""
        self._checked_s: dict[int, float] = {}
        """Time of the last successful read of each process."""
        self._last: dict[int, Peer] = {}
        self.peers: tuple[Peer, ...] = ()
        """The watched processes as of the last read, in the order of their indices."""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeats", daemon=True)

    def start(self) -> None:
        """Write the first heartbeat, and continue in a thread.

        Raises RunDirectoryError if it cannot be written: the others would never see this process.
        """
        with explained(self._path(self.process)):
            self._directory.mkdir(parents=True, exist_ok=True)
            self._write()
        self.beat()
        self._thread.start()

    def end(self, state: State, why: str = "", exit_code: int = EXIT_RESTART) -> None:
        """Publish that this process is done or has failed, why, and its exit code.

        Only the first call has an effect.
        """
        if self._state[0] == "running":
            self._state = (state, why, exit_code)
            self._write_if_possible()

    def close(self) -> None:
        """End the thread; does not wait for a file server."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(HEARTBEAT_S)

    def beat(self) -> None:
        """Write one heartbeat, and read those of the watched processes."""
        self._write_if_possible()
        now = self._clock()
        self.peers = tuple(
            self._read_peer(process, now) for process in self._watched if process != self.process
        )

    def _run(self) -> None:
        while not self._stop.wait(HEARTBEAT_S):
            self.beat()

    def _write_if_possible(self) -> None:
        try:
            self._write()
        # a full disk, or a removed directory: others will count this process as silent
        except OSError as error:
            if not self._is_failing:
                flush_with_timeout(
                    f"\nwarning: no heartbeat can be written to {self._path(self.process)}:"
                    f" {error.strerror or error}; the others may take this process for lost\n"
                )
            self._is_failing = True
        else:
            self._is_failing = False

    def _write(self) -> None:
        at, (state, why, exit_code) = self._progress.at, self._state
        self._number += 1
        text = json.dumps(
            {
                "number": self._number,
                "pid": os.getpid(),
                "host": socket.gethostname(),
                "state": state,
                "why": why,
                "exit_code": exit_code,
                "doing": at.doing,
                "doing_s": round(self._clock() - at.since_s, 3),
                "entered": at.entered,
                "done": at.done,
            }
        )
        # `end` may write at the same time as the thread
        part = self._path(self.process).with_suffix(f".part{threading.get_ident()}")
        part.write_text(text, encoding="utf-8")
        os.replace(part, self._path(self.process))

    def _read_peer(self, process: int, now_s: float) -> Peer:
        try:
            # opening makes a network file system ask its server
            text = self._path(process).read_text(encoding="utf-8")
        except FileNotFoundError:
            text = ""
        except OSError:  # the file cannot be read: keep the last known silence
            return self._last.get(process, Peer(process=process, is_known=False, silent_s=0.0))
        before = self._last.get(process)
        unseen_s = max(0.0, now_s - self._checked_s.get(process, now_s) - MAX_GAP_S)
        self._checked_s[process] = now_s
        if process in self._seen:
            self._seen[process] = self._seen[process][0], self._seen[process][1] + unseen_s
        if process not in self._seen:
            self._seen[process] = text, now_s
        is_new = text != self._seen[process][0]
        if is_new:
            self._seen[process] = text, now_s
        known = is_new or (before is not None and before.is_known)
        values = _parse(text) if known else {}
        self._last[process] = Peer(
            process=process, is_known=known, silent_s=now_s - self._seen[process][1], **values
        )
        return self._last[process]

    def _path(self, process: int) -> Path:
        return self._directory / f"{process}.json"


def _parse(text: str) -> dict[str, Any]:
    """Fields of a heartbeat file; empty if the file is incomplete or missing."""
    try:
        values = parse_json(text)
        return {
            name: values[name]
            for name in ("state", "why", "exit_code", "host", "doing", "doing_s", "entered", "done")
        }
    except (ValueError, KeyError, TypeError):
        return {}
