"""Faults done to a run of two processes, and what became of it.

    python benchmarks/faults.py --out faults.jsonl --repetitions 20           # goes on where it stopped
    python benchmarks/faults.py --out faults.jsonl --table                     # of what is in the file

Each repetition begins a run of a tiny model (two processes x two virtual devices, fsdp=4), does one fault at a random moment, waits for the processes
to end by themselves, and starts them again by the same command (`--resume auto`), as an engine would, until the run has come to its end.
What is written down of it: from the fault to the end of the last process; from there to the next finished step; steps that were done twice; and whether
every loss is the one of a run that nobody disturbed, bit for bit. A repetition in which this machine stood still is done again. The network is cut
between two network namespaces, and disks that fill up are small file systems in memory: for those one has to be root.
"""

import argparse
import itertools
import json
import os
import random
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fault_processes import Server

STEPS, SNAPSHOT_EVERY, CHECKPOINT_EVERY = 40, 4, 10
SNAPSHOT, CHECKPOINT, ONE_BEFORE = SNAPSHOT_EVERY + 2, CHECKPOINT_EVERY + 2, 2 * CHECKPOINT_EVERY + 2
"""Steps lost at most: those since the newest whole one, and those that go on while it is written."""
RESTARTED = frozenset({75, -signal.SIGABRT, -signal.SIGSEGV})
"""Exit codes of which docs/faults.md says that they mean `start it again`: ours, and that of JAX when process 0 is gone."""
SETTINGS = [
    "--model", "gpt2-nano", "--steps", str(STEPS), "--global-batch", "8", "--seq-len", "32", "--eval-every", "0", "--progress", "plain",
    "--checkpoint-every", str(CHECKPOINT_EVERY), "--mesh", "fsdp=4", "--cpu-devices", "2", "--num-processes", "2", "--resume", "auto",
    "--set", "model.num_layers=1", "--set", "model.embed_dim=32", "--set", "model.mlp_dim=64", "--set", "model.head_dim=4",
    "--set", "faults.silence_s=5", "--set", "faults.floor_s=8", "--set", "faults.ceiling_s=30", "--set", "faults.connect_s=20", "--set", "faults.start_s=60", "--set", "faults.stop_s=5",
    "--set", "faults.heartbeat_s=15"]
LIMIT_S = 100.0
"""Nothing may take longer: then it hangs."""
STOOD_S = 2.0
"""Between two looks, which take a hundredth of it, if the machine stands still."""
NAMESPACES = ("fault0", "fault1")


class StoodStill(Exception):
    """The machine had other things to do: times say nothing."""


class Clock:
    """Waits for conditions, and notices when nothing else was done either."""

    def __init__(self) -> None:
        self._looked_s = time.monotonic()

    def wait(self, condition: Callable[[], Any], limit_s: float = LIMIT_S) -> float | None:
        """Seconds until it held; None: it did not within the limit."""
        began_s = self._looked_s = time.monotonic()
        while not condition():
            now = time.monotonic()
            if now - self._looked_s > STOOD_S:
                raise StoodStill
            self._looked_s = now
            if now - began_s > limit_s:
                return None
            time.sleep(0.005)
        return time.monotonic() - began_s


