"""The processes that benchmarks/kill_fuzz.py kills.

They are forked from a process that has imported everything and has no threads yet, which saves the
time of the imports.
"""

import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Kill:
    """When a run is killed."""

    instant: str
    count: int
    """Kill when the run reaches this instant for the `count`-th time."""
    delay_s: float | None
    """Seconds after the instant, killed from outside. None: the process kills itself at once."""
    is_torn: bool = False
    """Whether half of a journal line is written first; for instants just before a line."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """The task of one process."""

    run_dir: str
    text: str
    """File of training text."""
    trace: str
    """File that instants are written to."""
    cache: str
    """Directory of compiled programs."""
    scenes: tuple[int, ...]
    """Indices of the SCENES to play."""
    is_stubborn: bool = False
    """Whether plans that have failed are tried again."""
    kill: Kill | None = None

    @classmethod
    def from_json(cls, text: str) -> "Task":
        """The inverse of `to_json`."""
        values = json.loads(text)
        return cls(**values | {"kill": values["kill"] and Kill(**values["kill"])})

    def to_json(self) -> str:
        """One line."""
        return json.dumps(asdict(self))


Run = Callable[[Task, int], None]


@dataclass(frozen=True, kw_only=True)
class End:
    """How a process ended."""

    is_killed: bool
    code: int
    """Exit code, if it was not killed."""
    cpu_s: float


class Victims:
    """Runs each task in its own process.

    Create it before JAX starts, because it forks the process that all others are forked from.

    Args:
      log: file for the output of the processes.
      run: does a task; its second argument is the pipe on which it can ask to be killed.
    """

    def __init__(self, log: Path, run: Run) -> None:
        asked, self._tasks = os.pipe()
        self._ends, told = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            os.close(self._tasks)
            os.close(self._ends)
            _serve(asked, told, log, run)
        os.close(asked)
        os.close(told)

    def run(self, task: Task) -> End:
        """Do a task. Returns when its process has ended."""
        os.write(self._tasks, task.to_json().encode() + b"\n")
        return End(**json.loads(_line(self._ends)))

    def close(self) -> None:
        """End the process that forks."""
        os.close(self._tasks)
        os.waitpid(self._pid, 0)


def _line(descriptor: int) -> bytes:
    """Read up to a newline; empty at the end of the input."""
    found = b""
    while not found.endswith(b"\n") and (more := os.read(descriptor, 1)):
        found += more
    return found


def _serve(asked: int, told: int, log: Path, run: Run) -> None:
    assert threading.active_count() == 1, "a process with threads cannot be forked"
    while line := _line(asked):
        heard, killer = os.pipe()
        if (pid := os.fork()) == 0:
            os.close(heard)
            _become(Task.from_json(line.decode()), killer, log, run)
        os.close(killer)
        task = Task.from_json(line.decode())
        if os.read(heard, 1) and task.kill is not None:
            time.sleep(task.kill.delay_s or 0.0)
            os.kill(pid, signal.SIGKILL)
        _, status, usage = os.wait4(pid, 0)
        os.close(heard)
        killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        end = End(
            is_killed=killed,
            code=status if not killed else 0,
            cpu_s=usage.ru_utime + usage.ru_stime,
        )
        os.write(told, json.dumps(asdict(end)).encode() + b"\n")
    os._exit(0)


def _become(task: Task, killer: int, log: Path, run: Run) -> None:
    """Do a task in a forked process. Never returns."""
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    code = 0
    try:
        run(task, killer)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
