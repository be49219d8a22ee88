"""Heartbeats of the processes of one run: each keeps a small file in the run directory that says
what it is at, and reads the others'.

How long a process has been silent is measured on the reader's clock, from one change of its file to
the next look at it: neither clocks of hosts nor times of a file server are compared, and a file
left by a process of an earlier start, which never changes, says nothing. Nor does silence say
anything where nobody could look: while a file server does not answer, it does not grow. A process
that was never heard of since this one started is *unknown*, not silent: perhaps the directory is
not shared.

Everyone watches at most MAX_WATCHED others, those with the next numbers and process 0, so that a
file server has about as many reads a second as there are processes, times that.

Files are written and read in a thread of their own, so that who judges (faults/watchdog.py) never
waits for them.
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
"""Between two signs."""
MAX_GAP_S = 2 * HEARTBEAT_S
"""Between two looks; what is longer, a file server has not answered, or this process was
stopped."""
MAX_WATCHED = 32
State = Literal["running", "done", "failed"]


@dataclass(frozen=True, kw_only=True)
class Peer:
    """Another process, as last seen."""

    process: int
    """Its number."""
    is_known: bool
    """Whether its file has changed since we look."""
    silent_s: float
    """From its last sign, or from when we began to look, to our last look."""
    state: State = "running"
    why: str = ""
    """It failed."""
    exit_code: int = EXIT_RESTART
    """That it ends with then."""
    host: str = ""
    doing: str = ""
    doing_s: float = 0.0
    """For how long, when it said so."""
    entered: int = 0
    """Newest step that it has asked its devices for."""
    done: int = 0
    """Newest step whose numbers it has read."""


class Heartbeats:
    """Those of one process, and those that it sees.

    Args:
      run_directory: of the run, shared by its hosts; in it, a file for each process, named by its
        number.
      process: number of this one.
      num_processes: of the run.
      progress: what this one is at.
      clock: seconds that only grow.
      warn: told when signs can no longer be given.
    """

    def __init__(
        self,
        run_directory: Path,
        process: int,
        num_processes: int,
        progress: Progress,
        *,
        clock: Callable[[], float] = time.monotonic,
        warn: Callable[[str], object] = lambda text: flush_with_timeout(f"\nwarning: {text}\n"),
    ) -> None:
        self.process, self.num_processes = process, num_processes
        self._directory, self._progress, self._clock = run_directory / PROGRESS_DIR, progress, clock
        self._state: tuple[State, str, int] = ("running", "", EXIT_RESTART)
        self._warn, self._is_failing, self._number = warn, False, 0
        self._watched = sorted(
            {(process + ahead) % num_processes for ahead in range(1, 1 + MAX_WATCHED)} | {0}
        )
        self._seen: dict[int, tuple[str, float]] = {}
        """By process: its newest text, and when it was new, later by all the time in which nobody
        could look."""
        self._checked_s: dict[int, float] = {}
        """By process: when somebody last could."""
        self._last: dict[int, Peer] = {}
        self.peers: tuple[Peer, ...] = ()
        """Those that are watched, as of the last look, in the order of their numbers."""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeats", daemon=True)

    def start(self) -> None:
        """Give the first sign, and go on in a thread.

        Raises RunDirectoryError if it cannot be written: the others would never hear of this
        process.
        """
        with explained(self._path(self.process)):
            self._directory.mkdir(parents=True, exist_ok=True)
            self._write()
        self.beat()
        self._thread.start()

    def end(self, state: State, why: str = "", exit_code: int = EXIT_RESTART) -> None:
        """Say that this process is done, or has failed, why, and with which exit code it ends.

        Later words about the same change nothing.
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
        """One sign, and one look."""
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
        # a full disk, or a directory that was removed: others will take us for silent
        except OSError as error:
            if not self._is_failing:
                self._warn(
                    f"no heartbeat can be written to {self._path(self.process)}:"
                    f" {error.strerror or error}; the others may take this process for lost"
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
        # `end` may write beside the thread
        part = self._path(self.process).with_suffix(f".part{threading.get_ident()}")
        part.write_text(text, encoding="utf-8")
        os.replace(part, self._path(self.process))

    def _read_peer(self, process: int, now_s: float) -> Peer:
        try:
            # opening makes a network file system ask its server
            text = self._path(process).read_text(encoding="utf-8")
        except FileNotFoundError:
            text = ""
        except OSError:  # nobody could look, so that it is as silent as it was
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
    """What a file says of its process; nothing if it is half of one, or gone."""
    try:
        values = parse_json(text)
        return {
            name: values[name]
            for name in ("state", "why", "exit_code", "host", "doing", "doing_s", "entered", "done")
        }
    except (ValueError, KeyError, TypeError):
        return {}