@dataclass
class Job:
    """A run, and who starts its processes."""

    run_dir: Path
    text: Path
    servers: tuple[Server, Server]
    host: str
    """Address that process 0 listens at."""
    extra: list[str]
    caches: bool = True
    """Whether compiled programs are kept, so that starts are short."""
    clock: Clock = field(default_factory=Clock)
    pids: list[int] = field(default_factory=list)
    starts: int = 0

    def start(self) -> None:
        """Both processes, by the same command each time."""
        self.starts += 1
        address = f"{self.host}:{_free_port()}"
        arguments = [*SETTINGS, "--data", str(self.text), "--run-dir", str(self.run_dir), "--coordinator", address, *self.extra]
        self.pids = [server.start([*arguments, "--process-id", str(number)], self.log(number), caches=self.caches) for number, server in enumerate(self.servers)]

    def log(self, number: int) -> Path:
        return self.run_dir.with_name(f"{self.run_dir.name}.{number}.log")

    def ended(self, number: int) -> tuple[int, float] | None:
        return self.servers[number].ended(self.pids[number])

    def all_ended(self) -> bool:
        return len(self.pids) == 2 and all(self.ended(number) for number in range(2))

    def codes(self) -> list[int | None]:
        return [end[0] if (end := self.ended(number)) else None for number in range(2)]

    def kill(self) -> None:
        """Whatever is left of it, stopped or not."""
        for number, pid in enumerate(self.pids):
            if self.ended(number) is None:
                os.kill(pid, signal.SIGKILL)
        self.clock.wait(self.all_ended)

    def lines(self, name: str) -> list[dict[str, Any]]:
        path = self.run_dir / name
        return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]] if path.exists() else []

    @property
    def step(self) -> int:
        return len(self.lines("metrics.jsonl"))

    def logs(self) -> str:
        return "\n".join(self.log(number).read_text(errors="replace")[-3000:] for number in range(2) if self.log(number).exists())


# What is done to a job. Each waits for its moment, does it, and says what; the clock starts when it returns.
Fault = Callable[[Job, random.Random], dict[str, Any]]


def in_a_step(job: Job, draw: random.Random) -> dict[str, Any]:
    at = draw.randrange(3, STEPS - 3)
    job.clock.wait(lambda: job.step >= at or job.all_ended())
    time.sleep(draw.uniform(0.0, 0.1))
    return _kill(job, draw)


def in_compile(job: Job, draw: random.Random) -> dict[str, Any]:
    job.clock.wait(lambda: any(event["event"] == "plan" for event in job.lines("events.jsonl")) or job.all_ended())
    time.sleep(draw.uniform(0.0, 1.0))
    return _kill(job, draw) | {"compiled": any(event["event"] == "compile" for event in job.lines("events.jsonl"))}


