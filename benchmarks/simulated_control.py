"""What the controller gains on simulated clusters, compared with other policies in every scenario.
SIMULATED, not measured.

    python benchmarks/simulated_control.py --out runs/simulated.jsonl --markdown table.md
    python benchmarks/simulated_control.py --scenario FILE.json --setting llama-a100 --seeds 5

The first command runs all scenarios on two settings with 30 seeds. A line goes into the --out file
for every finished seed; called again, the script continues from there. The lines are valid for the
code that wrote them, so start another file after a change of code.

The true behaviour of the cluster is hidden from the policies, and differs from what they assume
(optimus_jax/simulation/scenarios.py). Targets:

* 70% of the oracle's gain, where the oracle gains anything;
* 20% less time than the static default, where something disturbs the run;
* no switch where nothing changes or little of the run is left;
* at most 2 switches while a link flaps;
* at most 1% more time than the best static plan where nothing changes.
"""

import argparse
import dataclasses
import datetime
import json
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from optimus_jax.config.request import make_config
from optimus_jax.errors import OptimusError
from optimus_jax.planning.cost.rates import Rates
from optimus_jax.planning.profiles.cluster import Cluster
from optimus_jax.planning.search.search import Pricing
from optimus_jax.simulation.candidate_plans import PooledSearch
from optimus_jax.simulation.comparison import AUTO, METHODS, ORACLE, Result, Row, rows, run_all
from optimus_jax.simulation.events import PhaseEvent
from optimus_jax.simulation.library import find_scenario, library
from optimus_jax.simulation.scenarios import Scenario
from optimus_jax.simulation.setup import Setup
from optimus_jax.system.paths import path_argument

UNDISTURBED, SHORT, FLAPPING = ("stationary",), ("short",), ("link-flapping",)
TEACHES_NOTHING = (*UNDISTURBED, *SHORT, *FLAPPING, "slow-data", "lying-metrics")
"""Scenarios in which a switch gains nothing."""
CHUNK = 5
"""Seeds that a process simulates at a time."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A model on a cluster."""

    model: str
    cluster: str
    links: tuple[str, ...] = ()
    seq_len: int
    global_batch: int


SETTINGS: Mapping[str, Setting] = {
    "llama-a100": Setting(
        model="llama3-8b",
        cluster="a100:8x8",
        links=("inter_host=6.25GB/s",),
        seq_len=2048,
        global_batch=256,
    ),
    "gpt2-xl-h100": Setting(
        model="gpt2-xl",
        cluster="h100:8x8",
        links=("inter_host=12.5GB/s",),
        seq_len=1024,
        global_batch=3584,
    ),
    "llama-small-batch": Setting(
        model="llama3-8b",
        cluster="a100:8x8",
        links=("inter_host=6.25GB/s",),
        seq_len=2048,
        global_batch=64,
    ),
    "llama-1024": Setting(
        model="llama3-8b",
        cluster="h100:128x8",
        links=("inter_host=12.5GB/s",),
        seq_len=4096,
        global_batch=1024,
    ),
}
"""64 devices with 50 Gb/s each between hosts; 64 with 100 Gb/s each, and a batch that also divides
by 56; 64 with one example per device, where communication dominates; 1,024 with 100 Gb/s each."""


@cache
def searcher() -> PooledSearch:
    """The search of this process."""
    return PooledSearch()


