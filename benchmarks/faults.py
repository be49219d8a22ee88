"""Injects faults into a run of several processes, and records how it recovers.

    python benchmarks/faults.py --out faults.jsonl --repetitions 20
    python benchmarks/faults.py --out faults.jsonl --repetitions 20 --processes 4
    python benchmarks/faults.py --out faults.jsonl --table

Called again, it adds the repetitions that are missing in the file. `--table` only prints the table.

Each repetition starts a run of a tiny model (fsdp=4: two processes of two virtual devices each, or
four of one), injects one fault at a random moment, waits for the processes to exit by themselves,
and starts them again with the same command (`--resume auto`), as a job scheduler would, until the
run is complete. It records the time from the fault to the exit of the last process, the time to the
next finished step, the number of steps done twice, and whether every loss equals that of an
undisturbed run bit for bit. A repetition in which this machine stood still is repeated. The network
is cut between two network namespaces, and the disks that fill up are small file systems in memory;
both need root.
"""

import argparse
import itertools
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from fault_job import NAMESPACES, SNAPSHOT_EVERY, Clock, Job, StoodStill, ip, namespaces
from fault_kinds import CASES, RESTARTED, Case, cases_for, place_for
from fault_processes import Server

from optimus_jax.system.paths import path_argument


def repetition(
    case: Case, job: Job, draw: random.Random, undisturbed: list[float]
) -> dict[str, Any]:
    """Inject one fault, and restart the run until it is complete. Returns a row of figures."""
    job.start()
    told = case.fault(job, draw)
    began_s, step = time.monotonic(), job.step
    row: dict[str, Any] = {**told, "at_step": step, "is_late": job.is_done}
    waited = job.clock.wait(lambda: all(job.ended(number) for number in told["survivors"]))
    row |= {
        "detected_s": None if not told["survivors"] else waited and round(waited, 2),
        "codes": job.codes(),
        "hangs": waited is None,
    }
    if (
        told.get("process") is not None
        and "wake" not in told
        and all(job.codes()[number] == 0 for number in told["survivors"])
    ):
        # The killed process may have completed just before the kill, which is reported with a
        # delay.
        job.clock.wait(job.all_ended)
        row["is_late"] = job.is_done
    if told.get("wake") and not job.ended(told["process"]):
        os.kill(job.pids[told["process"]], signal.SIGCONT)
        woken = job.clock.wait(lambda: job.ended(told["process"]))
        row |= {
            "woken_s": woken and round(woken, 2),
            "codes": job.codes(),
            "hangs": row["hangs"] or woken is None,
        }
    row["said"] = _said(job)
    job.kill()
    _mend(job)
    ended_s = time.monotonic()
    while not job.is_done and job.starts < 6 and not row["hangs"]:
        before = len(job.lines("events.jsonl"))
        job.start()
        job.clock.wait(lambda before=before: _resumed(job, before) is not None or job.all_ended())
        if "resumed_at" not in row and (resumed := _resumed(job, before)) is not None:
            job.clock.wait(lambda resumed=resumed: job.step > resumed or job.all_ended())
            # Only steps with a line in metrics.jsonl count as lost.
            row |= {
                "resumed_at": resumed,
                "steps_lost": step - resumed,
                "again_s": round(time.monotonic() - began_s, 2),
                "restart_s": round(time.monotonic() - ended_s, 2),
            }
        row["hangs"] = job.clock.wait(job.all_ended) is None
        job.kill()
    losses = [line["loss"] for line in job.lines("metrics.jsonl")]
    row |= {
        "starts": job.starts,
        "done": job.is_done,
        "same_losses": losses == undisturbed,
        "set_aside": (job.run_dir / "damaged").exists(),
        "faults_told": len(
            [event for event in job.lines("events.jsonl") if event["event"] == "fault"]
        ),
    }
    told_well = row["is_late"] or (
        all(row["codes"][number] in case.codes for number in told["survivors"])
        and (row["detected_s"] or 0.0) <= case.within_s
    )
    row["ok"] = (
        row["done"]
        and row["same_losses"]
        and not row["hangs"]
        and row.get("steps_lost", 0) <= case.bound
        and told_well
    )
    if not row["ok"]:
        row["logs"] = job.logs()
    return row


def _said(job: Job) -> list[str]:
    """The lines in which processes reported why they ended."""
    words = [
        line
        for number in range(len(job.servers))
        if job.log(number).exists()
        for line in job.log(number).read_text(errors="replace").splitlines()
        if line.startswith(("fault:", "error:"))
    ]
    return [word[:200] for word in words]


def _resumed(job: Job, before: int) -> int | None:
    """The step that the run resumed from, once an event after the first `before` events says so."""
    return next(
        (
            event["step"]
            for event in job.lines("events.jsonl")[before:]
            if event["event"] in ("resume", "start")
        ),
        None,
    )


def _mend(job: Job) -> None:
    """Repair the network and the disk, as an operator does before a restart."""
    (job.run_dir.parent / "ballast").unlink(missing_ok=True)
    if job.host != "127.0.0.1":
        for number, name in enumerate(NAMESPACES):
            ip("-n", name, "link", "set", f"fv{number}", "up")


