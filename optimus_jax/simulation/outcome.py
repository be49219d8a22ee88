"""What decides in a simulated run, how that run goes about it, and what became of it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from optimus_jax.control.policy import Decision
from optimus_jax.control.signals import Observation
from optimus_jax.plan import Plan

Kind = Literal["switch", "rollback", "failed", "restart", "withdrawn"]


class Policy(Protocol):
    """Decides what a run does; `control.advisor.Advisor` is one."""

    @property
    def wants_probe(self) -> bool:
        """Whether a round of probes now would help."""
        return False

    @property
    def steps_alike(self) -> int | None:
        """Newest steps that were done in the conditions that hold now; None: all, as far as it
        knows.
        """
        return None

    def decide(self, observation: Observation) -> Decision | None:
        """What to do at this step boundary."""
        ...

    def switched(self, plan: Plan, costs_s: Mapping[str, float]) -> None:
        """The run is now under `plan`."""
        ...

    def failed(self, plan: Plan, why: str, *, is_back: bool = False) -> None:
        """The switch to `plan` did not happen or was taken back."""
        ...

    def dropped(self) -> None:
        """The run has ended before what was decided could be done: it restarts, and asks anew."""

    @property
    def is_puzzled(self) -> bool:
        """Whether steps have changed since the pending switch was decided, and it is not known
        why."""
        return False

    def charge(self, time_s: float) -> None:
        """Switching took so much more of the run's time: first steps, or what came to nothing."""


@dataclass(frozen=True, kw_only=True)
class Habits:
    """How the run of a policy goes about it."""

    every: int | None = 1
    """Steps from one question to the policy to the next, which comes with all readings; None: it is
    asked without any, when devices go or come back."""
    asked_at: tuple[int, ...] = ()
    """With None: steps after which it is asked too, in rising order."""
    probes: bool = True
    """Whether links are probed, which takes time."""
    in_memory: bool = True
    """Whether a switch moves the state; if not, it is a checkpoint and a restart."""
    canary: bool = True
    """Whether a new plan that turns out slower is taken back."""
    foresight: bool = False
    """Whether programs are compiled before they are needed; what that takes from the steps is paid
    all the same."""


@dataclass(frozen=True, kw_only=True)
class Moment:
    """Something that happened to a simulated run."""

    kind: Kind
    """switch: to a plan, because the policy said so. rollback: back from it. failed: it did not
    come to it. restart: after a fault."""
    step: int
    time_s: float
    """When it was over."""
    plan: Plan
    """Under which the run went on; of a failure, the one that it did not come to."""
    delay_s: Mapping[str, float]
    """What it cost, by phase."""
    why: str
    decided_s: float | None = None
    """When it was decided."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of a simulated run."""

    total_s: float
    moments: tuple[Moment, ...]
    probes_s: float
    """Of that, probes."""
    plan: Plan
    """The last one."""

    def count(self, kind: str) -> int:
        """Moments of a kind."""
        return sum(moment.kind == kind for moment in self.moments)

    @property
    def num_switches(self) -> int:
        """Switches that were begun: those that failed or were taken back too, but for restarts
        after faults.
        """
        return self.count("switch") + self.count("failed")

    def as_json(self) -> dict[str, Any]:
        """For `--json`."""
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
                for each in self.moments
            ],
        }
