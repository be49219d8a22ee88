"""Stages, state and events of the state machine of a switch (control/machine.py): what process 0
knows about the run's plan, besides what it believes about conditions and other plans.

A *question* is what there is to decide. It is open until it is answered, because the search for its
answer may take many steps. Questions are answered one at a time, the most urgent first.
"""

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from optimus_jax.config import ControlConfig
from optimus_jax.control import constants
from optimus_jax.control.canary import Verdict
from optimus_jax.control.deciding.phases import steps_left
from optimus_jax.control.policy import CHOSEN, Decision
from optimus_jax.data.batch import BatchShape
from optimus_jax.plan import Plan


class Stage(StrEnum):
    """What a run does about its plan."""

    IDLE = "idle"
    """No switch is under way."""
    PREPARING = "preparing"
    """The programs of another plan are being compiled while the run goes on."""
    READY = "ready"
    """They are compiled. The switch waits for its boundary, or until it is known that its reasons
    still hold."""
    MOVING = "moving"
    """The state moves to the other plan, or back."""
    CANARY = "canary"
    """The first steps under the new plan: they decide whether it is kept."""
    COOLDOWN = "cooldown"
    """A switch was made or has failed. No other one is made by choice."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """What there is to decide."""

    trigger: str
    """What caused the question, in words."""
    batch: BatchShape | None = None
    """The batch shape that the question is about; None: the present one."""
    mandatory: bool = False
    """The present plan cannot be kept."""
    at_step: int | None = None
    """Step boundary at which the switch would be made; None: as soon as possible."""

    @property
    def is_pressing(self) -> bool:
        """Whether the question is mandatory or tied to a step boundary."""
        return self.mandatory or self.at_step is not None

    @property
    def urgency(self) -> tuple[int, int]:
        """The order of questions: a mandatory one, those about phases, others. Of each, the newest
        replaces an older one.
        """
        if self.at_step is not None:
            return 1, self.at_step
        return (0, 0) if self.mandatory else (2, 0)

    def waits_for(self, pending: "Question") -> bool:
        """Whether this question is not answered while a switch that answers `pending` is prepared.

        A switch for a boundary to come waits for one that is made now, and does not hold one up.
        """
        if self.at_step is None and pending.at_step is not None:
            return False
        is_later = self.at_step is not None and pending.at_step is None
        return is_later or self.urgency > pending.urgency


@dataclass(frozen=True, kw_only=True)
class PendingSwitch:
    """A switch that was decided and is not made yet."""

    decision: Decision
    question: Question | None
    """What it answers."""
    decided_s: float
    """When it was decided, on the run's clock."""
    before_s: tuple[float, ...]
    """Times of the newest steps then."""
    usual_s: float | None = None
    """Median step time then, in seconds; None: unknown."""
    was_compiled: bool = False
    """Whether its plan was compiled already."""
    tax_s: float = 0.0
    """How much longer steps have taken beside the compilation, in seconds."""
    beside_s: tuple[float, ...] = ()
    """Times of the newest steps beside it."""
    checked_since: int | None = None
    """The step after which the programs were ready and its reasons were looked at again."""

    @property
    def predicted_s(self) -> float:
        """Predicted step time of its plan, in seconds; NaN: nobody predicted it."""
        chosen = [each.step_time_s for each in self.decision.alternatives if each.verdict == CHOSEN]
        return chosen[0] if chosen else math.nan

    @property
    def tax(self) -> float | None:
        """Factor on step times by the compilation; None: too few steps have shown it."""
        if self.usual_s is None or len(self.beside_s) < constants.NUM_COMPARED_STEPS:
            return None
        return max(1.0, statistics.median(self.beside_s) / self.usual_s)


