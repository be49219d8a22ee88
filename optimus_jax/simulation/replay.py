"""Turns a recorded run into a scenario with the same relative step times, for any policy.

The log of a real run does not say what disturbed it, only by how much: the time of each step over
the usual time of its plan. In a replay, this factor applies to the same step under every plan. So a
replay shows how a policy handles the noise and the regimes of a real machine, but not whether
another plan would have avoided them.
"""

import math
import statistics
from dataclasses import dataclass
from pathlib import Path

from optimus_jax.config import Config
from optimus_jax.config.in_python import IN_PYTHON
from optimus_jax.control.journal import switches
from optimus_jax.errors import ConfigError, explain
from optimus_jax.plan import Plan
from optimus_jax.run_directory.contents import CONFIG_FILE, METRICS_FILE, PLAN_FILE
from optimus_jax.simulation.scenarios import Scenario
from optimus_jax.system.json_input import parse_json

FEWEST = 10
"""Fewest steps that a recording may have."""
USUAL = 0.25
"""Quantile of a plan's step times that is its usual time. It is low because half a run may have
been disturbed."""


@dataclass(frozen=True, kw_only=True)
class Recording:
    """A recorded run as a scenario, with its config and first plan."""

    scenario: Scenario
    config: Config
    start: Plan
    """Plan of the first step."""


def recorded(run_dir: Path) -> Recording:
    """Read the recording of the run in a directory. An optimizer that was given in Python counts as
    adamw, whose moments are two for each parameter, and a task as that of its model.

    Raises:
      ConfigError: there is no run, it has too few steps, or its first plan is unknown.
    """
    try:
        config = Config.from_json((run_dir / CONFIG_FILE).read_text(encoding="utf-8"))
        if config.optimizer.name == IN_PYTHON:  # how many moments it has is not known here
            config = config.with_values({"optimizer.name": "adamw"})
        if config.task == IN_PYTHON:
            config = config.with_values({"task": None})
        plans = [
            Plan.from_json((run_dir / PLAN_FILE).read_text(encoding="utf-8")),
            *[record.source for record in switches(run_dir)],
        ]
        lines = (run_dir / METRICS_FILE).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            explain(
                "a run cannot be read",
                given=f"{run_dir}: {error}",
                do="name the directory of a run",
            )
        ) from error
    steps = [step for line in lines if (step := _step(line)) is not None]
    by_plan: dict[str, list[float]] = {}
    for digest, time_s in steps:
        by_plan.setdefault(digest, []).append(time_s)
    if len(steps) < FEWEST:
        raise ConfigError(
            explain(
                "a recording has too few steps",
                given=f"{len(steps)} in {run_dir}",
                do=f"record {FEWEST} or more",
            )
        )
    usual_s = {digest: _usual_s(times_s) for digest, times_s in by_plan.items()}
    first = steps[0][0]
    start = next((plan for plan in plans if plan.digest == first), None)
    if start is None:
        raise ConfigError(
            explain(
                "a recording does not say what plan it began with",
                given=(
                    f"{first} in the first line of {run_dir / 'metrics.jsonl'}, in neither"
                    " plan.json nor switches.jsonl"
                ),
                do="name the directory of a run that went from its first step to its end there",
            )
        )
    return Recording(
        config=config,
        start=start,
        scenario=Scenario(
            name=f"replay of {run_dir.name}",
            about=(
                "Each step takes as many times its usual time as it did in that run, whatever the"
                " plan."
            ),
            steps=len(steps),
            start=str(start.axes),
            seq_len=config.seq_len,
            global_batch=config.data.global_batch,
            step_time_s=usual_s[first],
            step_factors=tuple([time_s / usual_s[digest] for digest, time_s in steps]),
        ),
    )


def _usual_s(times_s: list[float]) -> float:
    return (
        times_s[0]
        if len(times_s) == 1
        else statistics.quantiles(times_s, n=round(1 / USUAL), method="inclusive")[0]
    )


def _step(line: str) -> tuple[str, float] | None:
    """Plan digest and step time of a line of metrics.jsonl; None: the line is torn or unusable."""
    try:
        value = parse_json(line, finite=False)
        digest, time_s = str(value["plan"]), float(value["step_time_s"])
    except (ValueError, KeyError, TypeError):
        return None
    return (digest, time_s) if 0 < time_s < math.inf else None
