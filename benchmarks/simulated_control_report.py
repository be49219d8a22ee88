"""The report of benchmarks/simulated_control.py: time saved over staying, and missed targets.

A *row* is a scenario on a setting, over all seeds; drawn scenarios of a setting are one row. Every
policy meets the same truth in a seed, so its saving is that of pairs: 1 - its time / the time of
staying, for each seed. A row's *share* is the sum of these savings over the sum of the oracle's.
Intervals are 95%, bootstrapped over seeds.
"""

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from optimus_jax.simulation.comparison import (
    AUTO,
    BEST_STATIC,
    ORACLE,
    STAY,
    Estimate,
    Result,
    estimate,
    num_switches,
)
from optimus_jax.simulation.random_scenarios import RANDOM

QUIET = ("stationary", "short")
"""Scenarios in which no switch may be made."""
ATTAINABLE = 0.02
"""Mean saving of the oracle from which a row has a share."""
MEAN_SHARE, LEAST_SHARE = 0.75, 0.5
"""Targets of the share, on average and in every row."""
MOST_LOST = 0.02
"""Target of the largest loss against staying in any seed."""
LISTED = 5
"""Number of drawn scenarios with the largest losses that are listed."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A scenario on a setting."""

    setting: str
    scenario: str
    misfit: float | None = None
    """Its `misfit.plans`; None: as it was drawn."""

    def __str__(self) -> str:
        misfit = "" if self.misfit is None else f", {self.misfit:.0%}"
        return f"{self.setting}, {self.scenario}{misfit}"


Runs = dict[Job, dict[int, dict[str, Result]]]
"""Results of each job by seed and policy."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """All runs of a scenario on a setting."""

    job: Job
    runs: Mapping[str, Mapping[str, Result]]
    """Results by seed (of drawn scenarios: by name) and policy."""

    @property
    def methods(self) -> list[str]:
        """The policies, in order."""
        return list(next(iter(self.runs.values())))

    def savings(self, method: str) -> np.ndarray:
        """[runs]: share of the time of staying that the policy saves in each run."""
        return np.array([1 - run[method].total_s / run[STAY].total_s for run in self.runs.values()])

    def saved(self, method: str) -> Estimate:
        """Mean saving of the policy over staying."""
        savings = self.savings(method)
        return estimate(lambda drawn: savings[drawn].mean(axis=-1), len(savings))

    @property
    def attainable(self) -> float | None:
        """Mean saving of the oracle; None: it was not run."""
        return float(self.savings(ORACLE).mean()) if ORACLE in self.methods else None

    def share(self, method: str = AUTO) -> float | None:
        """Share of the oracle's saving; None: the oracle saves too little or was not run, or no
        switch may be made.
        """
        if self.attainable is None or self.attainable < ATTAINABLE or self.job.scenario in QUIET:
            return None
        return float(self.savings(method).mean()) / self.attainable

    @property
    def switches(self) -> list[int]:
        """Number of the controller's switches in each run."""
        return [num_switches(run[AUTO]) for run in self.runs.values()]

    @property
    def has_low_share(self) -> bool:
        """Whether the controller saves too little of what can be saved."""
        share = self.share()
        return share is not None and share < LEAST_SHARE

    @property
    def has_loss(self) -> bool:
        """Whether the worst run loses too much against staying."""
        return bool(self.savings(AUTO).min() < -MOST_LOST)

    @property
    def switches_in_vain(self) -> bool:
        """Whether there is a switch where there should be none."""
        return self.job.scenario in QUIET and max(self.switches) > 0

    @property
    def worst_run(self) -> str:
        """The worst run, its saving, and that of the oracle, which may do no better."""
        place = int(self.savings(AUTO).argmin())
        name, saved = list(self.runs)[place], self.savings(AUTO)[place]
        oracle = "" if self.attainable is None else f", oracle {self.savings(ORACLE)[place]:.1%}"
        return f"{saved:.1%} ({name}{oracle})"

    @property
    def missed(self) -> list[str]:
        """The targets that the row misses, each in a word or two."""
        return [
            *(["share"] if self.has_low_share else []),
            *(["worst run"] if self.has_loss else []),
            *(["no switch"] if self.switches_in_vain else []),
        ]


def rows_of(results: Runs) -> list[Row]:
    """A row for each job, and one for all drawn scenarios of each setting."""
    named: dict[Job, dict[str, Mapping[str, Result]]] = {}
    for job, runs in results.items():
        if job.misfit is not None:
            named[job] = {f"seed {seed}": run for seed, run in runs.items()}
            continue
        drawn = named.setdefault(Job(setting=job.setting, scenario=RANDOM.rstrip(":")), {})
        for seed, run in runs.items():
            drawn[job.scenario if seed == 0 else f"{job.scenario}, seed {seed}"] = run
    return [Row(job=job, runs=runs) for job, runs in named.items()]


