"""Can a learnt decision beat the rule (control/policy.py)? SIMULATED, not measured.

    python benchmarks/learnt_decisions.py collect --data runs/decisions.jsonl --random 1000:1050
    python benchmarks/learnt_decisions.py compare --data runs/decisions.jsonl \\
        --out runs/learnt.jsonl --random 0:60 --scenario all --seeds 3

`collect` simulates runs under the rule and labels every candidate of every decision with what the
switch to it would truly have saved (decision_labels.py): a contextual bandit with full information.
Now and then it takes one of the rule's best candidates at random, so that the data hold states that
the rule alone would not reach. `compare` fits the regressions of decision_learners.py to that file
and runs other scenarios, with the same seeds, under

* the rule;
* `ridge` and `trees`: of the three candidates with the largest value by the rule, the one with the
  largest predicted saving, if that is above the margin; `careful ridge` and `careful trees` have a
  larger margin, with which they switch as often as the rule in the training data;
* `perfect`: the rule with true ratios of step times, without a deviation;
* `labels`: the candidate with the largest label, a bound for what can be learnt from labels;
* staying, and the oracle.

Learnt policies keep what protects a run: candidates that are barred, decisions that are mandatory
or blocked, trials and their way back are the rule's.

A learnt policy is shipped if on scenarios that it was not trained on

* its mean gain over staying is higher than the rule's by 0.3 points, and the paired 95% interval of
  that difference, bootstrapped over scenarios, is above 0;
* no more runs lose more than 2% against staying;
* it makes no switch in stationary and short runs.

Both commands append a line to their file for every finished run and continue from there when they
are called again. Lines are valid for the code that wrote them. A learnt policy that would have
taken every decision of the rule's run as the rule did has the rule's result, without another run.
None has won so far (docs/decisions/0031-learnt-decisions.md).
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from decision_features import considered
from decision_learners import POLICIES, Example, Learnt, learn
from decision_runs import Case, by_labels, exploring, learnt, simulated
from learnt_decisions_report import RULE, report, trained
from simulated_control import SETTINGS, searcher, setup_of

from optimus_jax.errors import ConfigError, OptimusError, explain
from optimus_jax.simulation.comparison import ORACLE, STAY, Result, run_all
from optimus_jax.simulation.named_scenarios import find_scenario, library
from optimus_jax.simulation.random_scenarios import RANDOM
from optimus_jax.system.paths import path_argument

PERFECT, LABELS = "perfect", "labels"
METHODS = (STAY, ORACLE, RULE, *POLICIES, PERFECT, LABELS)
TRAINED_ON = ("llama-a100", "gpt2-xl-h100")


def collect(cases: Sequence[Case], data: Path) -> None:
    """Append the labelled decisions of the cases that are not in the file."""
    done = {case for case, _ in _lines(data)}
    for number, case in enumerate(cases, start=1):
        if case in done:
            continue
        try:
            seed = case.seed * len(SETTINGS) + list(SETTINGS).index(case.setting)
            result, decisions = simulated(case, exploring(seed), is_labelled=True)
        except OptimusError as error:
            _tell(f"{case} left out: {str(error).splitlines()[0]}")
            continue
        _append(data, {**asdict(case), "total_s": result.total_s, "decisions": decisions})
        _tell(f"{number} of {len(cases)}: {case}, {len(decisions)} decisions")


def examples_in(data: Path) -> list[Example]:
    """The labelled decisions of the file. Raises ConfigError if there are none."""
    found = [
        Example(
            group=case.scenario,
            features=np.array(each["features"]),
            saved=np.array(each["saved"]),
            is_open=considered(np.array(each["features"]), np.array(each["barred"])),
            rule=each["rule"],
        )
        for case, value in sorted(_lines(data), key=lambda line: line[0])
        for each in value["decisions"]
    ]
    if not found:
        raise ConfigError(
            explain(
                "there are no training data",
                given=f"--data {data}",
                do=f"python {Path(__file__).name} collect --data {data} --random 1000:1050",
            )
        )
    return found


def compare(
    cases: Sequence[Case], methods: Sequence[str], data: Path, out: Path
) -> dict[Case, dict[str, Result]]:
    """Run each case with each method, as far as the file lacks it. Returns all results."""
    found: dict[Case, dict[str, Result]] = {}
    ruled: dict[Case, list[dict[str, Any]]] = {}
    for case, value in _lines(out):
        result = Result(total_s=value["total_s"], event_counts=value["events"])
        found.setdefault(case, {})[value["method"]] = result
        if value["method"] == RULE:
            ruled[case] = value["decisions"]
    began_s = time.perf_counter()
    policies = cache(lambda kind: learn(examples_in(data), kind))
    for number, case in enumerate(cases, start=1):
        for method in METHODS:
            if method not in methods or method in found.get(case, {}):
                continue
            decisions: list[dict[str, Any]] = []
            try:
                if method in POLICIES and _agrees(policies(method), ruled.get(case)):
                    result = found[case][RULE]
                else:
                    result, decisions = _run(case, method, policies)
            except OptimusError as error:
                _tell(f"{case} left out: {str(error).splitlines()[0]}")
                continue
            found.setdefault(case, {})[method] = result
            line = {"method": method, "total_s": result.total_s, "events": result.event_counts}
            if method == RULE:
                ruled[case], line = decisions, {**line, "decisions": decisions}
            _append(out, {**asdict(case), "simulated": True, **line})
        _tell(f"{number} of {len(cases)}: {case}, {(time.perf_counter() - began_s) / 60:.0f} min")
    return found


def _run(
    case: Case, method: str, policies: Callable[[str], Learnt]
) -> tuple[Result, list[dict[str, Any]]]:
    if method in POLICIES:
        return simulated(case, learnt(policies(method)))
    if method == LABELS:
        return simulated(case, by_labels)
    if method in (RULE, PERFECT):
        return simulated(case, has_true_ratios=method == PERFECT)
    setup = setup_of(find_scenario(case.scenario), SETTINGS[case.setting])
    return Result.of(run_all(setup, case.seed, searcher(), (STAY, method))[method]), []


def _agrees(found: Learnt, decisions: Sequence[Mapping[str, Any]] | None) -> bool:
    """Whether the learnt policy takes all these decisions as the rule did."""
    return decisions is not None and all(
        found.choose(np.array(each["features"]), np.array(each["barred"])) == each["rule"]
        for each in decisions
    )


def _lines(path: Path) -> list[tuple[Case, dict[str, Any]]]:
    """The lines of a file of runs; an incomplete line is skipped."""
    found = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            value = json.loads(line)
            case = Case(**{name: value[name] for name in ("setting", "scenario", "seed")})
        except (ValueError, KeyError):
            continue
        found.append((case, value))
    return found


def _append(path: Path, value: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(value) + "\n")


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def cases_of(options: argparse.Namespace) -> list[Case]:
    """The cases that the flags name. A drawn scenario has its own number as its seed."""
    settings = options.setting or TRAINED_ON
    low, high = options.random
    names = [name for each in options.scenario or [] for name in _named(each)]
    return [
        *[
            Case(setting=setting, scenario=f"{RANDOM}{number}", seed=number)
            for number in range(low, high)
            for setting in settings
        ],
        *[
            Case(setting=setting, scenario=name, seed=seed)
            for seed in range(options.seeds)
            for name in names
            for setting in settings
        ],
    ]


def _named(name: str) -> list[str]:
    return list(library()) if name == "all" else [find_scenario(name).name]


def _numbers(text: str) -> tuple[int, int]:
    """Parse LOW:HIGH."""
    low, _, high = text.partition(":")
    if not (low.isdigit() and high.isdigit()) or int(low) > int(high):
        raise argparse.ArgumentTypeError(f"{text!r} is not LOW:HIGH, for example 0:60")
    return int(low), int(high)


def parser() -> argparse.ArgumentParser:
    """The parser of this script's flags."""
    flags = argparse.ArgumentParser(
        description=(
            "Learn decisions of the controller on simulated runs, and compare them with its rule."
            " All figures are simulated."
        )
    )
    commands = flags.add_subparsers(dest="command", required=True)
    first = commands.add_parser("collect", help="label the decisions of runs under the rule")
    second = commands.add_parser("compare", help="fit, run other scenarios, and print the tables")
    for each in (first, second):
        each.add_argument(
            "--data",
            type=path_argument,
            required=True,
            metavar="FILE.jsonl",
            help="file of labelled decisions",
        )
        each.add_argument(
            "--random",
            type=_numbers,
            default=(0, 0),
            metavar="LOW:HIGH",
            help="drawn scenarios from LOW to HIGH - 1, each with its number as the seed",
        )
        each.add_argument(
            "--scenario",
            action="append",
            metavar="NAME|all",
            help="also this scenario; may be given several times (all: those that are built in)",
        )
        each.add_argument(
            "--seeds",
            type=int,
            default=1,
            metavar="N",
            help="runs of each named scenario (default: 1)",
        )
        each.add_argument(
            "--setting",
            action="append",
            choices=list(SETTINGS),
            help=(
                f"model and cluster; may be given several times (default: {', '.join(TRAINED_ON)})"
            ),
        )
    second.add_argument(
        "--out",
        type=path_argument,
        required=True,
        metavar="FILE.jsonl",
        help="file for results; called again, continue from it",
    )
    second.add_argument(
        "--policies",
        metavar="LIST",
        default=",".join(METHODS),
        help="only these, with stay, oracle and rule (default: all)",
    )
    return flags


def main() -> int:
    """Parse the flags; collect, or compare and print the tables."""
    options = parser().parse_args()
    try:
        cases = cases_of(options)
        if options.command == "collect":
            collect(cases, options.data)
            print(trained(examples_in(options.data)))
            return 0
        asked = {STAY, ORACLE, RULE, *options.policies.split(",")}
        if unknown := asked.difference(METHODS):
            raise ConfigError(
                explain(
                    f"unknown policy {sorted(unknown)[0]!r}",
                    given=f"--policies {options.policies}",
                    do=f"write some of {','.join(METHODS)}",
                )
            )
        methods = [name for name in METHODS if name in asked]
        print(trained(examples_in(options.data)))
        print(report(compare(cases, methods, options.data, options.out), methods))
    except OptimusError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
