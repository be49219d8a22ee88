"""Compares policies on the same simulated runs: times, shares of the possible gain, and switches.

With one seed, every policy meets the same truth, so differences between policies are more exact
than their times. Intervals are bootstrapped over seeds: the middle 95% of 2000 samples drawn from
them with replacement.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from optimus_jax.config import ControlConfig
from optimus_jax.control.advisor import Advisor
from optimus_jax.control.runtime import Policy
from optimus_jax.simulation.baseline_policies import CostModelOnly, Greedy, Static, Threshold
from optimus_jax.simulation.candidate_plans import PooledSearch, candidate_plans
from optimus_jax.simulation.oracle import STATIC, best_static, run_oracle, run_static
from optimus_jax.simulation.outcome import Outcome, SimulationOptions
from optimus_jax.simulation.setup import DEFAULT, Setup, Truth, first_plans
from optimus_jax.simulation.simulator import Simulation

AUTO, STAY, DEFAULT_STATIC, BEST_STATIC, ORACLE = "auto", "stay", "default", "best static", "oracle"
RARELY = 10
"""Steps between two decisions of a policy that is not asked after every step."""
RESAMPLED = 2000
LEAST_GAIN = 0.01
"""Smallest gain of the oracle over staying, as a share of time, of which shares are reported."""

Make = Callable[[Setup, PooledSearch, ControlConfig], Policy]


def advisor(setup: Setup, searcher: PooledSearch, settings: ControlConfig) -> Advisor:
    """The policy of a real run."""
    return Advisor(
        pricing=setup.assumed[0],
        plan=setup.start,
        num_steps=setup.num_steps,
        settings=settings,
        phases=setup.phases,
        searcher=searcher,
        tried_s=setup.tried_s,
    )


POLICIES: Mapping[str, tuple[Make, SimulationOptions]] = {
    AUTO: (advisor, SimulationOptions()),
    "checkpoint-restart": (advisor, SimulationOptions(in_memory=False)),
    "cost model": (
        lambda setup, searcher, settings: CostModelOnly(setup, searcher, settings),
        SimulationOptions(every=RARELY),
    ),
    "greedy": (
        lambda setup, searcher, _: Greedy(setup, searcher),
        SimulationOptions(every=RARELY, canary=False),
    ),
    "threshold": (
        lambda setup, _, __: Threshold(setup),
        SimulationOptions(every=RARELY, probes=False, canary=False),
    ),
    STAY: (lambda setup, _, __: Static(setup.start, setup.nominal[0].cluster.num_devices), STATIC),
}
"""Policies that see only observations and the assumed pricing, and how their runs are simulated."""
METHODS = (
    AUTO,
    STAY,
    DEFAULT_STATIC,
    BEST_STATIC,
    ORACLE,
    *[name for name in POLICIES if name not in (AUTO, STAY)],
)
"""All methods, in the order of tables."""


def run_policy(name: str, truth: Truth, searcher: PooledSearch) -> Outcome:
    """Simulate a run under one of POLICIES."""
    make, options = POLICIES[name]
    return Simulation(truth, make(truth.setup, searcher, truth.setup.settings), options).run()


def run_all(
    setup: Setup, seed: int, searcher: PooledSearch, methods: Sequence[str] = METHODS
) -> dict[str, Outcome]:
    """One seed's outcomes by method. Raises PlanError if the scenario leaves nothing to run on."""
    truth = Truth(setup, seed)
    found = {name: run_policy(name, truth, searcher) for name in methods if name in POLICIES}
    if DEFAULT_STATIC in methods:
        found[DEFAULT_STATIC] = run_static(truth, first_plans(DEFAULT, setup.assumed[0])[0])
    if BEST_STATIC in methods or ORACLE in methods:
        plans = candidate_plans(truth.setup, truth.timeline, searcher)
        _, static = best_static(truth, plans)
        found[BEST_STATIC] = static
        if ORACLE in methods:
            found[ORACLE] = run_oracle(
                truth,
                plans,
                [static, *[found[name] for name in (STAY, DEFAULT_STATIC) if name in found]],
            )
    return {name: found[name] for name in methods if name in found}


class Ended(Protocol):
    """A finished run, as far as rows need it: an `Outcome` or a `Result`."""

    @property
    def total_s(self) -> float:
        """Time of the run."""
        ...

    @property
    def event_counts(self) -> Mapping[str, int]:
        """Number of events by kind."""
        ...


def num_switches(ended: Ended) -> int:
    """Number of switches that were begun, including failed and rolled back ones. Restarts after
    faults do not count.
    """
    return ended.event_counts.get("switch", 0) + ended.event_counts.get("failed", 0)


