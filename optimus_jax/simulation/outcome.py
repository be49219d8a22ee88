"""Options and outcome of a simulated run."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from optimus_jax.plan import Plan

OutcomeKind = Literal["switch", "rollback", "failed", "restart", "withdrawn"]


@dataclass(frozen=True, kw_only=True)
class SimulationOptions:
    """When a simulated run asks its policy, and what a probe and a switch do."""

    every: int | None = 1
    """Steps between two questions to the policy, which come with all readings; None: it is asked
    without readings, when devices are lost or come back."""
    asked_at: tuple[int, ...] = ()
    """If `every` is None: steps after which it is asked too, in rising order."""
    probes: bool = True
    """Whether links are probed, which takes time."""
    in_memory: bool = True
    """Whether a switch moves the state in memory. If not, it is a checkpoint and a restart."""
    canary: bool = True
    """Whether a switch to a plan that turns out slower is rolled back."""
    compiles_ahead: bool = False
    """Whether programs are compiled before they are needed. The time that compiling costs the steps
    is still paid."""


@dataclass(frozen=True, kw_only=True)
class RunEvent:
    """Something that happened to a simulated run."""

    kind: OutcomeKind
    """switch: to a plan, by the policy's decision. rollback: of a switch. failed: a switch failed.
    restart: after a fault. withdrawn: the policy withdrew a switch before it was made."""
    step: int
    time_s: float
    """When it was over, on the run's clock."""
    plan: Plan
    """The plan under which the run continued; for "failed" and "withdrawn", the plan that was not
    reached."""
    delay_s: Mapping[str, float]
    """Seconds that it cost, by phase of the switch."""
    why: str
    decided_s: float | None = None
    """When it was decided; None: nothing was decided."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The outcome of a simulated run."""

    total_s: float
    run_events: tuple[RunEvent, ...]
    probes_s: float
    """Seconds of `total_s` that probes took."""
    plan: Plan
    """The last plan."""

    @property
    def event_counts(self) -> Counter[str]:
        """Number of events by kind."""
        return Counter(run_event.kind for run_event in self.run_events)

    def as_json(self) -> dict[str, Any]:
        """The outcome as `--json` prints it."""
        return {
            "total_s": self.total_s,
            "probes_s": self.probes_s,
            "plan": self.plan.digest,
            "moments": [
                {
                    "kind": each.kind,
                    "step": each.step,
                    "time_s": each.time_s,
                    "decided_s": each.decided_s,
                    "plan": each.plan.describe(),
                    "delay_s": dict(each.delay_s),
                    "why": each.why,
                }
                for each in self.run_events
            ],
        }