def totals(rows: Sequence[Row]) -> list[str]:
    """One sentence for each target: the figure, and which rows miss it."""
    shares = [share for row in rows if (share := row.share()) is not None]
    saved = {
        name: float(np.mean([row.savings(name).mean() for row in rows]))
        for name in rows[0].methods
        if name != STAY
    }
    rivals = [name for name in saved if name not in (AUTO, BEST_STATIC, ORACLE)]
    better = [name for name in rivals if saved[name] >= saved[AUTO]]
    by_policy = ", ".join(f"{name} {share:.2%}" for name, share in saved.items())
    low = _listed([f"{row.job} ({row.share():.0%})" for row in rows if row.has_low_share])
    lossy = _listed([f"{row.job}: {row.worst_run}" for row in rows if row.has_loss])
    in_vain = _listed([f"{row.job}" for row in rows if row.switches_in_vain])
    found = [
        f"Rows with a run more than {MOST_LOST:.0%} slower than staying: {lossy}.",
        f"Rows with a switch where there should be none: {in_vain}.",
        f"Mean saving over staying, all rows: {by_policy}.",
    ]
    if shares:
        found = [
            f"Mean share of the oracle's saving, in rows where that is {ATTAINABLE:.0%} or more:"
            f" {np.mean(shares):.0%} of {len(shares)} rows (target {MEAN_SHARE:.0%}).",
            f"Rows with a share below {LEAST_SHARE:.0%}: {low}.",
            *found,
        ]
    return [*found, *([f"Rivals that save as much: {_listed(better)}."] if rivals else [])]


def _listed(items: Sequence[str]) -> str:
    return f"{len(items)}: {'; '.join(items)}" if items else "none"


def markdown(rows: Sequence[Row], command: str) -> str:
    """The report: totals, a table of the controller, and one of all policies."""
    if not rows:
        return "No results.\n"
    methods = [name for name in rows[0].methods if name != STAY]
    text = [
        f"# The controller on simulated clusters, {datetime.date.today()}",
        "",
        f"SIMULATED, not measured. `{command}`: means over seeds [95% intervals].",
        "",
        *[f"* {sentence}" for sentence in totals(rows)],
        "",
        (
            "| setting | scenario | misfit | runs | saved over staying | worst run |"
            " switches (most) | oracle saves | share | misses |"
        ),
        "|---" * 10 + "|",
    ]
    for row in rows:
        share, attainable = row.share(), row.attainable
        text.append(
            f"| {row.job.setting} | {row.job.scenario} | {_misfit(row.job)} | {len(row.runs)} |"
            f" {_interval(row.saved(AUTO))} | {row.worst_run} |"
            f" {np.mean(row.switches):.1f} ({max(row.switches)}) |"
            f" {'' if attainable is None else f'{attainable:.1%}'} |"
            f" {'' if share is None else f'{share:.0%}'} | {'; '.join(row.missed)} |"
        )
    if set(methods) - {AUTO, ORACLE}:
        text += [
            "",
            "Saved over staying, by policy:",
            "",
            f"| setting | scenario | misfit | {' | '.join(methods)} |",
            "|---" * (3 + len(methods)) + "|",
            *[
                f"| {row.job.setting} | {row.job.scenario} | {_misfit(row.job)} | "
                + " | ".join(f"{row.savings(name).mean():.1%}" for name in methods)
                + " |"
                for row in rows
            ],
        ]
    for row in rows:
        if row.job.misfit is None:
            text += ["", f"{row.job.setting}, drawn scenarios that lose most: {_worst(row)}."]
    return "\n".join(text) + "\n"


def _worst(row: Row) -> str:
    savings = dict(zip(row.runs, row.savings(AUTO), strict=True))
    worst = sorted(savings, key=lambda name: savings[name])[:LISTED]
    return ", ".join(f"{name} ({savings[name]:.1%})" for name in worst)


def _misfit(job: Job) -> str:
    return "drawn" if job.misfit is None else f"{job.misfit:.0%}"


def _interval(value: Estimate) -> str:
    return f"{value.value:.1%} [{value.low:.1%}, {value.high:.1%}]"


def as_json(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The rows' figures. Savings are shares of the time of staying, as [mean, low, high]."""
    return [
        {
            "setting": row.job.setting,
            "scenario": row.job.scenario,
            "misfit": row.job.misfit,
            "simulated": True,
            "runs": len(row.runs),
            "saved": {name: row.saved(name).as_json() for name in row.methods},
            "worst": float(row.savings(AUTO).min()),
            "switches": float(np.mean(row.switches)),
            "most_switches": max(row.switches),
            "share": row.share(),
            "missed": row.missed,
        }
        for row in rows
    ]
