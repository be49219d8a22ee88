"""A real disturbance in mid-run: the link between two hosts gets slow, or one host has other load.
Compares runs that stay, switch or restart.

    sudo python benchmarks/disturbance.py run --out runs.jsonl
    python benchmarks/disturbance.py report --out runs.jsonl --picture disturbance.svg

`run` tries every contender in every disturbance; called again, it skips the runs that are in the
file.

The two hosts are network namespaces of this machine, each with its own core and a process of four
virtual devices. A token bucket (`tc ... tbf`) limits the link between them (link-100: to 100
Mbit/s), or busy processes take part of the second host's core (load-8: eight of them). Making the
hosts needs root, `ip` and `tc`; they are removed at the end. The figure is the wall time of a fixed
number of steps. Contenders:

    auto      starts under START with --control auto
    stay      the same with --control off
    a mesh    starts under that plan and stays; the best mesh is the best static plan in hindsight
    restart   as `stay`, but saves, stops and restarts under the best of those meshes as soon as
              the disturbance begins, and again under START when it ends: what an operator would do
              who watches all the time and knows the best plan
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from optimus_jax.config import ControlConfig
from optimus_jax.config.axes import AxisSizes
from optimus_jax.faults.stopping import EXIT_RESTART
from optimus_jax.system.paths import path_argument

TRAIN = Path(__file__).resolve().parent.parent / "scripts" / "train.py"
GLOBAL_BATCH = 8
MODEL = [
    "--model",
    "gpt2-nano",
    "--set",
    "model.num_layers=4",
    "--set",
    "model.embed_dim=384",
    "--set",
    "model.num_heads=6",
    "--set",
    "model.num_kv_heads=6",
    "--set",
    "model.head_dim=64",
    "--set",
    "model.mlp_dim=1536",
    "--seq-len",
    "64",
    "--global-batch",
    str(GLOBAL_BATCH),
    "--set",
    "eval_every=0",
    "--set",
    "checkpoint.every=0",
    "--progress",
    "none",
]
START = "data=2,fsdp=4"
STATIC = ("data=8", "fsdp=8", "data=2,tensor=4", "pipe=2,data=4", "pipe=4,data=2")
HOSTS = ("oj0", "oj1")
"""Names of network namespaces."""
BEGINS_AFTER_S, LASTS_S = 30.0, 240.0
"""When the disturbance begins, counted from the end of the first steps, and how long it lasts."""
WARM_STEPS = 5


@contextmanager
def two_hosts() -> Iterator[None]:
    """Make two linked network namespaces, and remove them at the end."""
    remove_hosts()
    try:
        for host in HOSTS:
            sh(f"ip netns add {host}")
            sh(f"ip -n {host} link set lo up")
        sh(f"ip link add v0 netns {HOSTS[0]} type veth peer name v1 netns {HOSTS[1]}")
        for number, host in enumerate(HOSTS):
            address = f"10.77.0.{number + 1}"
            sh(f"ip -n {host} addr add {address}/24 dev v{number}")
            sh(f"ip -n {host} link set v{number} up")
            # Without quickack a receiver may delay its acknowledgement by 40 ms, which delays some
            # messages of 256 KB as much.
            sh(
                f"ip -n {host} route change 10.77.0.0/24 dev v{number} proto kernel scope link src"
                f" {address} quickack 1"
            )
            sh(
                f"ip -n {host} route change local {address} dev v{number} table local proto kernel"
                f" scope host src {address} quickack 1"
            )
            # Processes send each other the address that their host's name resolves to.
            folder = Path("/etc/netns") / host
            folder.mkdir(parents=True)
            (folder / "hosts").write_text(f"127.0.0.1 localhost\n{address} {os.uname().nodename}\n")
        yield
    finally:
        remove_hosts()


def remove_hosts() -> None:
    for host in HOSTS:
        subprocess.run(["ip", "netns", "del", host], capture_output=True)
        folder = Path("/etc/netns") / host
        (folder / "hosts").unlink(missing_ok=True)
        if folder.is_dir():
            folder.rmdir()


class Disturbance:
    """A disturbance of this name, such as `link-100` or `load-8`."""

    def __init__(self, name: str) -> None:
        self._kind, _, size = name.partition("-")
        self._size, self._load = int(size), []

    def begin(self) -> None:
        if self._kind == "load":
            self._load = [
                subprocess.Popen(["taskset", "-c", "1", sys.executable, "-c", "while True: pass"])
                for _ in range(self._size)
            ]
        else:
            for number, host in enumerate(HOSTS):
                sh(
                    f"ip netns exec {host} tc qdisc replace dev v{number} root tbf rate"
                    f" {self._size}mbit burst 64kb latency 200ms"
                )

    def end(self) -> None:
        for process in self._load:
            process.kill()
        if self._kind == "link":
            for number, host in enumerate(HOSTS):
                sh(f"ip netns exec {host} tc qdisc del dev v{number} root")
        self._load = []


def sh(command: str) -> None:
    subprocess.run(command.split(), check=True)


class Job:
    """A run of two processes."""

    def __init__(self, directory: Path, flags: list[str]) -> None:
        self.directory, port = directory, 5600 + int(time.time()) % 2000
        self._processes = [
            subprocess.Popen(
                [
                    "ip",
                    "netns",
                    "exec",
                    host,
                    "taskset",
                    "-c",
                    str(number),
                    sys.executable,
                    str(TRAIN),
                    "--run-dir",
                    str(directory),
                    "--coordinator",
                    f"10.77.0.1:{port}",
                    "--num-processes",
                    "2",
                    "--process-id",
                    str(number),
                    "--cpu-devices",
                    "4",
                    *flags,
                ],
                stderr=(directory.parent / f"errors{number}.txt").open("w"),
            )
            for number, host in enumerate(HOSTS)
        ]

    def wait_for(self, step: int) -> None:
        """Wait until that step is done or a process has ended."""
        while len(self.steps()) < step and self.runs():
            time.sleep(0.1)

    def runs(self) -> bool:
        return all(process.poll() is None for process in self._processes)

    def stop(self) -> None:
        """Send SIGTERM, so that the run saves and ends."""
        for process in self._processes:
            process.send_signal(signal.SIGTERM)
        self.end(EXIT_RESTART)

    def end(self, expected: int = 0) -> None:
        codes = [process.wait() for process in self._processes]
        if codes != [expected] * len(HOSTS):
            raise SystemExit(
                "a process failed:"
                f" {codes}\n{(self.directory.parent / 'errors0.txt').read_text()[-3000:]}"
            )

    def steps(self) -> list[dict]:
        return lines(self.directory / "metrics.jsonl")

    def events(self) -> list[dict]:
        return lines(self.directory / "events.jsonl")


def lines(path: Path) -> list[dict]:
    """The complete lines of a JSON Lines file that may still be written to."""
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]] if path.exists() else []


def one_run(
    contender: str, disturbance: str, num_steps: int, budget_share: float, restart_under: str
) -> dict:
    """Run one contender, and return its figures."""
    mesh = START if contender in ("auto", "stay", "restart") else contender
    flags = [*MODEL, *layout(mesh), "--steps", str(num_steps)]
    if contender == "auto":
        flags += ["--control", "auto", "--set", f"controller.budget_share={budget_share}"]
    with tempfile.TemporaryDirectory() as folder:
        job = Job(Path(folder) / "run", flags)
        job.wait_for(WARM_STEPS)
        began = time.time()
        restarts_s = []
        wait_until(began + BEGINS_AFTER_S, job)
        trouble = Disturbance(disturbance)
        trouble.begin()
        disturbed = time.time()
        if contender == "restart":
            job, seconds = restarted(job, restart_under, num_steps)
            restarts_s.append(seconds)
        wait_until(disturbed + LASTS_S, job)
        trouble.end()
        mended = time.time()
        if contender == "restart" and job.runs():
            job, seconds = restarted(job, START, num_steps)
            restarts_s.append(seconds)
        job.end()
        ended = time.time()
        return {
            "contender": contender,
            "disturbance": disturbance,
            "num_steps": num_steps,
            "total_s": round(ended - began, 1),
            "began": began,
            "disturbed": disturbed,
            "mended": mended,
            "restarts_s": restarts_s,
            "restart_under": restart_under,
            "steps": [
                {
                    "step": row["step"],
                    "plan": row["plan"],
                    "step_time_s": round(row["step_time_s"], 4),
                }
                for row in job.steps()
            ],
            "events": [
                event
                for event in job.events()
                if event["event"] in ("decision", "remesh", "rollback", "plan")
            ],
        }


def layout(mesh: str) -> list[str]:
    """Flags of a mesh. A pipeline gets as many microbatches as the batch has examples for."""
    axes = AxisSizes.parse(mesh)
    rows = GLOBAL_BATCH // (axes.data * axes.fsdp)
    return ["--mesh", mesh, "--microbatches", str(rows if axes.pipe > 1 else 1)]


def restarted(job: Job, mesh: str, num_steps: int) -> tuple[Job, float]:
    """Save, stop and restart the run under another mesh; also the seconds without a step."""
    started = time.time()
    job.stop()
    done = len(job.steps())
    flags = ["--resume", *layout(mesh), "--steps", str(num_steps), "--progress", "none"]
    job = Job(job.directory, flags)
    job.wait_for(done + 1)
    return job, round(time.time() - started, 1)


def wait_until(when: float, job: Job) -> None:
    while time.time() < when and job.runs():
        time.sleep(0.1)


def forget(cache: Path) -> None:
    """Delete what the controllers of earlier runs learnt, so that all contenders start equal.

    The hardware profile stays.
    """
    for path in cache.glob("**/control-*.json"):
        path.unlink()


def run(
    out: Path, disturbances: list[str], contenders: list[str], num_steps: int, budget_share: float
) -> None:
    for disturbance in disturbances:
        for contender in contenders:
            found = {(row["contender"], row["disturbance"]): row for row in lines(out)}
            if (contender, disturbance) in found:
                continue
            forget(Path(os.environ["XDG_CACHE_HOME"]))
            with two_hosts():
                row = one_run(
                    contender,
                    disturbance,
                    num_steps,
                    budget_share,
                    (
                        best_static(list(found.values()), disturbance)
                        if contender == "restart"
                        else START
                    ),
                )
            with out.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(
                {name: value for name, value in row.items() if name not in ("steps", "events")},
                flush=True,
            )


def best_static(rows: list[dict], disturbance: str) -> str:
    """The fastest mesh under this disturbance, among those that have run. Exits if none has."""
    static = [
        row
        for row in rows
        if row["disturbance"] == disturbance and row["contender"] not in ("auto", "stay", "restart")
    ]
    if not static:
        raise SystemExit(
            f"restart needs the best static plan, but none has run under {disturbance}: run some"
            " --contender MESH first"
        )
    return min(static, key=lambda row: row["total_s"])["contender"]


def report(out: Path, picture: Path | None) -> None:
    rows = lines(out)
    print(
        "| disturbance | contender | total: s | versus stay | step before, during, after: s |"
        " switches |"
    )
    print("|---|---|---|---|---|---|")
    for row in rows:
        stay = next(
            (
                each["total_s"]
                for each in rows
                if (each["contender"], each["disturbance"]) == ("stay", row["disturbance"])
            ),
            float("nan"),
        )
        restarts = (
            f"restarts, without steps for {' and '.join(map(str, row['restarts_s']))} s"
            if row["restarts_s"]
            else "none"
        )
        print(
            f"| {row['disturbance']} | {row['contender']} | {row['total_s']} |"
            f" {row['total_s'] / stay - 1:+.0%} | {', '.join(map(seconds, phases(row)))} "
            f"| {'; '.join(map(told, moves(row))) or restarts} |"
        )
    for row in rows:
        if row["contender"] == "auto":
            print(f"\n{row['disturbance']}: " + "; ".join(reactions(row)))
    if picture is not None:
        draw(rows, picture)


def phases(row: dict) -> list[list[float]]:
    """Step times before, during and after the disturbance."""
    bounds, found = (row["disturbed"], row["mended"], float("inf")), [[], [], []]
    for when, time_s in finished(row):
        found[next(number for number, bound in enumerate(bounds) if when <= bound)].append(time_s)
    return found


def finished(row: dict) -> list[tuple[float, float]]:
    """(time of its end, duration) of each step, in seconds.

    The delay of a switch counts after the step that it happens at. The delay of a restart ends
    with the first step after it.
    """
    restarted, delays_s = (
        [
            begun + lasted_s
            for begun, lasted_s in zip(
                (row["disturbed"], row["mended"]), row["restarts_s"], strict=False
            )
        ],
        {event["step"]: event["step_delay_s"] for event in moves(row)},
    )
    when, plan, found = row["began"], row["steps"][WARM_STEPS]["plan"], []
    for step in row["steps"][WARM_STEPS:]:
        is_first = restarted and step["plan"] != plan
        when, plan = restarted.pop(0) if is_first else when + step["step_time_s"], step["plan"]
        found.append((when, step["step_time_s"]))
        when += delays_s.get(step["step"], 0.0)
    return found


def seconds(times: list[float]) -> str:
    return f"{statistics.median(times):.3f}" if times else "none"


def moves(row: dict) -> list[dict]:
    return [event for event in row["events"] if event["event"] in ("remesh", "rollback")]


def told(event: dict) -> str:
    return (
        f"{event['event']} after step {event['step']} to {event['layout'].split(', precision')[0]}"
        f" ({event['step_delay_s']:.2f} s)"
    )


def reactions(row: dict) -> Iterator[str]:
    """The events after the disturbance began, and after it ended, with their delays."""
    for what, since, until in (
        ("disturbed", row["disturbed"], row["mended"]),
        ("mended", row["mended"], float("inf")),
    ):
        events = [event for event in row["events"] if since < event["time_s"] < until]
        noticed = next((event for event in events if event["event"] == "decision"), None)
        moved = next((event for event in events if event["event"] == "remesh"), None)
        # An earlier decision may have been withdrawn, so take the newest one for the plan that the
        # run then switched to.
        decided = next(
            (
                event
                for event in reversed(events)
                if moved
                and event["event"] == "decision"
                and event["action"] == "switch"
                and event["plan"] == moved["plan"]
                and event["time_s"] < moved["time_s"]
            ),
            None,
        )
        times = [
            f"{name} {event['time_s'] - since:.1f} s"
            for name, event in (
                ("noticed after", noticed),
                ("decided after", decided),
                ("moved after", moved),
            )
            if event
        ]
        yield f"{what}: {', '.join(times) or 'nothing'}"


def draw(rows: list[dict], path: Path) -> None:
    """Draw the number of steps done over time."""
    import matplotlib.pyplot as plt

    names = list(dict.fromkeys(row["disturbance"] for row in rows))
    figure, axes = plt.subplots(
        1, len(names), figsize=(5 * len(names), 3.2), squeeze=False, layout="constrained"
    )
    for axis, name in zip(axes[0], names, strict=True):
        for row in (row for row in rows if row["disturbance"] == name):
            times = [0.0, *(when - row["began"] for when, _ in finished(row))]
            axis.plot(times, range(WARM_STEPS, WARM_STEPS + len(times)), label=row["contender"])
            if row["contender"] == "auto":
                axis.axvspan(
                    row["disturbed"] - row["began"], row["mended"] - row["began"], color="0.9"
                )
        axis.set(xlabel="seconds", ylabel="steps done", title=f"{name} for {LASTS_S:.0f} s")
        axis.legend(frameon=False)
    figure.savefig(path)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("run", "report"))
    parser.add_argument(
        "--out",
        type=path_argument,
        default=Path("runs.jsonl"),
        help="JSON Lines, one run per line (default: runs.jsonl)",
    )
    parser.add_argument(
        "--disturbance",
        nargs="+",
        default=["link-100", "link-20", "load-8"],
        help="link-MBIT or load-PROCESSES (default: link-100 link-20 load-8)",
    )
    parser.add_argument(
        "--contender",
        nargs="+",
        default=["auto", "stay", *STATIC, "restart"],
        help="auto, stay, restart or a mesh (default: all)",
    )
    parser.add_argument("--steps", type=int, default=400, help="steps of each run (default: 400)")
    parser.add_argument(
        "--budget-share",
        type=float,
        default=ControlConfig().budget_share,
        help="controller.budget_share (default: that of a run)",
    )
    parser.add_argument("--picture", type=path_argument, help="file for the report's picture (SVG)")
    args = parser.parse_args()
    if args.what == "run":
        os.environ["XDG_CACHE_HOME"] = str(args.out.resolve().with_suffix(".cache"))
        run(args.out, args.disturbance, args.contender, args.steps, args.budget_share)
    else:
        report(args.out, args.picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())