@dataclass(frozen=True, kw_only=True)
class Trial:
    """The first steps under a new plan, after which it is kept or taken back."""

    costs_s: Mapping[str, float]
    """How long training paused, by phase, in seconds. The way back takes as long."""
    compile_tax_s: float
    """How much longer steps took beside the compilation, which the way back does not need."""
    before_s: tuple[float, ...]
    """Times of the last steps under the old plan in the same conditions; empty: there is nothing to
    compare with."""
    predicted_s: float
    """Predicted step time, in seconds."""
    times_s: tuple[float, ...] = ()
    waited: tuple[bool, ...] = ()
    """Whether each step waited for its data: its time says nothing about the plan."""
    losses: tuple[float, ...] = ()
    mandatory: bool = False
    """Whether the run could not keep the old plan."""
    verdict: Verdict | None = None
    """The verdict, until all processes have received it."""

    @property
    def own_s(self) -> tuple[float, ...]:
        """Times of the steps that did not wait for data, and of the first one."""
        flagged = zip(self.times_s, self.waited, strict=True)
        own = [time_s for index, (time_s, flag) in enumerate(flagged) if not (index and flag)]
        return tuple(own)

    @property
    def first_steps_s(self) -> float:
        """How much longer the first step took than the median of the others, in seconds."""
        first, *others = self.own_s or (0.0,)
        return max(0.0, first - statistics.median(others)) if others else 0.0

    @property
    def spent_s(self) -> dict[str, float]:
        """All that the switch has cost, by phase. The journal keeps it, so that a resumed run has
        no larger budget than this one.
        """
        return {
            **self.costs_s,
            "compile_tax_s": self.compile_tax_s,
            "first_steps_s": self.first_steps_s,
        }


@dataclass(frozen=True, kw_only=True)
class Failure:
    """The failures of a plan."""

    count: int
    until_step: int
    """The plan is not tried again before this step."""
    why: str


@dataclass(frozen=True, kw_only=True)
class SwitchState:
    """All that the next command depends on, besides what is believed about conditions and plans."""

    stage: Stage = Stage.IDLE
    step: int = 0
    """Steps done."""
    time_s: float = 0.0
    """When the last of them was done, on the run's clock."""
    recent_s: tuple[float, ...] = ()
    """Times of the newest steps under the present plan."""
    pending: PendingSwitch | None = None
    trial: Trial | None = None
    questions: tuple[Question, ...] = ()
    """Open questions, the most urgent first."""
    forced: Question | None = None
    """The mandatory question whose switch is not made and kept yet. It is open again if that
    fails."""
    review_step: float = math.inf
    """Boundary at which the present plan is reviewed without news."""
    review_s: float = math.inf
    """The same by the run's clock."""
    entered_step: int = 0
    """Steps done when the run entered its plan."""
    switched_step: int = 0
    """Steps done at the last switch that was made or failed."""
    cool_steps: int = 0
    """Steps for which no other switch is made by choice."""
    num_switches: int = 0
    """Number of switches made by choice."""
    advised: tuple[Plan | None, frozenset[int], int | None] | None = None
    """Target of the newest advice, if decisions are only announced; None: to stay."""
    advised_until: int = 0
    """Step before which the same advice is not given again."""
    failures: Mapping[str, Failure] = field(default_factory=dict)
    """Failed plans, by digest."""

    @property
    def question(self) -> Question | None:
        """The open question to answer now; None: there is none, or all wait for what is pending."""
        pending = self.pending and self.pending.question
        return next(
            (each for each in self.questions if pending is None or not each.waits_for(pending)),
            None,
        )

    def why_not(self, plan: Plan) -> str:
        """Why the plan must not be tried now; empty: it may be."""
        failed = self.failures.get(plan.digest)
        if failed is None or self.step >= failed.until_step:
            return ""
        return (
            f"failed {failed.count} times ({failed.why}), not again before step {failed.until_step}"
        )


