"""Plans and their true step times, for prediction.py: measured on this machine, or SIMULATED."""

import dataclasses
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import regret
import simulated_control

from optimus_jax.control.deciding.prices import query
from optimus_jax.planning.learning.beliefs import Query
from optimus_jax.simulation.named_scenarios import scenario_named
from optimus_jax.simulation.timeline import NORMAL
from optimus_jax.simulation.world import PlacedPlan, World

NOISE = 0.05
"""Standard deviation of the logarithm of a step's time on these shared cores."""
WORLDS, RANKED = 30, 40
"""Simulated clusters, and plans of a search's ranking."""
SIMULATED_STEPS = 20
"""Steps behind a simulated step time that is learnt."""
MISFITS = (0.02, 0.1)
"""Standard deviations of the simulated plans' own log errors."""
SIMULATED = ("llama-a100", "gpt2-xl-h100")
"""Settings of simulated_control.py."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """Plans and their true step times."""

    name: str
    queries: Sequence[Query]
    log_times: np.ndarray
    """[worlds, plans], logarithms of seconds; NaN: the plan cannot run."""
    noise: float
    """Standard deviation of the logarithm of a single step's time, in what is learnt."""
    count: int
    """Number of steps behind a step time."""
    is_exact: bool
    """Whether `log_times` have no noise, so that it is added to what is learnt."""


def measured_cases(path: Path) -> Iterator[Case]:
    """The plans of regret.py on this machine."""
    here, rows = regret.measured_devices(), regret.rows(path)
    idle = [row for row in rows if row["round"] > 0] or rows
    wall = statistics.median(row["step_time_s"] / row["cpu_s"] for row in idle)
    for name in regret.MODELS:
        pricing, measured = (
            here.pricing(regret.config_of(name)),
            regret.measured_in(path, name, first=True),
        )
        plans = [plan for plan in regret.plans_of(name) if plan.digest in measured]
        yield Case(
            name=f"{name}, measured",
            queries=[query(plan, pricing, "now") for plan in plans],
            log_times=np.log([[wall * measured[plan.digest] for plan in plans]]),
            noise=NOISE,
            count=regret.NUM_STEPS,
            is_exact=False,
        )


def simulated_cases() -> Iterator[Case]:
    """The best plans of a search, on clusters that differ from the cost model as simulated runs
    do.
    """
    for name in SIMULATED:
        stationary = scenario_named("stationary")
        setup = simulated_control.setup_of(stationary, simulated_control.SETTINGS[name])
        pricing = setup.assumed[0]
        plans = sorted(
            simulated_control.searcher().plans(pricing),
            key=lambda plan: pricing.predicted(plan).step_time_s,
        )[:RANKED]
        for own in MISFITS:
            misfit = dataclasses.replace(stationary.misfit, plans=own)
            worlds = [
                World(dataclasses.replace(stationary, misfit=misfit), setup.nominal, seed)
                for seed in range(WORLDS)
            ]
            times_s = np.array(
                [
                    [
                        world.step_time_s(
                            PlacedPlan(plan, tuple(range(plan.num_devices))), NORMAL, 0
                        )
                        for plan in plans
                    ]
                    for world in worlds
                ]
            )
            yield Case(
                name=f"{name}, SIMULATED, plans {own:.0%}",
                queries=[query(plan, pricing, "now") for plan in plans],
                log_times=np.log(np.where(np.isfinite(times_s), times_s, np.nan)),
                noise=misfit.noise,
                count=SIMULATED_STEPS,
                is_exact=True,
            )
