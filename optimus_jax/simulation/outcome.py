"""The interface of policies, the options of a simulated run, and the outcome of a run."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from optimus_jax.control.policy import Decision
from optimus_jax.control.signals import Observation
from optimus_jax.plan import Plan

OutcomeKind = Literal["switch", "rollback", "failed", "restart", "withdrawn"]


class Policy(Protocol):
    """Decides what a run does; `control.advisor.Advisor` is one."""

    @property
    def wants_probe(self) -> bool:
        """Whether a round of probes now would help."""
        return False

    @property
    def steps_alike(self) -> int | None:
        """Number of newest steps that were in present conditions; None: all, as far as known."""
        return None

    def decide(self, observation: Observation) -> Decision | None:
        """Decide what to do at this step boundary; None: nothing new."""
        ...

    def switched(self, plan: Plan, costs_s: Mapping[str, float]) -> None:
        """The run is now under `plan`."""
        ...

    def failed(self, plan: Plan, why: str, *, is_back: bool = False) -> None:
        """The switch to `plan` failed, or was rolled back (`is_back`)."""
        ...

    def dropped(self) -> None:
        """The run ended before the decision was carried out. It restarts, and asks again."""

    @property
    def is_puzzled(self) -> bool:
        """Whether step times have changed since the pending switch was decided, for an unknown
        reason."""
        return False

    def charge(self, time_s: float) -> None:
        """Add to the time that switching took: slow first steps, or a failed switch."""


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
