"""The training processes of benchmarks/faults.py. They are forked from a server that has imported
everything and has no threads yet, so that they start fast.

`python benchmarks/fault_processes.py` is such a server. A line of JSON on its standard input starts
a process; lines on its standard output report which process started or ended, and when. The server
may be started in a network namespace, which its processes then share.
"""

import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import jax

TRAIN = Path(__file__).parents[1] / "scripts" / "train.py"
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": "--xla_backend_optimization_level=0",
    "OPENBLAS_NUM_THREADS": "1",
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=0",
}
"""Environment of the server: compile without optimising, start no threads before a fork, and do not
restart train.py for huge pages."""


class Server:
    """Starts training processes.

    Args:
      prefix: a command to start it with, such as `ip netns exec NAME`.
    """

    def __init__(self, prefix: tuple[str, ...] = ()) -> None:
        self._process = subprocess.Popen(
            [*prefix, sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | ENVIRONMENT,
        )
        self._begun: list[int] = []
        self._ended: dict[int, tuple[int, float]] = {}
        self._changed = threading.Condition()
        threading.Thread(target=self._receive, daemon=True).start()

    def start(self, arguments: list[str], log: Path, *, caches: bool) -> int:
        """Start `train.py arguments`, with compiled programs cached or not. Returns the pid."""
        assert self._process.stdin is not None
        with self._changed:
            count = len(self._begun)
            self._process.stdin.write(
                json.dumps({"arguments": arguments, "log": str(log), "caches": caches}) + "\n"
            )
            self._process.stdin.flush()
            assert self._changed.wait_for(lambda: len(self._begun) > count, timeout=120), (
                "no process was forked"
            )
            return self._begun[-1]

    def ended(self, pid: int) -> tuple[int, float] | None:
        """Exit code (negative for a signal) and time of the end (time.monotonic). None: it runs."""
        with self._changed:
            return self._ended.get(pid)

    def close(self) -> None:
        """End the server."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _receive(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            told = json.loads(line)
            with self._changed:
                if "begun" in told:
                    self._begun.append(told["begun"])
                    self._ended.pop(told["begun"], None)  # the system reuses process ids
                else:
                    self._ended[told["ended"]] = told["code"], told["at_s"]
                self._changed.notify_all()


def serve() -> None:
    """Fork a process for every input line and report when each ends, until the input ends."""
    import optimus_jax.cli.train
    import optimus_jax.run.api  # noqa: F401
    from optimus_jax.cli.main import main

    assert threading.active_count() == 1, "a process with threads cannot be forked"
    readable, woken = os.pipe()
    os.set_blocking(woken, False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    unread = b""
    while True:
        ready, _, _ = select.select([0, readable], [], [])
        if readable in ready:
            os.read(readable, 1000)
            _tell_ended()
        if 0 in ready:
            if not (more := os.read(0, 65536)):
                return
            *lines, unread = (unread + more).split(b"\n")
            for line in lines:
                pid = os.fork() or _become(partial(main, "train"), **json.loads(line))
                _say({"begun": pid})


def _tell_ended() -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        _say({"ended": pid, "code": os.waitstatus_to_exitcode(status), "at_s": time.monotonic()})


def _say(value: dict[str, Any]) -> None:
    os.write(1, json.dumps(value).encode() + b"\n")


def _become(main: Any, arguments: list[str], log: str, caches: bool) -> NoReturn:
    """Run train.py in a forked process. Never returns."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdin.close()
    jax.config.update("jax_enable_compilation_cache", caches)
    sys.argv = [str(TRAIN), *arguments]
    code = 1
    try:
        code = main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    from jax._src import distributed  # a normal exit of Python would do this

    if distributed.global_state.client is not None:
        distributed.global_state.shutdown()
    os._exit(code)


if __name__ == "__main__":
    serve()
