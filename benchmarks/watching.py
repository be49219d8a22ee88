"""What it costs to be watched by the controller: within one run, blocks of steps that it is shown,
and blocks that it is not.

    python benchmarks/watching.py --out watching.jsonl      runs that are not there yet, then a
    table

Two runs of the same thing differ by more than watching costs (processes find other memory and other
neighbours), so both are taken from one process, in turns. A block's time is wall time from its
first dispatch to the next block's, with all that happens between steps: signals, probes, decisions.
Every run begins at its model's best measured plan (control.py), from which there is nothing to be
had by moving. A ratio is that of a watched block to the two beside it; intervals are bootstrapped
over blocks.
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
"""Steps."""
NOT_YET = 2
"""First blocks, which do not count: caches fill, and the plan is weighed for the first time."""
START = "the best measured: data=4, tensor=2"
RESAMPLED = 2000


class InTurns:
    """A run's controller that sees every other block of steps."""

    def __init__(self, controller: Any) -> None:
        self._controller, self._num_steps = controller, 0
        self.began_s: list[float] = []
        """When each block did."""

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

    def is_probe_due(self, step: int) -> bool:
        return self._looks and self._controller.is_probe_due(step)

    @property
    def is_on_trial(self) -> bool:
        return self._controller.is_on_trial

    def leaves(self, step: int) -> bool:
        return self._looks and self._controller.leaves(step)


def watched_in_turns(out: Path) -> None:
    """Run scripts/train.py with this process's other arguments; when each block began goes to
    `out`.
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
    """When each block began, of a run in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        times, directory = Path(folder) / "times.json", Path(folder) / "run"
        flags = [
            *control.COMMON[model],
            *control.STARTS[model][START],
            "--control",
            "auto",
            "--set",
            "controller.budget_share=0.1",
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
        moved = [
            line
            for line in (directory / "events.jsonl").read_text().splitlines()
            if json.loads(line)["event"] == "remesh"
        ]
        if moved:
            raise RuntimeError(
                f"{model} was moved, so that its blocks are of two plans: {moved[0]}"
            )
        return json.loads(times.read_text())


def ratios(began_s: list[float]) -> list[float]:
    """Of each watched block's time to the mean of those beside it."""
    took_s = np.diff(began_s)
    watched = [place for place in range(1, len(took_s) - 1, 2) if place >= NOT_YET]
    return [2 * took_s[place] / (took_s[place - 1] + took_s[place + 1]) for place in watched]


def report(rows: list[dict]) -> None:
    """A line for each model."""
    print(
        "| model | runs | watched blocks | a watched block takes, beside others | 95% | the middle"
        " one |\n|---|---|---|---|---|---|"
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
        "--out", type=path_argument, default=Path("watching.jsonl"), help="JSON Lines of runs"
    )
    parser.add_argument(
        "--model",
        nargs="+",
        choices=tuple(control.COMMON),
        default=list(control.COMMON),
        help="default: all",
    )
    parser.add_argument("--runs", type=int, default=3, help="of each model (default: 3)")
    parser.add_argument("--steps", type=int, default=800, help="of each run (default: 800)")
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