def in_a_save(job: Job, draw: random.Random) -> dict[str, Any]:
    at = CHECKPOINT_EVERY * draw.randrange(1, STEPS // CHECKPOINT_EVERY)
    job.clock.wait(lambda: any((job.run_dir / "checkpoints").glob(f"{at}.*tmp*")) or job.step > at + 3 or job.all_ended())
    time.sleep(draw.uniform(0.0, 0.06))
    return _kill(job, draw) | {"whole": (job.run_dir / "checkpoints" / str(at)).exists()}


def at_any_time(job: Job, draw: random.Random) -> dict[str, Any]:
    time.sleep(draw.uniform(0.0, 14.0))
    return _kill(job, draw)


def stopped(job: Job, draw: random.Random) -> dict[str, Any]:
    at = draw.randrange(3, STEPS - 3)
    job.clock.wait(lambda: job.step >= at or job.all_ended())
    who = draw.randrange(2)
    os.kill(job.pids[who], signal.SIGSTOP)
    return {"process": who, "survivors": [1 - who], "wake": True}


def cut_network(job: Job, draw: random.Random) -> dict[str, Any]:
    at = draw.randrange(3, STEPS - 3)
    job.clock.wait(lambda: job.step >= at or job.all_ended())
    who = draw.randrange(2)
    _ip("-n", NAMESPACES[who], "link", "set", f"fv{who}", "down")
    return {"process": who, "survivors": [0, 1]}


def corrupted(job: Job, draw: random.Random) -> dict[str, Any]:
    """Both are killed, and then the newest checkpoint is harmed."""
    at = draw.randrange(2 * CHECKPOINT_EVERY + 2, STEPS - 2)
    job.clock.wait(lambda: (job.step >= at and len(list((job.run_dir / "checkpoints").glob("[0-9]*0"))) >= 2) or job.all_ended())
    job.kill()
    whole = sorted((path for path in (job.run_dir / "checkpoints").iterdir() if path.name.isdecimal()), key=lambda path: int(path.name))
    # Those that Orbax reads: not each process's own part, which was merged, nor marks.
    files = sorted([*(whole[-1] / "state" / "d").iterdir(), whole[-1] / "state" / "manifest.ocdbt", whole[-1] / "manifest" / "metadata"])
    chosen = draw.choice(files)
    how = draw.choice(["half of a file", "a file removed", "a bit turned"])
    content = bytearray(chosen.read_bytes())
    if how == "a file removed":
        chosen.unlink()
    elif how == "half of a file":
        chosen.write_bytes(content[:len(content) // 2])
    else:
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        chosen.write_bytes(content)
    return {"process": None, "survivors": [], "how": how, "file": str(chosen.relative_to(whole[-1])), "harmed": int(whole[-1].name)}


def disk_full(job: Job, draw: random.Random) -> dict[str, Any]:
    """All room is taken but for nothing, little, or what a part of a checkpoint needs, so that one process may find room and the other not;
    until the processes have ended or gone on to the end of the run."""
    at = draw.randrange(CHECKPOINT_EVERY + 2, STEPS - 3)
    job.clock.wait(lambda: (job.step >= at and any((job.run_dir / "checkpoints").glob("[0-9]*0"))) or job.all_ended())
    whole = next((path for path in (job.run_dir / "checkpoints").glob("[0-9]*0")), None)
    leave = draw.choice([0, 4096, *[int(draw.random() * sum(path.stat().st_size for path in whole.rglob("*") if path.is_file())) for _ in range(4) if whole]])
    with open(job.run_dir.parent / "ballast", "wb") as file:
        file.write(b"\0" * max(0, shutil.disk_usage(job.run_dir).free - leave))
    return {"process": None, "survivors": [0, 1], "left_bytes": leave}


def _kill(job: Job, draw: random.Random) -> dict[str, Any]:
    who = draw.randrange(2)
    if job.ended(who) is None:
        os.kill(job.pids[who], signal.SIGKILL)
    return {"process": who, "survivors": [1 - who]}


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
    """In which the others end: silence for 5 s, another's last word for 3, process 0's patience for 7, and 5 to write it all down."""
    codes: frozenset[int] = RESTARTED
    """That they may end with."""


CASES = {
    "SIGKILL in a step": Case(fault=in_a_step),
    "SIGKILL in a step, no snapshots": Case(fault=in_a_step, snapshots=False, bound=CHECKPOINT),
    "SIGKILL in compile": Case(fault=in_compile, caches=False),
    "SIGKILL in a save": Case(fault=in_a_save, snapshots=False, bound=CHECKPOINT),
    "SIGKILL at any time": Case(fault=at_any_time),
    "SIGSTOP": Case(fault=stopped),
    "network cut": Case(fault=cut_network, place="namespaces", within_s=50.0),  # the limit of what was timed too seldom is 30 s
    "corrupted newest checkpoint": Case(fault=corrupted, snapshots=False, bound=ONE_BEFORE),
    "disk full": Case(fault=disk_full, snapshots=False, place="small", bound=CHECKPOINT, codes=frozenset({2})),
}


def repetition(case: Case, job: Job, draw: random.Random, undisturbed: list[float]) -> dict[str, Any]:
    """One fault, and the way to the end of the run."""
    job.start()
    told = case.fault(job, draw)
    began_s, step = time.monotonic(), job.step
    row: dict[str, Any] = {**told, "at_step": step, "is_late": job.all_ended() and all(code == 0 for code in job.codes())}
    waited = job.clock.wait(lambda: all(job.ended(number) for number in told["survivors"]))
    row |= {"detected_s": None if not told["survivors"] else waited and round(waited, 2), "codes": job.codes(), "hangs": waited is None}
    if told.get("wake") and not job.ended(told["process"]):
        os.kill(job.pids[told["process"]], signal.SIGCONT)
        woken = job.clock.wait(lambda: job.ended(told["process"]))
        row |= {"woken_s": woken and round(woken, 2), "codes": job.codes(), "hangs": row["hangs"] or woken is None}
    row["said"] = _said(job)
    job.kill()
    _mend(job)
    ended_s = time.monotonic()
    while not (job.all_ended() and job.codes() == [0, 0]) and job.starts < 6 and not row["hangs"]:
        before = len(job.lines("events.jsonl"))
        job.start()
        job.clock.wait(lambda before=before: _resumed(job, before) is not None or job.all_ended())
        if "resumed_at" not in row and (resumed := _resumed(job, before)) is not None:
            job.clock.wait(lambda resumed=resumed: job.step > resumed or job.all_ended())
            # A step that was asked for, but whose line was not written, is not missed by anybody.
            row |= {"resumed_at": resumed, "steps_lost": step - resumed, "again_s": round(time.monotonic() - began_s, 2), "restart_s": round(time.monotonic() - ended_s, 2)}
        row["hangs"] = job.clock.wait(job.all_ended) is None
        job.kill()
    losses = [line["loss"] for line in job.lines("metrics.jsonl")]
    row |= {"starts": job.starts, "done": job.codes() == [0, 0], "same_losses": losses == undisturbed, "set_aside": (job.run_dir / "damaged").exists(),
            "faults_told": len([event for event in job.lines("events.jsonl") if event["event"] == "fault"])}
    told_well = row["is_late"] or (all(row["codes"][number] in case.codes for number in told["survivors"]) and (row["detected_s"] or 0.0) <= case.within_s)
    row["ok"] = row["done"] and row["same_losses"] and not row["hangs"] and row.get("steps_lost", 0) <= case.bound and told_well
    if not row["ok"]:
        row["logs"] = job.logs()
    return row


def _said(job: Job) -> list[str]:
    """What processes said of their end, in a line each."""
    words = [line for number in range(2) if job.log(number).exists() for line in job.log(number).read_text(errors="replace").splitlines()
             if line.startswith(("fault:", "error:"))]
    return [word[:200] for word in words]


def _resumed(job: Job, before: int) -> int | None:
    """The step that the run goes on from, once it has said so behind that many events."""
    return next((event["step"] for event in job.lines("events.jsonl")[before:] if event["event"] in ("resume", "start")), None)


def _mend(job: Job) -> None:
    """What an operator does before the job is started again: a link comes back, a disk has room."""
    (job.run_dir.parent / "ballast").unlink(missing_ok=True)
    if job.host != "127.0.0.1":
        for number, name in enumerate(NAMESPACES):
            _ip("-n", name, "link", "set", f"fv{number}", "up")


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


@contextmanager
def namespaces() -> Iterator[None]:
    """Two hosts with a cable between them. A name has to lead to a host's own address there, for that is what gloo tells the others."""
    _ip("link", "add", "fv0", "type", "veth", "peer", "name", "fv1")
    try:
        for number, name in enumerate(NAMESPACES):
            _ip("netns", "add", name)
            _ip("link", "set", f"fv{number}", "netns", name)
            for words in (["addr", "add", f"10.99.0.{number + 1}/24", "dev", f"fv{number}"], ["link", "set", f"fv{number}", "up"], ["link", "set", "lo", "up"]):
                _ip("-n", name, *words)
            hosts = Path("/etc/netns") / name / "hosts"
            hosts.parent.mkdir(parents=True, exist_ok=True)
            hosts.write_text(f"127.0.0.1 localhost\n10.99.0.{number + 1} {socket.gethostname()}\n")
        yield
    finally:
        for name in NAMESPACES:
            subprocess.run(["ip", "netns", "del", name], check=False)
            shutil.rmtree(Path("/etc/netns") / name, ignore_errors=True)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def measure(names: list[str], repetitions: int, out: Path) -> None:
    """Do what is missing in the file, one of each kind after the other, and add it."""
    done = {(row["case"], row["repetition"]) for row in _rows(out)}
    with ExitStack() as stack:
        work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="faults-")))
        text = work / "text.txt"
        text.write_text("".join(f"{n} times {n} is {n * n}.\n" for n in range(500)))
        os.environ |= {"JAX_COMPILATION_CACHE_DIR": str(work / "cache"), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "XDG_CACHE_HOME": str(work)}
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")]))
        server = Server()
        stack.callback(server.close)
        plain = (server, server)
        cut = plain
        if any(CASES[name].place == "namespaces" for name in names):
            stack.enter_context(namespaces())
            first, second = (Server(("ip", "netns", "exec", name)) for name in NAMESPACES)
            cut = first, second
            for each in cut:
                stack.callback(each.close)
        undisturbed = _undisturbed(work, text, plain)
        for number, name in itertools.product(range(repetitions), names):
            while (name, number) not in done:
                case, seed = CASES[name], f"{name}/{number}"
                extra = ["--set", f"checkpoint.snapshot_every={SNAPSHOT_EVERY if case.snapshots else 0}"]
                with place_for(case) as folder:
                    job = Job(run_dir=folder / "run", text=text, servers=cut if case.place == "namespaces" else plain,
                              host="10.99.0.1" if case.place == "namespaces" else "127.0.0.1", extra=extra, caches=case.caches)
                    try:
                        row = {"case": name, "repetition": number, "seed": seed} | repetition(case, job, random.Random(seed), undisturbed)
                    except StoodStill:
                        job.clock = Clock()
                        print(f"{seed}: the machine stood still; again", file=sys.stderr, flush=True)
                        _mend(job)
                        for pid in job.pids:
                            if not any(server.ended(pid) for server in job.servers):
                                os.kill(pid, signal.SIGKILL)
                        continue
                with open(out, "a") as file:
                    file.write(json.dumps(row) + "\n")
                done.add((name, number))
                print(json.dumps({key: value for key, value in row.items() if key != "logs"}), flush=True)


