"""Signs of life: each process of a run writes a small file into the run directory, and looks for those of the others.

A file is as old as the file system says: our own, just written, and the others' carry times of the same clock, the
file server's, so that clocks of hosts that differ make nobody look dead. Each file also says what its host took the
time to be, which tells how far the clocks are apart. That the directory is shared is up to the run: a process whose
file never appears has been silent since we began to look.
"""

import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from optimus_jax.control.background import Asked, Start, Worker
from optimus_jax.control.signals import HEARTBEAT_AGE_S

DIRECTORY = "heartbeats"
"""In the run directory; a file for each process, named by its number."""


@dataclass(frozen=True, kw_only=True)
class Heartbeat:
    """Of another process."""

    process: int
    """Its number."""
    age_s: float
    """Since it last wrote."""
    step: int | None
    """What it had done then; None: it has not written yet."""
    clock_skew_s: float | None
    """How far its host's clock is ahead of ours; None: it has not written yet."""


class Heartbeats:
    """Writes this process's and reads the others', in a thread of its own: a file server may be slow.

    Args:
      run_directory: of the run, shared by all its hosts.
      process: number of this one.
      num_processes: of the run.
      wall_clock: seconds since the epoch.
      start: who reads and writes; None: a thread.
    """

    name = "heartbeats"
    signals = (HEARTBEAT_AGE_S,)

    def __init__(self, run_directory: Path, process: int, num_processes: int, *, wall_clock: Callable[[], float] = time.time,
                 start: Start | None = None) -> None:
        self._directory, self._process, self._num_processes = run_directory / DIRECTORY, process, num_processes
        self._wall_clock = wall_clock
        self._worker = Worker("heartbeats") if start is None else None
        self._asked = Asked(self._beat, start or self._worker or Worker("heartbeats"))
        self._step = 0
        self._began_at: float | None = None
        self.others: tuple[Heartbeat, ...] = ()
        """When last read, in the order of their numbers."""

    def poll(self, step: int, now_s: float) -> Mapping[str, float] | None:
        """Age of the oldest heartbeat of another process; empty if there is no other. Raises OSError if files fail."""
        self._step = step
        found = self._asked.take()
        if found is None:
            return None
        self.others = found
        return {HEARTBEAT_AGE_S: max(heartbeat.age_s for heartbeat in found)} if found else {}

    def close(self) -> None:
        """End the thread."""
        if self._worker is not None:
            self._worker.close()

    def _beat(self) -> tuple[Heartbeat, ...]:
        own_mtime = self._write()
        if self._began_at is None:
            self._began_at = own_mtime
        own_skew_s = self._wall_clock() - own_mtime
        return tuple(self._read(other, own_mtime, own_skew_s) for other in range(self._num_processes) if other != self._process)

    def _write(self) -> float:
        """Returns the file server's time."""
        path = self._path(self._process)
        path.parent.mkdir(exist_ok=True)
        part = path.with_suffix(".part")
        part.write_text(json.dumps({"step": self._step, "time_s": self._wall_clock()}), encoding="utf-8")
        os.replace(part, path)  # a reader sees the old one or the new
        return path.stat().st_mtime

    def _read(self, process: int, now: float, own_skew_s: float) -> Heartbeat:
        try:
            # Opening a file makes a network file system ask its server; looking at its name alone does not.
            with open(self._path(process), encoding="utf-8") as file:
                values, mtime = json.load(file), os.fstat(file.fileno()).st_mtime
        except FileNotFoundError:
            return Heartbeat(process=process, age_s=now - (self._began_at or now), step=None, clock_skew_s=None)
        return Heartbeat(process=process, age_s=max(0.0, now - mtime), step=values["step"], clock_skew_s=values["time_s"] - mtime - own_skew_s)

    def _path(self, process: int) -> Path:
        return self._directory / f"{process}.json"