def setup_of(scenario: Scenario, setting: Setting) -> Setup:
    """The setup of a scenario. Batches in scenarios are for 64 devices, so they are scaled."""
    cluster = Cluster.parse(setting.cluster, setting.links)
    times = max(1, cluster.num_devices // 64)
    events = tuple(
        [
            (
                dataclasses.replace(event, global_batch=event.global_batch * times)
                if isinstance(event, PhaseEvent) and event.global_batch
                else event
            )
            for event in scenario.events
        ]
    )
    scenario = dataclasses.replace(
        scenario,
        events=events,
        global_batch=scenario.global_batch and scenario.global_batch * times,
    )
    config = make_config(
        setting.model,
        {"precision": "bf16", "seq_len": setting.seq_len, "global_batch": setting.global_batch},
    )
    return Setup.of(scenario, Pricing(config, cluster, Rates.of(cluster.accelerator)))


Job = tuple[str, str]
"""Setting and scenario, by name."""
Runs = dict[Job, dict[int, dict[str, Result]]]
"""Results of each job by seed and policy."""


def run_chunk(
    scenario: Scenario, setting: Setting, seeds: Sequence[int]
) -> dict[int, dict[str, Result]]:
    """Results of some seeds by policy. Raises OptimusError if the scenario is impossible here."""
    setup = setup_of(scenario, setting)
    return {
        seed: {
            name: Result.of(outcome) for name, outcome in run_all(setup, seed, searcher()).items()
        }
        for seed in seeds
    }


def stored_results(path: Path | None) -> Runs:
    """The results in the file; an incomplete line is skipped."""
    found: Runs = {}
    if path is None or not path.exists():
        return found
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            value = json.loads(line)
            results = {
                name: Result(total_s=each["total_s"], event_counts=each["moments"])
                for name, each in value["results"].items()
            }
            found.setdefault((value["setting"], value["scenario"]), {})[value["seed"]] = results
        except (ValueError, KeyError):
            continue
    return found


def keep(path: Path | None, job: Job, found: Mapping[int, Mapping[str, Result]]) -> None:
    """Append results to the file."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        for seed, results in found.items():
            value = {
                name: {"total_s": each.total_s, "moments": dict(each.event_counts)}
                for name, each in results.items()
            }
            file.write(
                json.dumps(
                    {
                        "setting": job[0],
                        "scenario": job[1],
                        "seed": seed,
                        "simulated": True,
                        "results": value,
                    }
                )
                + "\n"
            )


def run_jobs(jobs: Mapping[Job, Scenario], seeds: int, processes: int, out: Path | None) -> Runs:
    """Run the seeds that are not in the file, and return all results."""
    done, began_s = stored_results(out), time.perf_counter()
    missing = {
        job: [seed for seed in range(seeds) if seed not in done.get(job, {})] for job in jobs
    }
    with ProcessPoolExecutor(processes) as pool:
        # Do the first seeds of all jobs before the next seeds of any, so that an interrupted call
        # leaves a complete table with fewer seeds.
        futures = {
            pool.submit(run_chunk, jobs[job], SETTINGS[job[0]], left[first : first + CHUNK]): job
            for first in range(0, seeds, CHUNK)
            for job, left in missing.items()
            if first < len(left)
        }
        for number, future in enumerate(as_completed(futures), start=1):
            job = futures[future]
            try:
                found = future.result()
            except OptimusError as error:
                print(
                    f"{job[0]}, {job[1]}: left out, {str(error).splitlines()[0]}", file=sys.stderr
                )
                continue
            keep(out, job, found)
            done.setdefault(job, {}).update(found)
            left_s = (time.perf_counter() - began_s) * (len(futures) - number) / number
            print(
                f"{number} of {len(futures)} parts done ({job[0]}, {job[1]}), about"
                f" {left_s / 60:.0f} min left",
                file=sys.stderr,
                flush=True,
            )
    return {
        job: {seed: done[job][seed] for seed in range(seeds) if seed in done[job]}
        for job in jobs
        if job in done
    }


def verdicts(scenario: str, row: Row, oracle: Row) -> list[str]:
    """The targets that apply, and whether they are met.

    A target that not even the oracle reaches does not apply.
    """
    found = []
    if scenario in (*UNDISTURBED, *SHORT):
        found.append(_verdict("no switch", row.most_switches == 0))
        found += (
            [_verdict("1% over best static", row.regret.value <= 0.01)]
            if row.regret and scenario in UNDISTURBED
            else []
        )
    if scenario in FLAPPING:
        found.append(_verdict("2 switches", row.most_switches <= 2))
    if row.share is not None and scenario not in SHORT:
        found.append(_verdict("70% of oracle", row.share.value >= 0.7))
    if scenario not in TEACHES_NOTHING and row.saved is not None and oracle.saved is not None:
        found.append(
            _verdict("20% below default", row.saved.value >= 0.2)
            if oracle.saved.value >= 0.2
            else f"oracle {oracle.saved.value:.0%} below default"
        )
    return found


def _verdict(target: str, is_met: bool) -> str:
    return target if is_met else f"NOT {target}"


def lines(name: str, scenario: str, found: Sequence[Row]) -> list[str]:
    """The lines of one job in the report."""
    auto, oracle = (next(row for row in found if row.method == name) for name in (AUTO, ORACLE))
    text = [
        f"{name}, {scenario}: {'; '.join(verdicts(scenario, auto, oracle)) or 'no target'}",
        (
            f"    {'':20}{'time, s':>26}{'below default':>24}{'of oracle gain':>22}"
            f"{'over best static':>24}{'switches':>10}{'most':>6}{'back':>6}{'restarts':>10}"
        ),
    ]
    for row in found:
        cells = [
            _cell(row.total_s, "{:,.0f}"),
            _cell(row.saved, "{:.1%}"),
            _cell(row.share, "{:.0%}"),
            _cell(row.regret, "{:+.1%}"),
        ]
        text.append(
            f"    {row.method:20}{cells[0]:>26}{cells[1]:>24}{cells[2]:>22}{cells[3]:>24}"
            f"{row.switches:>10.1f}{row.most_switches:>6}{row.rollbacks:>6.1f}{row.restarts:>10.1f}"
        )
    return text


def _cell(value, shape: str) -> str:
    return (
        ""
        if value is None
        else f"{shape.format(value.value)} [{shape.format(value.low)}, {shape.format(value.high)}]"
    )


def markdown(report: Mapping[Job, Sequence[Row]], seeds: int, command: str) -> str:
    """Two Markdown tables: the controller and its targets, and the time saved by every policy."""
    text = [
        f"# The controller on simulated clusters, {datetime.date.today()}",
        "",
        (
            f"SIMULATED, not measured. `{command}`: means over {seeds} seeds [95% intervals,"
            " bootstrapped over seeds]."
        ),
        "",
        (
            "| setting | scenario | less time than the default | of the oracle's gain | over the"
            " best static plan | switches (most) | targets |"
        ),
        "|---|---|---|---|---|---|---|",
    ]
    for (setting, scenario), found in report.items():
        auto, oracle = (next(row for row in found if row.method == name) for name in (AUTO, ORACLE))
        text.append(
            f"| {setting} | {scenario} | {_cell(auto.saved, '{:.1%}')} |"
            f" {_cell(auto.share, '{:.0%}') or 'has none'} | {_cell(auto.regret, '{:+.1%}')} |"
            f" {auto.switches:.1f} ({auto.most_switches}) |"
            f" {'; '.join(verdicts(scenario, auto, oracle)) or 'none'} |"
        )
    names = [row.method for row in next(iter(report.values()))]
    text += [
        "",
        "Less time than the static default, by policy:",
        "",
        "| setting | scenario | " + " | ".join(names) + " |",
        "|---" * (len(names) + 2) + "|",
    ]
    for (setting, scenario), found in report.items():
        text.append(
            f"| {setting} | {scenario} | "
            + " | ".join("" if row.saved is None else f"{row.saved.value:.1%}" for row in found)
            + " |"
        )
    return "\n".join(text) + "\n"


def main() -> int:
    """Parse the flags, simulate and print the report."""
    parser = argparse.ArgumentParser(
        description=(
            "Compare the controller with other policies on simulated clusters. All figures are"
            " simulated."
        )
    )
    parser.add_argument(
        "--scenario",
        action="append",
        metavar="NAME|FILE.json",
        help="only this scenario; may be given several times (default: all that are included)",
    )
    parser.add_argument(
        "--setting",
        action="append",
        choices=list(SETTINGS),
        help="model and cluster; may be given several times (default: the first two)",
    )
    parser.add_argument(
        "--seeds",
        type=int,
        default=30,
        metavar="N",
        help="runs per scenario, each with its own random draws (default: 30)",
    )
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="processes (default: 2)")
    parser.add_argument(
        "--out",
        type=path_argument,
        metavar="FILE.jsonl",
        help="file for results; called again, continue from it",
    )
    parser.add_argument("--markdown", type=path_argument, metavar="FILE.md", help="write tables")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    try:
        scenarios = [find_scenario(name) for name in options.scenario or library()]
    except OptimusError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    began_s = time.perf_counter()
    jobs = {
        (name, scenario.name): scenario
        for name in options.setting or list(SETTINGS)[:2]
        for scenario in scenarios
    }
    report = {
        job: rows(list(runs.values()))
        for job, runs in run_jobs(jobs, options.seeds, options.jobs, options.out).items()
    }
    if options.json:
        print(
            json.dumps(
                [
                    {
                        "setting": setting,
                        "scenario": scenario,
                        "simulated": True,
                        "seeds": options.seeds,
                        "methods": [row.as_json() for row in found],
                    }
                    for (setting, scenario), found in report.items()
                ],
                indent=2,
            )
        )
    else:
        print(
            "\n".join(
                line
                for (setting, scenario), found in report.items()
                for line in lines(setting, scenario, found)
            )
        )
    if options.markdown and report:
        options.markdown.write_text(
            markdown(report, options.seeds, "python " + " ".join(sys.argv)), encoding="utf-8"
        )
    print(
        f"simulated {len(report)} scenarios x {options.seeds} seeds x {len(METHODS)} policies"
        f" in {time.perf_counter() - began_s:.0f} s",
        file=sys.stderr,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
