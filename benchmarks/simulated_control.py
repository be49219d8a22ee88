"""What the controller saves on simulated clusters, compared with staying, rivals and an oracle.
SIMULATED, not measured.

    python benchmarks/simulated_control.py --random 100 --out runs/simulated.jsonl --markdown t.md
    python benchmarks/simulated_control.py --scenario link-quarter --setting llama-a100 --seeds 5 \\
        --misfit 0.02 --policies auto,stay,oracle

The first command runs all built-in scenarios with two sizes of what no model of a plan explains
(`misfit.plans`), and 100 drawn ones, on three settings. A line goes into the --out file for every
finished seed; called again, the script continues from there. The lines are valid for the code that
wrote them, so start another file after a change of code.

The true behaviour of the cluster is hidden from the policies, and differs from what they assume
(optimus_jax/simulation/scenarios.py). simulated_control_report.py says what is reported. Targets:

* 75% of the oracle's gain on average, and 50% in every row, where the oracle gains 2% or more;
* no seed more than 2% slower than staying, except where the oracle cannot do better;
* no switch where nothing changes or little of the run is left;
* more time saved over all rows than by any rival.
"""

import argparse
import dataclasses
import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from simulated_control_report import Job, Runs, as_json, markdown, rows_of

from optimus_jax.config.request import make_config
from optimus_jax.errors import ConfigError, OptimusError, explain, nearest
from optimus_jax.planning.cost.rates import Rates
from optimus_jax.planning.profiles.cluster import Cluster
from optimus_jax.planning.search.search import Pricing
from optimus_jax.simulation.candidate_plans import PooledSearch
from optimus_jax.simulation.comparison import (
    AUTO,
    METHODS,
    ORACLE,
    POLICIES,
    STAY,
    Result,
    run_all,
)
from optimus_jax.simulation.events import PhaseEvent
from optimus_jax.simulation.named_scenarios import find_scenario, library
from optimus_jax.simulation.random_scenarios import random_scenario
from optimus_jax.simulation.scenarios import Scenario
from optimus_jax.simulation.setup import Setup
from optimus_jax.system.paths import path_argument

SEEDS = 30
MISFITS = (0.02, 0.10)
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
DEFAULT_SETTINGS = ("llama-a100", "gpt2-xl-h100", "llama-1024")


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


def with_misfit(scenario: Scenario, plans: float) -> Scenario:
    """The scenario with this standard deviation of what no model of a plan explains."""
    return dataclasses.replace(scenario, misfit=dataclasses.replace(scenario.misfit, plans=plans))


def jobs_of(
    settings: Sequence[str],
    scenarios: Sequence[Scenario],
    misfits: Sequence[float],
    drawn: Sequence[Scenario],
) -> dict[Job, Scenario]:
    """All jobs. Drawn scenarios keep their own misfit."""
    return {
        Job(setting=setting, scenario=scenario.name, misfit=misfit): with_misfit(scenario, misfit)
        for setting in settings
        for scenario in scenarios
        for misfit in misfits
    } | {
        Job(setting=setting, scenario=scenario.name): scenario
        for setting in settings
        for scenario in drawn
    }


