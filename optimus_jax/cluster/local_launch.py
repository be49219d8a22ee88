"""Starts several processes of one program on this machine, for tests and for machines without a
cluster launcher.

Environment variables tell them the coordinator (cluster/launchers.py). Process 0 has the terminal;
each line of the others, which print only errors, is shown with the process id before it. If one
fails, the others receive SIGTERM, and SIGKILL after a grace period, since they would wait for it.
"""

import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import IO

from optimus_jax.cluster.launchers import LOCAL_ID, NUM_LOCAL
from optimus_jax.cluster.process_info import VARIABLES

FORWARDED = {
    signal.SIGINT: signal.SIGINT,
    signal.SIGTERM: signal.SIGTERM,
    signal.SIGUSR1: signal.SIGUSR1,
    signal.SIGHUP: signal.SIGTERM,
}
"""Signals that are forwarded to the processes, and the signal that they receive, once each. A
terminal that closes (SIGHUP) counts as SIGTERM."""
_CHECK_S = 0.05
_HOST = "127.0.0.1"
"""Address of this machine that process 0 listens on."""
_PR_SET_PDEATHSIG = 1
_PRCTL = ctypes.CDLL(None).prctl if sys.platform == "linux" else None
"""Looked up before the first fork: hardly anything is safe between fork and exec."""


def run_processes(command: Sequence[str], num_processes: int, *, grace_s: float) -> int:
    """Run `command` as processes of one run, until all have ended.

    Args:
      command: program and arguments, the same for all.
      num_processes: how many.
      grace_s: how long the others may take to end after one has failed, before they are killed.
    Returns:
      0, or the exit code of the first that failed; 128 + signal number for one ended by a signal,
      as in a shell.
    """
    address = f"{_HOST}:{_free_port()}"
    processes: list[subprocess.Popen] = []
    with _forwarding(processes, num_processes) as (forwarded, send_early_signals):
        try:
            for number in range(num_processes):
                processes.append(
                    _start(command, _environment(address, number, num_processes), number)
                )
            send_early_signals()
            readers = [
                _reader(process.stdout, number)
                for number, process in enumerate(processes)
                if process.stdout is not None
            ]
            code = _watch(processes, grace_s, forwarded)
            for reader in readers:
                reader.join(1.0)  # a grandchild may keep the pipe open
            return code
        finally:
            for process in processes:
                process.kill()


def _watch(processes: Sequence[subprocess.Popen], grace_s: float, forwarded: Sequence[int]) -> int:
    first_failure, kill_at = 0, float("inf")
    while None in [process.poll() for process in processes]:
        if not first_failure and (
            first_failure := next(
                (process.returncode for process in processes if process.returncode), 0
            )
        ):
            kill_at = time.monotonic() + grace_s
            if not forwarded:  # otherwise they are ending already, and in order
                _send(processes, signal.SIGTERM)
        if time.monotonic() >= kill_at:
            _send(processes, signal.SIGKILL)
            kill_at = float("inf")
        time.sleep(_CHECK_S)
    code = first_failure or next(
        (process.returncode for process in processes if process.returncode), 0
    )
    return 128 - code if code < 0 else code


def _start(command: Sequence[str], environment: Mapping[str, str], number: int) -> subprocess.Popen:
    # Each process has its own session: Ctrl-C reaches only this one, which forwards it once. A
    # second one would end them without saving.
    stdin, stdout, stderr = (
        (None, None, None)
        if number == 0
        else (subprocess.DEVNULL, subprocess.PIPE, subprocess.STDOUT)
    )
    return subprocess.Popen(
        list(command),
        env=dict(environment),
        start_new_session=True,
        preexec_fn=None if _PRCTL is None else _terminate_with_parent,
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
    )


def _terminate_with_parent() -> None:
    """Runs in a new process: it receives SIGTERM, so that it saves and ends, even if its parent is
    killed with SIGKILL.
    """
    assert _PRCTL is not None
    _PRCTL(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _environment(coordinator: str, number: int, num_processes: int) -> dict[str, str]:
    values = (coordinator, num_processes, number, number, num_processes)
    return os.environ | dict(zip((*VARIABLES, LOCAL_ID, NUM_LOCAL), map(str, values), strict=True))


def _reader(stream: IO[bytes], number: int) -> threading.Thread:
    def show() -> None:
        for line in stream:
            sys.stderr.write(f"[{number}] {line.decode(errors='replace')}")
            sys.stderr.flush()

    thread = threading.Thread(target=show, daemon=True, name=f"output-{number}")
    thread.start()
    return thread


@contextmanager
def _forwarding(
    processes: Sequence[subprocess.Popen], num_processes: int
) -> Iterator[tuple[list[int], Callable[[], None]]]:
    """Yields the list of forwarded signals, and a function that sends those which arrived before
    all processes had started.
    """
    forwarded: list[int] = []
    early: list[int] = []

    def forward(number: int, frame: FrameType | None) -> None:
        forwarded.append(number)
        if len(processes) < num_processes:
            early.append(number)
        else:
            _send(processes, FORWARDED[signal.Signals(number)])

    def send_early_signals() -> None:
        while early:
            _send(processes, FORWARDED[signal.Signals(early.pop(0))])

    # SIGHUP stays ignored under nohup. The other signals are handled even if a shell started us in
    # the background with SIGINT ignored.
    before = {
        number: signal.signal(number, forward)
        for number in FORWARDED
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN
    }
    try:
        yield forwarded, send_early_signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _send(processes: Sequence[subprocess.Popen], number: int) -> None:
    for process in processes:
        if process.poll() is None:
            process.send_signal(number)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        return probe.getsockname()[1]
