"""What the controller gains on this machine: runs that stay with their first plan, compared with
runs that may leave it.

    python benchmarks/control.py run --out runs.jsonl
    python benchmarks/control.py report --out runs.jsonl

`run` trains every model from every start, with --control off and auto; called again, it skips the
runs that are in the file.

Eight virtual devices share the cores. A run has two figures: its wall time from the first step to
the end, switches included, and the CPU time of the whole process, compilation included. The second
is not affected by other load on the machine. The hardware profile is measured in the first run that
needs it and kept beside the figures.
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from optimus_jax.system.paths import path_argument

TRAIN = Path(__file__).resolve().parent.parent / "scripts" / "train.py"
COMMON = {
    "gpt": [
        "--set",
        "model.num_layers=2",
        "--set",
        "model.embed_dim=256",
        "--set",
        "model.num_heads=4",
        "--set",
        "model.num_kv_heads=4",
        "--set",
        "model.head_dim=64",
        "--set",
        "model.mlp_dim=1024",
        "--seq-len",
        "256",
        "--global-batch",
        "8",
    ],
    "llama": [
        "--set",
        "model.family=llama",
        "--set",
        "model.tied=false",
        "--set",
        "model.num_layers=3",
        "--set",
        "model.embed_dim=192",
        "--set",
        "model.num_heads=2",
        "--set",
        "model.num_kv_heads=1",
        "--set",
        "model.head_dim=96",
        "--set",
        "model.mlp_dim=512",
        "--seq-len",
        "256",
        "--global-batch",
        "8",
    ],
}
STARTS = {
    "gpt": {
        "pipe=2, tensor=4, one microbatch": ["--mesh", "pipe=2,tensor=4", "--microbatches", "1"],
        "tensor=8, attention whole": ["--mesh", "tensor=8", "--set", "parallel.rules=heads=none"],
        "pipe=2, data=4, recomputed": [
            "--mesh",
            "pipe=2,data=4",
            "--microbatches",
            "1",
            "--remat",
            "full",
        ],
        "the usual default: fsdp=8, all recomputed": ["--mesh", "fsdp=8", "--remat", "full"],
        "the best measured: data=4, tensor=2": ["--mesh", "data=4,tensor=2", "--remat", "none"],
    },
    "llama": {
        "pipe=2, tensor=4, attention whole": [
            "--mesh",
            "pipe=2,tensor=4",
            "--microbatches",
            "1",
            "--set",
            "parallel.rules=heads=none",
        ],
        "tensor=8, attention whole": ["--mesh", "tensor=8", "--set", "parallel.rules=heads=none"],
        "pipe=2, data=4, recomputed": [
            "--mesh",
            "pipe=2,data=4",
            "--microbatches",
            "1",
            "--remat",
            "full",
        ],
        "the usual default: fsdp=8, all recomputed": ["--mesh", "fsdp=8", "--remat", "full"],
        "the best measured: data=4, tensor=2": ["--mesh", "data=4,tensor=2", "--remat", "none"],
    },
}


def run(out: Path, num_steps: int, budget_share: float, only: str, repeats: int) -> None:
    """Do the runs that are missing in `out`, and append a line for each.

    Only starts whose `model: name` contains `only` are run. Runs that stay and runs that may leave
    alternate.
    """
    done = {key(row) for row in rows(out)}
    every = [
        (model, start)
        for model, starts in STARTS.items()
        for start in starts
        if only in f"{model}: {start}"
    ]
    for repeat, (model, start), control in itertools.product(
        range(repeats), every, ("off", "auto")
    ):
        row = {
            "model": model,
            "start": start,
            "control": control,
            "repeat": repeat,
            "num_steps": num_steps,
            "budget_share": budget_share,
        }
        if key(row) not in done:
            forget(Path(os.environ["XDG_CACHE_HOME"]))
            row |= one_run(
                [
                    *COMMON[model],
                    *STARTS[model][start],
                    "--control",
                    control,
                    "--set",
                    f"controller.budget_share={budget_share}",
                ],
                num_steps,
            )
            with out.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(json.dumps(row), flush=True)


def key(row: dict) -> tuple:
    """The key that identifies a run."""
    return row["model"], row["start"], row["control"], row["repeat"]


def forget(cache: Path) -> None:
    """Delete what the controllers of earlier runs learnt, so that no run profits from another.

    The hardware profile stays.
    """
    for path in cache.glob("**/control-*.json"):
        path.unlink()


def basics(num_steps: int, directory: Path) -> list[str]:
    """Flags that all runs share: no evaluation, no checkpoints, no output."""
    return [
        "--model",
        "gpt2-nano",
        "--cpu-devices",
        "8",
        "--steps",
        str(num_steps),
        "--run-dir",
        str(directory),
        "--set",
        "eval_every=0",
        "--set",
        "checkpoint.every=0",
        "--progress",
        "none",
    ]


def one_run(flags: list[str], num_steps: int) -> dict:
    """Do one run in its own process, and return its figures."""
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / "run"
        command = [sys.executable, str(TRAIN), *basics(num_steps, directory), *flags]
        before = os.times()
        started = time.perf_counter()
        subprocess.run(command, check=True)
        seconds, after = time.perf_counter() - started, os.times()
        events = [
            json.loads(line) for line in (directory / "events.jsonl").read_text().splitlines()
        ]
        metrics = [
            json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()
        ]
    moves = [event for event in events if event["event"] in ("remesh", "rollback")]
    compiled = next(event["time_s"] for event in events if event["event"] == "compile")
    return {
        "wall_s": round(seconds, 1),
        "steps_s": round(events[-1]["time_s"] - compiled, 1),
        "cpu_s": round(
            after.children_user
            + after.children_system
            - before.children_user
            - before.children_system,
            1,
        ),
        "first_step_s": round(statistics.median(row["step_time_s"] for row in metrics[2:12]), 4),
        "last_step_s": round(statistics.median(row["step_time_s"] for row in metrics[-20:]), 4),
        "switches": [
            {
                "event": event["event"],
                "step": event["step"],
                "layout": event["layout"],
                "delay_s": round(event["step_delay_s"], 2),
                "why": event["why"],
            }
            for event in moves
        ],
        "loss": metrics[-1]["loss"],
    }


def rows(out: Path) -> list[dict]:
    return [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []


def report(out: Path) -> None:
    """Print a table: the time of runs that stay, and what runs that may leave save.

    Repeated runs give medians, and the smallest and largest saving.
    """
    found: dict[tuple, list[dict]] = {}
    for row in rows(out):
        found.setdefault((row["model"], row["start"], row["control"]), []).append(row)
    print(
        "| model | start | runs | steps, staying: s | may leave: s | saved | CPU time saved |"
        " first steps, last steps: s | switches |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for (model, start, control), auto in found.items():
        if control == "auto" and (stay := found.get((model, start, "off"))):
            switches = " / ".join(
                "; ".join(
                    f"{each['event']} after {each['step']} to"
                    f" {each['layout'].split(', precision')[0]} ({each['delay_s']} s)"
                    for each in row["switches"]
                )
                or "none"
                for row in auto
            )
            print(
                f"| {model} | {start} | {len(auto)} | {_median(stay, 'steps_s'):.1f} |"
                f" {_median(auto, 'steps_s'):.1f} | {_saved(stay, auto, 'steps_s')} |"
                f" {_saved(stay, auto, 'cpu_s')} | {_median(auto, 'first_step_s'):.3f},"
                f" {_median(auto, 'last_step_s'):.3f} | {switches} |"
            )


def _median(found: list[dict], name: str) -> float:
    return statistics.median(row[name] for row in found)


def _saved(stay: list[dict], auto: list[dict], name: str) -> str:
    """The saving by medians, and the range over pairs of runs that followed each other."""
    pairs = [1 - after[name] / before[name] for before, after in zip(stay, auto, strict=False)]
    spread = f" ({min(pairs):.0%} to {max(pairs):.0%})" if len(pairs) > 1 else ""
    return f"{1 - _median(auto, name) / _median(stay, name):.0%}{spread}"


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
    parser.add_argument("--steps", type=int, default=400, help="steps of each run (default: 400)")
    parser.add_argument(
        "--budget-share", type=float, default=0.01, help="controller.budget_share (default: 0.01)"
    )
    parser.add_argument(
        "--only",
        default="",
        metavar="TEXT",
        help="only starts whose `model: name` contains this (default: all)",
    )
    parser.add_argument(
        "--repeats", type=int, default=1, help="repetitions of each run (default: 1)"
    )
    args = parser.parse_args()
    if args.what == "run":
        os.environ["XDG_CACHE_HOME"] = str(args.out.resolve().with_suffix(".cache"))
        run(args.out, args.steps, args.budget_share, args.only, args.repeats)
    else:
        report(args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
