"""A tiny run that a launcher starts and tests watch: its flags, environment and run directory."""

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
CHECKPOINT_EVERY = 20
"""Steps between checkpoints."""
TIMEOUT_S = 120.0
"""Limit for any wait, in seconds: what fails would otherwise be waited for without end."""


class WatchedRun:
    """A run in the directory `there`, whatever starts it."""

    def __init__(self, there: Path, *, steps: int) -> None:
        self.run_dir = there / "run"
        text = there / "text.txt"
        text.write_text("".join(f"{n} times {n} is {n * n}.\n" for n in range(500)))
        self.flags = [
            "--model",
            "gpt2-nano",
            "--steps",
            str(steps),
            "--global-batch",
            "12",
            "--seq-len",
            "32",
            "--eval-every",
            "0",
            "--checkpoint-every",
            str(CHECKPOINT_EVERY),
            "--cpu-devices",
            "1",
            "--progress",
            "plain",
            "--data",
            str(text),
            "--set",
            "model.num_layers=2",
            "--set",
            "model.embed_dim=32",
            "--set",
            "model.mlp_dim=64",
            "--set",
            "model.head_dim=4",
        ]
        self.environment = without_launcher_variables() | {
            "RUN_DIR": str(self.run_dir),
            "PYTHON": sys.executable,
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
            "JAX_COMPILATION_CACHE_DIR": str(there / "cache"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }

    def lines(self, name: str) -> list[dict]:
        """Complete lines of a log file, parsed."""
        path = self.run_dir / f"{name}.jsonl"
        return (
            [
                json.loads(line)
                for line in path.read_text().splitlines(keepends=True)
                if line.endswith("\n")
            ]
            if path.exists()
            else []
        )

    def events(self, *names: str) -> list[dict]:
        """Events with these names."""
        return [event for event in self.lines("events") if event["event"] in names]

    @property
    def steps(self) -> list[int]:
        """The steps that are recorded."""
        return [record["step"] for record in self.lines("metrics")]

    def wait_for_step(self, step: int, describe: Callable[[], str]) -> None:
        """Wait until this step is done."""
        until(lambda: max(self.steps, default=0) >= step, f"step {step}", describe)

    def wait_for_start(self, times: int, describe: Callable[[], str]) -> dict:
        """Wait until the run has started or resumed this many times; returns the last such
        event.
        """
        until(
            lambda: len(self.events("start", "resume")) >= times,
            f"the run begins for the {times}. time",
            describe,
        )
        return self.events("start", "resume")[-1]


def without_launcher_variables() -> dict[str, str]:
    """The environment without variables of a launcher that runs the tests."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("SLURM_", "OMPI_", "OPTIMUS_"))
    }


def until(happens: Callable[[], bool], what: str, describe: Callable[[], str]) -> None:
    """Wait for a condition; on a timeout, the error shows what `describe` returns."""
    deadline = time.monotonic() + TIMEOUT_S
    while not happens():
        assert time.monotonic() < deadline, f"not within {TIMEOUT_S} s: {what}\n{describe()}"
        time.sleep(0.05)


def environments() -> Iterator[tuple[int, dict[str, str]]]:
    """Pid and initial environment of every process whose environment can be read."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                words = (entry / "environ").read_bytes().decode(errors="replace").split("\0")
                yield int(entry.name), dict(word.split("=", 1) for word in words if "=" in word)


def python_of(environment: dict[str, str], pid: int) -> bool:
    """Whether a process is one of the run's programs, and not a shell that has started it."""
    with contextlib.suppress(OSError):
        return (
            Path(f"/proc/{pid}/cmdline").read_bytes().startswith(sys.executable.encode())
            and environment.get("PYTHON") == sys.executable
        )
    return False