def run_chunk(
    scenario: Scenario, setting: Setting, seeds: Sequence[int], methods: Sequence[str]
) -> dict[int, dict[str, Result]]:
    """Results of some seeds by policy. Raises OptimusError if the scenario is impossible here."""
    setup = setup_of(scenario, setting)
    return {
        seed: {
            name: Result.of(outcome)
            for name, outcome in run_all(setup, seed, searcher(), methods).items()
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
            job = Job(setting=value["setting"], scenario=value["scenario"], misfit=value["misfit"])
            results = {
                name: Result(total_s=each["total_s"], event_counts=each["events"])
                for name, each in value["results"].items()
            }
            seed = value["seed"]
        except (ValueError, KeyError):
            continue
        found.setdefault(job, {}).setdefault(seed, {}).update(results)
    return found


def keep(path: Path | None, job: Job, found: Mapping[int, Mapping[str, Result]]) -> None:
    """Append results to the file."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        for seed, results in found.items():
            value = {
                name: {"total_s": each.total_s, "events": dict(each.event_counts)}
                for name, each in results.items()
            }
            line = {**dataclasses.asdict(job), "seed": seed, "simulated": True, "results": value}
            file.write(json.dumps(line) + "\n")


def run_jobs(
    jobs: Mapping[Job, Scenario],
    seeds: Mapping[Job, int],
    methods: Sequence[str],
    processes: int,
    out: Path | None,
) -> Runs:
    """Run what is not in the file, and return the results of all seeds with all methods."""
    done, began_s = stored_results(out), time.perf_counter()

    def missing(job: Job, seed: int) -> tuple[str, ...]:
        found = done.get(job, {}).get(seed, {})
        names = {name for name in methods if name not in found}
        if ORACLE in names:  # it is as good as whatever is run beside it
            names |= {name for name in methods if name == STAY or name not in POLICIES}
        return tuple([name for name in methods if name in names])

    with ProcessPoolExecutor(processes) as pool:
        # Do the first seeds of all jobs before the next seeds of any, so that an interrupted call
        # leaves a complete table with fewer seeds.
        futures = {
            pool.submit(run_chunk, jobs[job], SETTINGS[job.setting], chunk, names): job
            for first in range(0, max(seeds.values()), CHUNK)
            for job in jobs
            for names, chunk in _alike(
                {seed: missing(job, seed) for seed in range(seeds[job])[first : first + CHUNK]}
            ).items()
            if names
        }
        for number, future in enumerate(as_completed(futures), start=1):
            job = futures[future]
            try:
                found = future.result()
            except OptimusError as error:
                print(f"{job}: left out, {str(error).splitlines()[0]}", file=sys.stderr)
                continue
            keep(out, job, found)
            for seed, results in found.items():
                done.setdefault(job, {}).setdefault(seed, {}).update(results)
            left_s = (time.perf_counter() - began_s) * (len(futures) - number) / number
            print(
                f"{number} of {len(futures)} parts done ({job}), about {left_s / 60:.0f} min left",
                file=sys.stderr,
                flush=True,
            )
    complete = {
        job: {
            seed: {name: done[job][seed][name] for name in methods}
            for seed in range(seeds[job])
            if not missing(job, seed)
        }
        for job in jobs
    }
    return {job: runs for job, runs in complete.items() if runs}


def _alike(missing: Mapping[int, tuple[str, ...]]) -> dict[tuple[str, ...], list[int]]:
    """Seeds by the methods that they lack."""
    alike: dict[tuple[str, ...], list[int]] = {}
    for seed, names in missing.items():
        alike.setdefault(names, []).append(seed)
    return alike


def methods_of(asked: str | None) -> tuple[str, ...]:
    """The policies of this list, with the controller and staying. Raises ConfigError if one is
    unknown.
    """
    names = METHODS if asked is None else tuple(asked.split(","))
    for name in names:
        if name not in METHODS:
            raise ConfigError(
                explain(
                    f"unknown policy {name!r}",
                    given=f"--policies {asked}",
                    do=nearest(name, METHODS),
                )
            )
    return tuple([name for name in METHODS if name in (AUTO, STAY, *names)])


def misfits_of(asked: str) -> tuple[float, ...]:
    """The numbers of this list. Raises ConfigError if one is no number, or negative."""
    try:
        numbers = tuple([float(text) for text in asked.split(",")])
    except ValueError:
        numbers = (-1.0,)
    if not all(0 <= number < math.inf for number in numbers):
        raise ConfigError(
            explain(
                "misfits of plans are numbers of 0 or more",
                given=f"--misfit {asked}",
                do="write for example 0.02,0.10",
            )
        )
    return numbers


def parser() -> argparse.ArgumentParser:
    """The parser of this script's flags."""
    flags = argparse.ArgumentParser(
        description=(
            "Compare the controller with other policies on simulated clusters. All figures are"
            " simulated."
        )
    )
    flags.add_argument(
        "--scenario",
        action="append",
        metavar="NAME|random:SEED|FILE.json",
        help="only this scenario; may be given several times (default: all that are built in)",
    )
    flags.add_argument(
        "--random",
        type=int,
        default=0,
        metavar="N",
        help="also the first N drawn scenarios, with a seed each (default: 0)",
    )
    flags.add_argument(
        "--misfit",
        default=",".join(map(str, MISFITS)),
        metavar="LIST",
        help=(
            "misfit.plans, the log error of each plan that no model explains; each scenario runs"
            " with all of them, drawn ones with their own (default: 0.02,0.1)"
        ),
    )
    flags.add_argument(
        "--setting",
        action="append",
        choices=list(SETTINGS),
        help=(
            "model and cluster; may be given several times (default:"
            f" {', '.join(DEFAULT_SETTINGS)})"
        ),
    )
    flags.add_argument(
        "--policies",
        metavar="LIST",
        help=f"only these, with auto and stay: some of {','.join(METHODS)} (default: all)",
    )
    flags.add_argument(
        "--seeds",
        type=int,
        default=SEEDS,
        metavar="N",
        help=f"runs per scenario, each with its own random draws (default: {SEEDS})",
    )
    flags.add_argument("--jobs", type=int, default=2, metavar="N", help="processes (default: 2)")
    flags.add_argument(
        "--out",
        type=path_argument,
        metavar="FILE.jsonl",
        help="file for results; called again, continue from it",
    )
    flags.add_argument("--markdown", type=path_argument, metavar="FILE.md", help="write the report")
    flags.add_argument("--json", action="store_true", help="print JSON")
    return flags


def main() -> int:
    """Parse the flags, simulate and print the report."""
    options, began_s = parser().parse_args(), time.perf_counter()
    try:
        methods = methods_of(options.policies)
        scenarios = [find_scenario(name) for name in options.scenario or library()]
        jobs = jobs_of(
            options.setting or DEFAULT_SETTINGS,
            scenarios,
            misfits_of(options.misfit),
            [random_scenario(seed) for seed in range(options.random)],
        )
    except OptimusError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    seeds = {job: options.seeds if job.misfit is not None else 1 for job in jobs}
    rows = rows_of(run_jobs(jobs, seeds, methods, options.jobs, options.out))
    report = markdown(rows, "python " + " ".join(sys.argv))
    print(json.dumps(as_json(rows), indent=2) if options.json else report)
    if options.markdown:
        options.markdown.write_text(report, encoding="utf-8")
    print(
        f"simulated {len(jobs)} scenarios x {len(methods)} policies in"
        f" {time.perf_counter() - began_s:.0f} s",
        file=sys.stderr,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
