"""State of a switch in progress: a plan being prepared, or a new plan in its trial steps. The same
in every process.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from optimus_jax.control.commands import Command
from optimus_jax.control.preparation import Preparation
from optimus_jax.plan import Plan
from optimus_jax.run_directory.step_record import StepRecord


@dataclass(kw_only=True)
class UpcomingSwitch:
    """A plan that is being prepared for a switch."""

    command: Command
    preparation: Preparation
    looks_since: int | None = None
    """The step after which it was ready and the first process began to look whether the reasons for
    it still hold."""
    may_go: bool = False
    """Whether it has found that they do."""
    usual_s: float | None = None
    """Median time of a step before it was being compiled; None: unknown."""
    tax_s: float = 0.0
    """By how much steps beside the compilation have been longer, in all."""


@dataclass(frozen=True, kw_only=True)
class SwitchTrial:
    """The trial of a new plan over its first steps, after which it is kept or rolled back."""

    source: Plan
    plan: Plan
    costs_s: dict[str, float]
    """Of the switch: how long the run stood still."""
    tax_s: float
    """What preparing it took from steps."""
    before_s: tuple[float, ...]
    """Times of the last steps under the plan from before; empty: it is not to be compared with."""
    predicted_s: float
    """Predicted time of a step."""
    records: list[StepRecord] = field(default_factory=list)
    """Of its steps."""

    @property
    def spent_s(self) -> dict[str, float]:
        """All that the switch has cost, for the journal: a resumed run has no more to spend than
        this one.
        """
        return self.costs_s | {
            "compile_tax_s": self.tax_s,
            "first_steps_s": excess_s([record.step_time_s for record in self.records]),
        }


def excess_s(step_times_s: Sequence[float]) -> float:
    """By how much the first of these steps was longer than the others."""
    return (
        max(0.0, step_times_s[0] - statistics.median(step_times_s[1:]))
        if len(step_times_s) > 1
        else 0.0
    )
