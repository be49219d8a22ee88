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
    """The step after which the plan was ready, and process 0 began to check whether the reasons for
    the switch still hold."""
    may_go: bool = False
    """Whether process 0 has found that they still hold."""
    usual_s: float | None = None
    """Median step time before the compilation began, in seconds; None: unknown."""
    tax_s: float = 0.0
    """Total delay of the steps during the compilation, in seconds."""


@dataclass(frozen=True, kw_only=True)
class SwitchTrial:
    """The trial of a new plan over its first steps, after which it is kept or rolled back."""

    source: Plan
    plan: Plan
    costs_s: dict[str, float]
    """How long training paused for the switch, by phase, in seconds."""
    tax_s: float
    """Delay of earlier steps by preparing the switch, in seconds."""
    before_s: tuple[float, ...]
    """Times of the last steps under the old plan; empty: there is nothing to compare with."""
    predicted_s: float
    """Predicted step time of the new plan, in seconds."""
    records: list[StepRecord] = field(default_factory=list)
    """Records of the steps under the new plan so far."""

    @property
    def spent_s(self) -> dict[str, float]:
        """All that the switch has cost, by phase. The journal keeps it, so that a resumed run has
        no larger budget than this one.
        """
        return self.costs_s | {
            "compile_tax_s": self.tax_s,
            "first_steps_s": excess_s([record.step_time_s for record in self.records]),
        }


def excess_s(step_times_s: Sequence[float]) -> float:
    """How much longer the first of these steps took than the median of the others, in seconds."""
    return (
        max(0.0, step_times_s[0] - statistics.median(step_times_s[1:]))
        if len(step_times_s) > 1
        else 0.0
    )