@dataclass(frozen=True, kw_only=True)
class SwitchRules:
    """What does not change during a run."""

    settings: ControlConfig
    num_steps: int
    """Number of steps of the whole run."""
    phase_ends: tuple[int, ...] = ()
    """Boundaries at which the batches change."""
    acts: bool = True
    """Whether decisions are carried out; they are only announced otherwise."""
    shares_cores: bool = False
    """Whether the compiler takes cores from the devices, so that nobody knows meanwhile whether
    conditions stay alike."""
    has_trials: bool = True
    """Whether a new plan is taken back if it is slower."""

    def steps_left(self, step: int) -> int:
        """Steps left after `step` with the batches of the next step."""
        return steps_left(step, (*self.phase_ends, self.num_steps))

    def cool_until(self, state: SwitchState, slowed: float = 1.0) -> int:
        """Step before which no other switch is made by choice.

        Args:
          state: says when the last switch was.
          slowed: step time over that in normal conditions. The cool-down is meant to last as long
            as its number of normal steps, and at least until a trial is over.
        """
        return state.switched_step + max(
            min(self.settings.canary_steps + constants.NUM_SKIPPED_STEPS, state.cool_steps),
            math.ceil(state.cool_steps / max(1.0, slowed)),
        )

    def blocked(self, state: SwitchState, question: Question, slowed: float) -> str:
        """Why no switch is allowed as an answer to this question; empty: one is."""
        if question.mandatory:
            return ""
        most = self.settings.max_switches
        if most is not None and state.num_switches >= most:
            return f"{most} switches are the most that the settings allow"
        until = self.cool_until(state, slowed)
        at_step = state.step if question.at_step is None else question.at_step
        return f"cooling down after a switch, until step {until}" if at_step < until else ""


# Events.


@dataclass(frozen=True, kw_only=True)
class StepsDone:
    """Steps are done; reported at every boundary."""

    step: int
    time_s: float
    times_s: tuple[float, ...]
    """Times of the steps since the last boundary, in seconds."""
    waited: tuple[bool, ...] = ()
    """Whether each of them waited for its data; empty: none did."""
    losses: tuple[float, ...] = ()
    paused_s: float = 0.0
    """How long training has paused meanwhile for a compilation."""

    @property
    def flags(self) -> tuple[bool, ...]:
        """`waited` of every step."""
        return self.waited or (False,) * len(self.times_s)

    @property
    def own_s(self) -> tuple[float, ...]:
        """Times of the steps that did not wait for data."""
        flagged = zip(self.times_s, self.flags, strict=True)
        return tuple([time_s for time_s, flag in flagged if not flag])


@dataclass(frozen=True, kw_only=True)
class News:
    """There is something to decide: conditions, devices, memory, a phase, or what is known."""

    question: Question


@dataclass(frozen=True, kw_only=True)
class BatchChanged:
    """The batches have another shape."""


@dataclass(frozen=True, kw_only=True)
class Decided:
    """The open question is answered."""

    decision: Decision
    review_step: float = math.inf
    """Step at which the answer may be another one."""
    review_s: float = math.inf
    """The same by the run's clock."""
    is_compiled: bool = False
    """Whether the plan decided on is compiled already."""
    steps_alike: int | None = None
    """Number of newest steps in present conditions; None: all, as far as known."""


@dataclass(frozen=True, kw_only=True)
class CompileDone:
    """The pending plan is compiled; reported at every boundary until the state moves."""

    at_once: bool = False
    """Whether no step was done since the decision."""
    is_puzzled: bool = False
    """Whether the newest steps differ from those that the switch was decided on, and nobody knows
    why."""


@dataclass(frozen=True, kw_only=True)
class MoveBegun:
    """The state begins to move."""


@dataclass(frozen=True, kw_only=True)
class MoveDone:
    """The run is under another plan."""

    plan: Plan
    costs_s: Mapping[str, float]
    """How long training paused, by phase, in seconds."""
    steps_alike: int | None = None
    """Number of newest steps in present conditions; None: all, as far as known."""
    begins_phase: bool = False
    """Whether step times before and after cannot be compared: other batches, or a restart."""


@dataclass(frozen=True, kw_only=True)
class SwitchFailed:
    """The plan cannot be used: it could not be prepared or entered, or was taken back."""

    plan: Plan
    why: str
    costs_s: float = 0.0
    """Seconds that it took."""


@dataclass(frozen=True, kw_only=True)
class TrialOver:
    """All processes know that the plan on trial is kept."""

    costs_s: float = 0.0
    """Seconds that a try to go back has taken."""


@dataclass(frozen=True, kw_only=True)
class Interrupted:
    """What was being prepared is of no use any more: a phase has begun, or the run restarts."""

    reopens: bool = True
    """Whether a mandatory question is open again."""


Event = (
    StepsDone
    | News
    | BatchChanged
    | Decided
    | CompileDone
    | MoveBegun
    | MoveDone
    | SwitchFailed
    | TrialOver
    | Interrupted
)
