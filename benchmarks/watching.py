"""Overhead of the controller when it does not switch: within one run it observes every other block
of steps.

    python benchmarks/watching.py --out watching.jsonl

Does the runs that are missing in the file, then prints a table.

Two runs of the same config differ by more than the overhead (memory and load differ), so blocks
with and without the controller alternate in one process. The time of a block is the wall time from
its first dispatch to that of the next block, including all work between steps: signals, probes,
decisions. It advises and does not act (--control advise), so that no switch is between two blocks;
every run starts at its model's best measured plan (control.py), where a switch gains nothing. A
ratio is the time of an observed block over the mean of the two blocks beside it.
Intervals are bootstrapped over blocks.
"""

import argparse
import json
import os
import runpy
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import control
import numpy as np

from optimus_jax.system.paths import path_argument

BLOCK = 20
"""Steps per block."""
NOT_YET = 2
"""First blocks, which do not count: caches fill, and the plan is evaluated for the first time."""
START = "the best measured: data=4, tensor=2"
RESAMPLED = 2000


class InTurns:
    """Wraps a run's controller so that it observes only every other block of steps."""

    def __init__(self, controller: Any) -> None:
        self._controller, self._num_steps = controller, 0
        self.began_s: list[float] = []
        """Start of each block."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._controller, name)

    @property
    def _looks(self) -> bool:
        return len(self.began_s) % 2 == 0

    def dispatched(self, **what: Any) -> None:
        if self._num_steps % BLOCK == 0:
            self.began_s.append(time.perf_counter())
        self._num_steps += 1
        if self._looks:
            self._controller.dispatched(**what)

    def step(self, record: Any) -> None:
        if self._looks:
            self._controller.step(record)

    def pauses_for(self, step: int) -> Any:
        return self._controller.pauses_for(step) if self._looks else None

    @property
    def is_on_trial(self) -> bool:
        return self._controller.is_on_trial

    def leaves(self, step: int) -> bool:
        return self._looks and self._controller.leaves(step)


def watched_in_turns(out: Path) -> None:
    """Run scripts/train.py with this process's other arguments, and write the starts of the blocks
    to `out`.
    """
    from optimus_jax.run import program as run

    watchers: list[InTurns] = []
    make = run.make_controller

    def make_in_turns(*args: Any, **given: Any) -> Any:
        watchers.append(InTurns(make(*args, **given)))
        return watchers[-1]

    run.make_controller = make_in_turns
    sys.argv = [str(control.TRAIN), *sys.argv[3:]]
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    finally:
        out.write_text(json.dumps(watchers[0].began_s if watchers else []))


def one_run(model: str, num_steps: int) -> list[float]:
    """Do one run in its own process. Returns the start of each block, in seconds."""
    with tempfile.TemporaryDirectory() as folder:
        times, directory = Path(folder) / "times.json", Path(folder) / "run"
        flags = [
            *control.COMMON[model],
            *control.STARTS[model][START],
            "--control",
            "advise",
        ]
        subprocess.run(
            [
                sys.executable,
                __file__,
                "in-turns",
                str(times),
                *control.basics(num_steps, directory),
                *flags,
            ],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        return json.loads(times.read_text())


def ratios(began_s: list[float]) -> list[float]:
    """The time of each observed block over the mean of the blocks beside it."""
    took_s = np.diff(began_s)
    watched = [place for place in range(1, len(took_s) - 1, 2) if place >= NOT_YET]
    return [2 * took_s[place] / (took_s[place - 1] + took_s[place + 1]) for place in watched]


def report(rows: list[dict]) -> None:
    """Print a line for each model."""
    print(
        "| model | runs | observed blocks | overhead, mean | 95% interval | overhead, median"
        " |\n|---|---|---|---|---|---|"
    )
    for model in dict.fromkeys(row["model"] for row in rows):
        of_runs = [ratios(row["began_s"]) for row in rows if row["model"] == model]
        every = np.array([ratio for found in of_runs for ratio in found])
        means = np.random.default_rng(0).choice(every, size=(RESAMPLED, len(every))).mean(axis=1)
        low, high = np.quantile(means, [0.025, 0.975])
        print(
            f"| {model} | {len(of_runs)} | {len(every)} | {every.mean() - 1:+.1%} | {low - 1:+.1%}"
            f" to {high - 1:+.1%} | {statistics.median(every) - 1:+.1%} |"
        )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out",
        type=path_argument,
        default=Path("watching.jsonl"),
        help="JSON Lines, one run per line (default: watching.jsonl)",
    )
    parser.add_argument(
        "--model",
        nargs="+",
        choices=tuple(control.COMMON),
        default=list(control.COMMON),
        help="models to run (default: all)",
    )
    parser.add_argument("--runs", type=int, default=3, help="runs of each model (default: 3)")
    parser.add_argument("--steps", type=int, default=800, help="steps of each run (default: 800)")
    args = parser.parse_args()
    os.environ["XDG_CACHE_HOME"] = str(args.out.resolve().with_suffix(".cache"))
    rows = control.rows(args.out)
    for model in args.model * args.runs:
        if sum(row["model"] == model for row in rows) < args.runs:
            control.forget(Path(os.environ["XDG_CACHE_HOME"]))
            rows.append({"model": model, "began_s": one_run(model, args.steps)})
            with args.out.open("a") as file:
                file.write(json.dumps(rows[-1]) + "\n")
    report(rows)
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["in-turns"]:
        watched_in_turns(Path(sys.argv[2]))
    else:
        sys.exit(main())