def measure(names: list[str], repetitions: int, processes: int, out: Path) -> None:
    """Do the repetitions that are missing in the file, and append them.

    The kinds of faults alternate.
    """
    done = {
        (row["case"], row["repetition"])
        for row in _rows(out)
        if row.get("processes", 2) == processes
    }
    with ExitStack() as stack:
        work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="faults-")))
        text = work / "text.txt"
        text.write_text("".join(f"{n} times {n} is {n * n}.\n" for n in range(500)))
        os.environ |= {
            "JAX_COMPILATION_CACHE_DIR": str(work / "cache"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "XDG_CACHE_HOME": str(work),
        }
        os.environ["PYTHONPATH"] = os.pathsep.join(
            filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")])
        )
        server = Server()
        stack.callback(server.close)
        plain = cut = (server,) * processes
        if any(CASES[name].place == "namespaces" for name in names):
            stack.enter_context(namespaces())
            cut = tuple(Server(("ip", "netns", "exec", name)) for name in NAMESPACES)
            for each in cut:
                stack.callback(each.close)
        undisturbed = _undisturbed(work, text, plain)
        for number, name in itertools.product(range(repetitions), names):
            while (name, number) not in done:
                case, seed = CASES[name], f"{name}/{number}"
                extra = [
                    "--set",
                    f"checkpoint.snapshot_every={SNAPSHOT_EVERY if case.snapshots else 0}",
                ]
                with place_for(case) as folder:
                    job = Job(
                        run_dir=folder / "run",
                        text=text,
                        servers=cut if case.place == "namespaces" else plain,
                        host="10.99.0.1" if case.place == "namespaces" else "127.0.0.1",
                        extra=extra,
                        caches=case.caches,
                    )
                    try:
                        row = {
                            "case": name,
                            "processes": processes,
                            "repetition": number,
                            "seed": seed,
                        } | repetition(case, job, random.Random(seed), undisturbed)
                    except StoodStill:
                        job.clock = Clock()
                        print(
                            f"{seed}: the machine stood still, so this repetition is repeated",
                            file=sys.stderr,
                            flush=True,
                        )
                        _mend(job)
                        for pid in job.pids:
                            if not any(server.ended(pid) for server in job.servers):
                                os.kill(pid, signal.SIGKILL)
                        continue
                with open(out, "a") as file:
                    file.write(json.dumps(row) + "\n")
                done.add((name, number))
                print(
                    json.dumps({key: value for key, value in row.items() if key != "logs"}),
                    flush=True,
                )


def _undisturbed(work: Path, text: Path, servers: tuple[Server, ...]) -> list[float]:
    """Losses of an undisturbed run.

    The time limits here are short, so a busy machine may end such a run; then it is started anew.
    """
    for attempt in range(3):
        job = Job(
            run_dir=work / f"undisturbed{attempt}",
            text=text,
            servers=servers,
            host="127.0.0.1",
            extra=["--set", f"checkpoint.snapshot_every={SNAPSHOT_EVERY}"],
        )
        while not job.all_ended():
            with suppress(StoodStill):
                if job.starts == 0:
                    job.start()
                job.clock.wait(job.all_ended)
        if job.is_done:
            return [line["loss"] for line in job.lines("metrics.jsonl")]
        print(
            job.logs(),
            f"the undisturbed run ended with {job.codes()}",
            sep="\n",
            file=sys.stderr,
        )
        if not RESTARTED.union({0}).issuperset(job.codes()):
            break
    raise SystemExit("error: the undisturbed run does not complete")


def _rows(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []


def table(rows: list[dict[str, Any]], repetitions: int) -> str:
    """A Markdown table of the file's rows."""
    lines = [
        (
            "| fault | processes | repetitions | faults before the end | exited or resumed by"
            " itself | detected after, s: median, maximum | training again after, s: median,"
            " maximum | steps lost: maximum (bound) | losses as undisturbed | exit codes |"
        ),
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for processes, name in (
        (number, name)
        for number in sorted({row.get("processes", 2) for row in rows})
        for name in cases_for(number)
    ):
        case, mine = (
            CASES[name],
            [row for row in rows if row["case"] == name and row.get("processes", 2) == processes],
        )
        met = [row for row in mine if not row["is_late"]]
        lost = [row["steps_lost"] for row in met if "steps_lost" in row]
        codes = sorted(
            {
                code
                for row in met
                for number, code in enumerate(row["codes"])
                if number in row.get("survivors", ())
            },
            key=str,
        )
        missing = "" if len(mine) >= repetitions else f" ({repetitions - len(mine)} missing)"
        lines.append(
            f"| {name} | {processes} | {len(mine)}{missing} | {len(met)} |"
            f" {sum(row['done'] and not row['hangs'] for row in mine)} |"
            f" {_spread(met, 'detected_s')} | {_spread(met, 'again_s')} | {max(lost, default='-')}"
            f" ({case.bound}) | {sum(row['same_losses'] for row in mine)} |"
            f" {', '.join(map(str, codes)) or '-'} |"
        )
    return "\n".join(lines)


def _spread(rows: list[dict[str, Any]], name: str) -> str:
    values = [row[name] for row in rows if row.get(name) is not None]
    return f"{statistics.median(values):.1f}, {max(values):.1f}" if values else "-"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=path_argument, required=True, help="JSON Lines, appended to")
    parser.add_argument("--repetitions", type=int, default=20)
    parser.add_argument("--processes", type=int, choices=(2, 4), default=2)
    parser.add_argument(
        "--cases",
        nargs="+",
        choices=list(CASES),
        metavar="NAME",
        help="default: all that apply to this number of processes; " + ", ".join(CASES),
    )
    parser.add_argument("--table", action="store_true", help="only print the table")
    given = parser.parse_args()
    if not given.table:
        if beyond := [name for name in given.cases or () if name not in cases_for(given.processes)]:
            parser.error(
                f"{', '.join(beyond)}: needs {len(NAMESPACES)} processes, not {given.processes}"
            )
        measure(
            given.cases or cases_for(given.processes), given.repetitions, given.processes, given.out
        )
    print(table(_rows(given.out), given.repetitions))
    sys.exit(0 if all(row["ok"] for row in _rows(given.out)) else 1)