def _undisturbed(work: Path, text: Path, servers: tuple[Server, Server]) -> list[float]:
    """Losses of a run that nobody disturbed; its times do not matter."""
    job = Job(run_dir=work / "undisturbed", text=text, servers=servers, host="127.0.0.1", extra=["--set", f"checkpoint.snapshot_every={SNAPSHOT_EVERY}"])
    while not job.all_ended():
        with suppress(StoodStill):
            if job.starts == 0:
                job.start()
            job.clock.wait(job.all_ended)
    assert job.codes() == [0, 0], job.logs()
    return [line["loss"] for line in job.lines("metrics.jsonl")]


def _rows(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []


def table(rows: list[dict[str, Any]], repetitions: int) -> str:
    """What is in the file, in Markdown."""
    lines = ["| fault | repetitions | faults before the end | ended or resumed by itself | noticed after, s: median, most | training again after, s: median, most | steps lost: most (bound) | losses as undisturbed | exit codes |",
             "|---|---|---|---|---|---|---|---|---|"]
    for name, case in CASES.items():
        mine = [row for row in rows if row["case"] == name]
        met = [row for row in mine if not row["is_late"]]
        lost = [row["steps_lost"] for row in met if "steps_lost" in row]
        codes = sorted({code for row in met for number, code in enumerate(row["codes"]) if number in row.get("survivors", ())}, key=str)
        missing = "" if len(mine) >= repetitions else f" ({repetitions - len(mine)} missing)"
        lines.append(f"| {name} | {len(mine)}{missing} | {len(met)} | {sum(row['done'] and not row['hangs'] for row in mine)} | {_spread(met, 'detected_s')} | {_spread(met, 'again_s')} | "
                     f"{max(lost, default='-')} ({case.bound}) | {sum(row['same_losses'] for row in mine)} | {', '.join(map(str, codes)) or '-'} |")
    return "\n".join(lines)


def _spread(rows: list[dict[str, Any]], name: str) -> str:
    values = [row[name] for row in rows if row.get(name) is not None]
    return f"{statistics.median(values):.1f}, {max(values):.1f}" if values else "-"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON Lines, added to")
    parser.add_argument("--repetitions", type=int, default=20)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES), metavar="NAME", help=", ".join(CASES))
    parser.add_argument("--table", action="store_true", help="only print what is in the file")
    given = parser.parse_args()
    if not given.table:
        measure(given.cases, given.repetitions, given.out)
    print(table(_rows(given.out), given.repetitions))
    sys.exit(0 if all(row["ok"] for row in _rows(given.out)) else 1)
