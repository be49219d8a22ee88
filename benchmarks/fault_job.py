"""The run of several processes that benchmarks/faults.py injects faults into, on one machine or on
two network namespaces.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fault_processes import Server

STEPS, SNAPSHOT_EVERY, CHECKPOINT_EVERY = 40, 4, 10
DEVICES = 4
"""Virtual devices, split evenly between the processes."""
SETTINGS = [
    "--model",
    "gpt2-nano",
    "--steps",
    str(STEPS),
    "--global-batch",
    "8",
    "--seq-len",
    "32",
    "--eval-every",
    "0",
    "--progress",
    "plain",
    "--checkpoint-every",
    str(CHECKPOINT_EVERY),
    "--mesh",
    f"fsdp={DEVICES}",
    "--resume",
    "auto",
    "--set",
    "model.num_layers=1",
    "--set",
    "model.embed_dim=32",
    "--set",
    "model.mlp_dim=64",
    "--set",
    "model.head_dim=4",
    "--set",
    "faults.silence_s=5",
    "--set",
    "faults.floor_s=8",
    "--set",
    "faults.ceiling_s=30",
    "--set",
    "faults.connect_s=20",
    "--set",
    "faults.start_s=60",
    "--set",
    "faults.stop_s=5",
    "--set",
    "faults.heartbeat_s=15",
]
LIMIT_S = 100.0
"""Longest wait. A run that takes longer counts as hung."""
STOOD_S = 2.0
"""Gap between two polls that shows that the machine stood still; a normal gap is 0.01 s or less."""
NAMESPACES = ("fault0", "fault1")


class StoodStill(Exception):
    """The machine was too busy to poll, so the measured times mean nothing."""


class Clock:
    """Waits for conditions. Raises StoodStill if the machine stood still meanwhile."""

    def __init__(self) -> None:
        self._looked_s = time.monotonic()

    def wait(self, condition: Callable[[], Any]) -> float | None:
        """Wait for a condition. Returns the seconds it took; None: more than `LIMIT_S`."""
        began_s = self._looked_s = time.monotonic()
        while not condition():
            now = time.monotonic()
            if now - self._looked_s > STOOD_S:
                raise StoodStill
            self._looked_s = now
            if now - began_s > LIMIT_S:
                return None
            time.sleep(0.005)
        return time.monotonic() - began_s


@dataclass
class Job:
    """A run, and the servers that start its processes."""

    run_dir: Path
    text: Path
    servers: tuple[Server, ...]
    """The servers, one for each process."""
    host: str
    """Address at which process 0 listens."""
    extra: list[str]
    caches: bool = True
    """Whether compiled programs are cached, so that starts are short."""
    clock: Clock = field(default_factory=Clock)
    pids: list[int] = field(default_factory=list)
    starts: int = 0

    def start(self) -> None:
        """Start all processes, with the same command each time."""
        self.starts += 1
        address = f"{self.host}:{_free_port()}"
        arguments = [
            *SETTINGS,
            "--cpu-devices",
            str(DEVICES // len(self.servers)),
            "--num-processes",
            str(len(self.servers)),
            "--data",
            str(self.text),
            "--run-dir",
            str(self.run_dir),
            "--coordinator",
            address,
            *self.extra,
        ]
        self.pids = [
            server.start(
                [*arguments, "--process-id", str(number)], self.log(number), caches=self.caches
            )
            for number, server in enumerate(self.servers)
        ]

    def log(self, number: int) -> Path:
        return self.run_dir.with_name(f"{self.run_dir.name}.{number}.log")

    def ended(self, number: int) -> tuple[int, float] | None:
        return self.servers[number].ended(self.pids[number])

    def all_ended(self) -> bool:
        return bool(self.pids) and all(self.ended(number) for number in range(len(self.pids)))

    def codes(self) -> list[int | None]:
        return [end[0] if (end := self.ended(number)) else None for number in range(len(self.pids))]

    @property
    def is_done(self) -> bool:
        """Whether every process has exited and the run is complete."""
        return self.all_ended() and all(code == 0 for code in self.codes())

    def others(self, who: int) -> list[int]:
        return [number for number in range(len(self.servers)) if number != who]

    def kill(self) -> None:
        """Kill all processes that are left, suspended or not."""
        for number, pid in enumerate(self.pids):
            if self.ended(number) is None:
                os.kill(pid, signal.SIGKILL)
        self.clock.wait(self.all_ended)

    def lines(self, name: str) -> list[dict[str, Any]]:
        path = self.run_dir / name
        return (
            [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]
            if path.exists()
            else []
        )

    @property
    def step(self) -> int:
        return len(self.lines("metrics.jsonl"))

    def logs(self) -> str:
        return "\n".join(
            self.log(number).read_text(errors="replace")[-3000:]
            for number in range(len(self.servers))
            if self.log(number).exists()
        )


@contextmanager
def namespaces() -> Iterator[None]:
    """Make two linked network namespaces, and remove them at the end.

    In each of them the host name resolves to its own address, because gloo sends that address to
    the other processes.
    """
    ip("link", "add", "fv0", "type", "veth", "peer", "name", "fv1")
    try:
        for number, name in enumerate(NAMESPACES):
            ip("netns", "add", name)
            ip("link", "set", f"fv{number}", "netns", name)
            for words in (
                ["addr", "add", f"10.99.0.{number + 1}/24", "dev", f"fv{number}"],
                ["link", "set", f"fv{number}", "up"],
                ["link", "set", "lo", "up"],
            ):
                ip("-n", name, *words)
            hosts = Path("/etc/netns") / name / "hosts"
            hosts.parent.mkdir(parents=True, exist_ok=True)
            hosts.write_text(f"127.0.0.1 localhost\n10.99.0.{number + 1} {socket.gethostname()}\n")
        yield
    finally:
        for name in NAMESPACES:
            subprocess.run(["ip", "netns", "del", name], check=False)
            shutil.rmtree(Path("/etc/netns") / name, ignore_errors=True)


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
