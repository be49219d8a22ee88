"""Kinds of faults (benchmarks/faults.py): what is done to a run, what may come of it, and the place
that it needs.
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
"""Steps lost at most: those since the newest whole one, and those that go on while it is
written."""
INDEX_BYTES = 4096
"""Of a process's own index in a checkpoint, at most."""
RESTARTED = frozenset({75, -signal.SIGABRT, -signal.SIGSEGV})
"""Exit codes of which docs/faults.md says that they mean `start it again`: ours, and that of JAX
when process 0 is gone."""

# What is done to a job. Each waits for its moment, does it, and says what; the clock starts when it
# returns.
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
    """All are killed, and then the newest checkpoint is harmed."""
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
    # Those that Orbax reads: the index, and of each process's part what is large enough for arrays
    # (its own index was merged); no marks.
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
    """All room is taken but for nothing, little, or what a part of a checkpoint needs, so that one
    process may find room and the other not; until the processes have ended or gone on to the end of
    the run.
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
    """A kind of fault."""

    fault: Fault
    snapshots: bool = True
    """Whether the run has the second tier."""
    place: str = "plain"
    """`plain`, `namespaces`, or `small` for a small disk."""
    caches: bool = True
    bound: int = SNAPSHOT
    """Steps that may be lost."""
    within_s: float = 20.0
    """In which the others end: silence for 5 s, another's last word for 3, process 0's patience for
    7, and 5 to write it all down."""
    codes: frozenset[int] = RESTARTED
    """That they may end with."""


CASES = {
    "SIGKILL in a step": Case(fault=in_a_step),
    "SIGKILL in a step, no snapshots": Case(fault=in_a_step, snapshots=False, bound=CHECKPOINT),
    "SIGKILL in compile": Case(fault=in_compile, caches=False),
    "SIGKILL in a save": Case(fault=in_a_save, snapshots=False, bound=CHECKPOINT),
    "SIGKILL at any time": Case(fault=at_any_time),
    "SIGSTOP": Case(fault=stopped),
    # the limit of what was timed too seldom is 30 s
    "network cut": Case(fault=cut_network, place="namespaces", within_s=50.0),
    "corrupted newest checkpoint": Case(fault=corrupted, snapshots=False, bound=ONE_BEFORE),
    "disk full": Case(
        fault=disk_full, snapshots=False, place="small", bound=CHECKPOINT, codes=frozenset({2})
    ),
}


def cases_for(processes: int) -> list[str]:
    """Names of what can be done to so many processes."""
    return [
        name
        for name, case in CASES.items()
        if case.place != "namespaces" or processes == len(NAMESPACES)
    ]


@contextmanager
def place_for(case: Case) -> Iterator[Path]:
    """A directory for a run."""
    with tempfile.TemporaryDirectory(prefix="faults-") as name:
        if case.place != "small":
            yield Path(name)
            return
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", name], check=True)
        try:
            yield Path(name)
        finally:
            # Lazily: for a moment after its processes have ended it may still be busy.
            subprocess.run(["umount", "--lazy", name], check=True)
