"""Processes that get killed, for benchmarks/kill_fuzz.py.

They are forked from one that has imported everything and has no threads yet, which saves them the
imports.
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
    """How often it has come to this instant then, this time included."""
    delay_s: float | None
    """After it, from outside; None: there and then, by itself."""
    is_torn: bool = False
    """Half of a line is written to the journal before; for instants before a line is."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """What one process is to do."""

    run_dir: str
    text: str
    """File of training text."""
    trace: str
    """File for instants."""
    cache: str
    """Directory of compiled programs."""
    scenes: tuple[int, ...]
    """Which of SCENES are played, by their places."""
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
    """Its exit code, if it was not killed."""
    cpu_s: float


class Victims:
    """Runs tasks in processes of their own.

    Make it before JAX has started: what it begins is the process that they are forked from.

    Args:
      log: where they print.
      run: does a task, given a pipe on which it can ask to be killed.
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
        """Do a task; returns when its process has ended."""
        os.write(self._tasks, task.to_json().encode() + b"\n")
        return End(**json.loads(_line(self._ends)))

    def close(self) -> None:
        """End the process that forks."""
        os.close(self._tasks)
        os.waitpid(self._pid, 0)


def _line(descriptor: int) -> bytes:
    """Up to a newline; empty if there will be none."""
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
    """What a forked process does; never returns."""
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
