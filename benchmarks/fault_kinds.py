"""The kinds of faults of benchmarks/faults.py: how each is injected, what it may cost, and where
its run takes place.
"""

import os
import random
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fault_job import CHECKPOINT_EVERY, NAMESPACES, SNAPSHOT_EVERY, STEPS, Job, ip

SNAPSHOT, CHECKPOINT, ONE_BEFORE = (
    SNAPSHOT_EVERY + 2,
    CHECKPOINT_EVERY + 2,
    2 * CHECKPOINT_EVERY + 2,
)
"""Most steps that may be lost: those since the newest complete snapshot or checkpoint, and those
done while it is written."""
INDEX_BYTES = 4096
"""Largest size of a process's own index file in a checkpoint."""
RESTARTED = frozenset({75, -signal.SIGABRT, -signal.SIGSEGV})
"""Exit codes that mean "restart" according to docs/faults.md: ours, and JAX's when process 0 is
gone."""

# Injects a fault into a job: waits for its moment, acts, and returns a description. The clock
# starts when it returns.
Fault = Callable[[Job, random.Random], dict[str, Any]]


def in_a_step(job: Job, draw: random.Random) -> dict[str, Any]:
    at = draw.randrange(3, STEPS - 3)
    job.clock.wait(lambda: job.step >= at or job.all_ended())
    time.sleep(draw.uniform(0.0, 0.1))
    return _kill(job, draw)


def in_compile(job: Job, draw: random.Random) -> dict[str, Any]:
    job.clock.wait(
        lambda: (
            any(event["event"] == "plan" for event in job.lines("events.jsonl")) or job.all_ended()
        )
    )
    time.sleep(draw.uniform(0.0, 1.0))
    return _kill(job, draw) | {
        "compiled": any(event["event"] == "compile" for event in job.lines("events.jsonl"))
    }