@dataclass(frozen=True, kw_only=True)
class Result:
    """The part of an outcome that is stored in a file."""

    total_s: float
    event_counts: Mapping[str, int]
    """Number of events by kind."""

    @classmethod
    def of(cls, outcome: Outcome) -> "Result":
        """The result of a run with this outcome."""
        return cls(total_s=outcome.total_s, event_counts=outcome.event_counts)


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """An estimate over seeds, with its 95% interval."""

    value: float
    low: float
    """Lower end of the 95% interval; `high` is the upper end."""
    high: float

    def as_json(self) -> list[float]:
        """The list of value, low and high."""
        return [self.value, self.low, self.high]


@dataclass(frozen=True, kw_only=True)
class Row:
    """Results of one method over all seeds."""

    method: str
    total_s: Estimate
    """Mean time of a run."""
    saved: Estimate | None
    """Saved share of the static default's time; None: the default was not run."""
    share: Estimate | None
    """Share of the oracle's gain over staying; None: that gain is too small, or was not run."""
    regret: Estimate | None
    """Time over that of the best static plan, minus 1; None: that plan was not run."""
    switches: float
    """Mean number of switches in a run."""
    most_switches: int
    """Largest number of switches in a run."""
    rollbacks: float
    """Mean number of rollbacks in a run."""
    restarts: float
    """Mean number of restarts after faults in a run."""

    def as_json(self) -> dict[str, Any]:
        """The row as `--json` prints it."""

        def listed(value: Estimate | None) -> list[float] | None:
            return value and value.as_json()

        return {
            "method": self.method,
            "total_s": self.total_s.as_json(),
            "saved_of_default": listed(self.saved),
            "share_of_oracle": listed(self.share),
            "regret": listed(self.regret),
            "switches": self.switches,
            "most_switches": self.most_switches,
            "rollbacks": self.rollbacks,
            "restarts": self.restarts,
        }


def rows(runs: Sequence[Mapping[str, Ended]]) -> list[Row]:
    """A row for each method. `runs`: for each seed, the outcomes by method."""
    times_s = {name: np.array([run[name].total_s for run in runs]) for name in runs[0]}
    return [_row(name, times_s, [run[name] for run in runs]) for name in runs[0]]


def _row(name: str, times_s: Mapping[str, np.ndarray], outcomes: Sequence[Ended]) -> Row:
    own_s, default_s, best_s = times_s[name], times_s.get(DEFAULT_STATIC), times_s.get(BEST_STATIC)
    switches = [num_switches(outcome) for outcome in outcomes]
    return Row(
        method=name,
        total_s=estimate(lambda drawn: own_s[drawn].mean(axis=-1), len(own_s)),
        saved=None
        if default_s is None
        else estimate(
            lambda drawn: 1 - own_s[drawn].mean(axis=-1) / default_s[drawn].mean(axis=-1),
            len(own_s),
        ),
        share=_share(name, times_s),
        regret=None
        if best_s is None
        else estimate(lambda drawn: (own_s / best_s)[drawn].mean(axis=-1) - 1, len(own_s)),
        switches=float(np.mean(switches)),
        most_switches=max(switches),
        rollbacks=float(np.mean([outcome.event_counts.get("rollback", 0) for outcome in outcomes])),
        restarts=float(np.mean([outcome.event_counts.get("restart", 0) for outcome in outcomes])),
    )


def _share(name: str, times_s: Mapping[str, np.ndarray]) -> Estimate | None:
    """The sum of all gains over the sum of the oracle's. A mean of ratios would be dominated by
    seeds with little to gain.
    """
    own_s, stay_s, oracle_s = times_s[name], times_s.get(STAY), times_s.get(ORACLE)
    if (
        stay_s is None
        or oracle_s is None
        or (stay_s - oracle_s).mean() < LEAST_GAIN * stay_s.mean()
    ):
        return None
    return estimate(
        lambda drawn: (
            (stay_s - own_s)[drawn].mean(axis=-1)
            / np.maximum(1e-9, (stay_s - oracle_s)[drawn].mean(axis=-1))
        ),
        len(own_s),
    )


def estimate(figure: Callable[[np.ndarray], np.ndarray], count: int) -> Estimate:
    """Estimate a figure with its bootstrap interval over `count` seeds.

    `figure` maps indices of seeds, [samples, seeds], to values, [samples].
    """
    drawn = np.random.default_rng(0).integers(count, size=(RESAMPLED, count))
    low, high = np.quantile(figure(drawn), [0.025, 0.975])
    return Estimate(
        value=float(figure(np.arange(count)[None])[0]), low=float(low), high=float(high)
    )