def in_a_save(job: Job, draw: random.Random) -> dict[str, Any]:
    at = CHECKPOINT_EVERY * draw.randrange(1, STEPS // CHECKPOINT_EVERY)
    job.clock.wait(
        lambda: (
            any((job.run_dir / "checkpoints").glob(f"{at}.*tmp*"))
            or job.step > at + 3
            or job.all_ended()
        )
    )
    time.sleep(draw.uniform(0.0, 0.06))
    return _kill(job, draw) | {"whole": (job.run_dir / "checkpoints" / str(at)).exists()}


def at_any_time(job: Job, draw: random.Random) -> dict[str, Any]:
    time.sleep(draw.uniform(0.0, 9.0))
    return _kill(job, draw)


def stopped(job: Job, draw: random.Random) -> dict[str, Any]:
    at = draw.randrange(3, STEPS - 3)
    job.clock.wait(lambda: job.step >= at or job.all_ended())
    who = draw.randrange(len(job.servers))
    os.kill(job.pids[who], signal.SIGSTOP)
    return {"process": who, "survivors": job.others(who), "wake": True}


def cut_network(job: Job, draw: random.Random) -> dict[str, Any]:
    at = draw.randrange(3, STEPS - 3)
    job.clock.wait(lambda: job.step >= at or job.all_ended())
    who = draw.randrange(2)
    ip("-n", NAMESPACES[who], "link", "set", f"fv{who}", "down")
    return {"process": who, "survivors": [0, 1]}


def corrupted(job: Job, draw: random.Random) -> dict[str, Any]:
    """Kill all processes, then damage the newest checkpoint."""
    at = draw.randrange(2 * CHECKPOINT_EVERY + 2, STEPS - 2)
    job.clock.wait(
        lambda: (
            (job.step >= at and len(list((job.run_dir / "checkpoints").glob("[0-9]*0"))) >= 2)
            or job.all_ended()
        )
    )
    job.kill()
    whole = sorted(
        (path for path in (job.run_dir / "checkpoints").iterdir() if path.name.isdecimal()),
        key=lambda path: int(path.name),
    )
    # The files that Orbax reads: the merged index, and the large files of each process, which hold
    # arrays. Each process's own index is not read after merging, and neither are marker files.
    arrays = [
        path
        for path in (whole[-1] / "state").glob("ocdbt.process_*/d/*")
        if path.stat().st_size > INDEX_BYTES
    ]
    files = sorted(
        [
            *arrays,
            *(whole[-1] / "state" / "d").iterdir(),
            whole[-1] / "state" / "manifest.ocdbt",
            whole[-1] / "manifest" / "metadata",
        ]
    )
    chosen = draw.choice(files)
    how = draw.choice(["half of a file", "a file removed", "a bit turned"])
    content = bytearray(chosen.read_bytes())
    if how == "a file removed":
        chosen.unlink()
    elif how == "half of a file":
        chosen.write_bytes(content[: len(content) // 2])
    else:
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        chosen.write_bytes(content)
    return {
        "process": None,
        "survivors": [],
        "how": how,
        "file": str(chosen.relative_to(whole[-1])),
        "harmed": int(whole[-1].name),
    }


def disk_full(job: Job, draw: random.Random) -> dict[str, Any]:
    """Fill the disk until the processes have exited or the run is complete.

    The space left is nothing, little, or enough for a part of a checkpoint, so that one process may
    find space and another not.
    """
    at = draw.randrange(CHECKPOINT_EVERY + 2, STEPS - 3)
    job.clock.wait(
        lambda: (
            (job.step >= at and any((job.run_dir / "checkpoints").glob("[0-9]*0")))
            or job.all_ended()
        )
    )
    whole = next((path for path in (job.run_dir / "checkpoints").glob("[0-9]*0")), None)
    leave = draw.choice(
        [
            0,
            4096,
            *[
                int(
                    draw.random()
                    * sum(path.stat().st_size for path in whole.rglob("*") if path.is_file())
                )
                for _ in range(4)
                if whole
            ],
        ]
    )
    with open(job.run_dir.parent / "ballast", "wb") as file:
        file.write(b"\0" * max(0, shutil.disk_usage(job.run_dir).free - leave))
    return {"process": None, "survivors": list(range(len(job.servers))), "left_bytes": leave}


def _kill(job: Job, draw: random.Random) -> dict[str, Any]:
    who = draw.randrange(len(job.servers))
    if job.ended(who) is None:
        os.kill(job.pids[who], signal.SIGKILL)
    return {"process": who, "survivors": job.others(who)}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A kind of fault, and the limits that a run must meet."""

    fault: Fault
    snapshots: bool = True
    """Whether the run writes snapshots besides checkpoints."""
    place: str = "plain"
    """Where the run takes place: `plain`, `namespaces`, or `small` for a small disk."""
    caches: bool = True
    bound: int = SNAPSHOT
    """Most steps that may be lost."""
    within_s: float = 20.0
    """Seconds in which the other processes must exit: 5 of silence, 3 for another process's last
    message, 7 that process 0 waits, and 5 to write everything."""
    codes: frozenset[int] = RESTARTED
    """Exit codes that the other processes may have."""


CASES = {
    "SIGKILL in a step": Case(fault=in_a_step),
    "SIGKILL in a step, no snapshots": Case(fault=in_a_step, snapshots=False, bound=CHECKPOINT),
    "SIGKILL in compile": Case(fault=in_compile, caches=False),
    "SIGKILL in a save": Case(fault=in_a_save, snapshots=False, bound=CHECKPOINT),
    "SIGKILL at any time": Case(fault=at_any_time),
    "SIGSTOP": Case(fault=stopped),
    # an operation without enough timings has a limit of 30 s
    "network cut": Case(fault=cut_network, place="namespaces", within_s=50.0),
    "corrupted newest checkpoint": Case(fault=corrupted, snapshots=False, bound=ONE_BEFORE),
    "disk full": Case(
        fault=disk_full, snapshots=False, place="small", bound=CHECKPOINT, codes=frozenset({2})
    ),
}


def cases_for(processes: int) -> list[str]:
    """Names of the cases for this number of processes."""
    return [
        name
        for name, case in CASES.items()
        if case.place != "namespaces" or processes == len(NAMESPACES)
    ]


@contextmanager
def place_for(case: Case) -> Iterator[Path]:
    """A directory for a run of this case."""
    with tempfile.TemporaryDirectory(prefix="faults-") as name:
        if case.place != "small":
            yield Path(name)
            return
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", name], check=True)
        try:
            yield Path(name)
        finally:
            # Lazy, because the mount may still be busy for a moment after its processes have ended.
            subprocess.run(["umount", "--lazy", name], check=True)
