"""Process 0's part of the controller: it feeds the state machine with events, asks the policy, and
sends commands to all processes.

Real and simulated runs share it. What carries out its commands reports back what has happened:
control/controller.py in a real run, simulation/simulator.py in a simulated one.
"""

import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol, TypeVar

from optimus_jax.control import constants
from optimus_jax.control.commands import Command
from optimus_jax.control.data_waits import DataWaits, waited
from optimus_jax.control.machine import reduce
from optimus_jax.control.policy import Decision
from optimus_jax.control.signals import Observation
from optimus_jax.control.switch_state import (
    CompileDone,
    Decided,
    Event,
    Interrupted,
    MoveBegun,
    MoveDone,
    News,
    PendingSwitch,
    Question,
    Stage,
    StepsDone,
    SwitchFailed,
    SwitchRules,
    SwitchState,
    TrialOver,
)
from optimus_jax.control.transitions import Announce, Commands
from optimus_jax.plan import Plan

T = TypeVar("T")


class Policy(Protocol):
    """What decides. `control.advisor.Advisor` does in real runs: it notices what is new and answers
    questions. Others follow a script or a simple rule and only have `decide`.
    """

    wants_probe: bool = False
    """Whether a round of probes now would help."""
    probe_worth_s: float = 0.0
    """Seconds that such a round may take beyond the budget."""
    changed_s: float | None = None
    """When step times last changed for a reason that was unknown then, on the run's clock."""
    steps_alike: int | None = None
    """Number of newest steps that were in present conditions; None: all, as far as known."""
    slowed: float = 1.0
    """Present step time over that in normal conditions."""

    def decide(self, observation: Observation) -> Decision | None:
        """The decision at this boundary; None: nothing new."""

    def notices(self, observation: Observation, state: SwitchState) -> Sequence[Event]:
        """Record an observation; returns what is new. Called at every boundary."""
        decision = self.decide(observation)
        return () if decision is None else (Decided(decision=decision),)

    def answer(
        self,
        question: Question,
        observation: Observation,
        state: SwitchState,
        *,
        blocked: Callable[[Question], str],
    ) -> Decided | None:
        """Answer the open question; None: not yet, it stays open.

        `blocked`: says why no switch is allowed as an answer to a question; empty: one is.
        """

    def is_puzzled(self, since_s: float) -> bool:
        """Whether step times have changed since then and nobody knows why."""
        return False

    def switched(
        self, plan: Plan, costs_s: Mapping[str, float], made: PendingSwitch | None = None
    ) -> None:
        """Record that the run is under `plan` now.

        Args:
          plan: the plan.
          costs_s: delay of the run by phase of the switch, in seconds, without its first steps.
          made: the decision behind it; None: nobody decided it.
        """

    def failed(self, plan: Plan, why: str, *, trial_s: Sequence[float] | None = None) -> None:
        """Record that the run cannot use `plan`.

        Args:
          plan: the plan.
          why: what went wrong.
          trial_s: times of the steps under it, in seconds, if it was taken back; None: the run was
            never under it.
        """

    def charge(self, time_s: float) -> None:
        """Record that switching took this time beyond the costs of switches."""

    def save(self) -> None:
        """Save what was learnt, after the run has ended."""


class Runtime:
    """The runtime of one run, in process 0.

    Args:
      policy: decides.
      rules: the settings.
      send: sends a command to all processes.
      announce: records and shows a decision.
      fail: records and shows that the controller has failed: why, and the traceback.
      state: the state to begin with.
    """

    def __init__(
        self,
        policy: Policy,
        rules: SwitchRules,
        *,
        send: Callable[[Command], object],
        announce: Callable[[Decision], object],
        fail: Callable[[str, str], object] | None = None,
        state: SwitchState | None = None,
    ) -> None:
        self.state = state or SwitchState()
        self._policy, self._rules, self._send, self._announce, self._fail = (
            policy,
            rules,
            send,
            announce,
            fail,
        )
        self._probed_of_s: float | None = None
        """When steps changed, for the change that a probe was last requested for."""
        self._data_waits, self._was_late = DataWaits(), False
        self._is_broken = False

    # Reports to it.

    def boundary(
        self,
        observation: Observation,
        *,
        times_s: Sequence[float],
        data_waits_s: Sequence[float] = (),
        loads_more: bool = False,
        losses: Sequence[float] = (),
        paused_s: float = 0.0,
        is_compiled: Callable[[], bool],
    ) -> None:
        """Decide what to do at a step boundary.

        Args:
          observation: the run's signals.
          times_s: times of the steps since the last boundary, in seconds.
          data_waits_s: for how long of each devices may have waited for a batch; empty: unknown.
          loads_more: whether the plan on trial is to blame for waits, since processes load more
            rows than under the plan before.
          losses: their losses.
          paused_s: how long training has paused meanwhile for a compilation.
          is_compiled: whether this process has compiled the pending plan, or failed to.
        """
        self.steps_done(
            observation.step,
            observation.time_s,
            times_s,
            losses,
            paused_s,
            data_waits_s,
            loads_more=loads_more,
        )
        trial = self.state.trial
        if trial and trial.verdict and not trial.verdict.keep:
            return  # a decision now would be about a plan that the run is about to leave
        self._guarded(lambda: self._decide(observation))
        if not self._is_broken and is_compiled():
            self.compiled()

    def steps_done(
        self,
        step: int,
        time_s: float,
        times_s: Sequence[float],
        losses: Sequence[float] = (),
        paused_s: float = 0.0,
        data_waits_s: Sequence[float] = (),
        *,
        loads_more: bool = False,
    ) -> None:
        """Steps are done, without a question to the policy; arguments as for `boundary`."""
        flags = waited(times_s, data_waits_s)
        if self.state.stage is not Stage.PREPARING:  # the compiler may have slowed the loader
            self._data_waits.add(flags)
        self._happened(
            StepsDone(
                step=step,
                time_s=time_s,
                times_s=tuple(times_s),
                waited=() if loads_more else flags,
                losses=tuple(losses),
                paused_s=paused_s,
            )
        )

    def compiled(self, *, at_once: bool = False) -> None:
        """The pending plan is compiled. `at_once`: no step was done since the decision."""
        pending, is_puzzled = self.state.pending, self.state.question is not None
        if pending is not None and not is_puzzled:
            since_s = pending.decided_s
            is_puzzled = bool(self._guarded(lambda: self._policy.is_puzzled(since_s)))
        self._happened(CompileDone(at_once=at_once, is_puzzled=is_puzzled))

    def move_begun(self) -> None:
        """The state begins to move."""
        self._happened(MoveBegun())

    def moved(
        self, plan: Plan, costs_s: Mapping[str, float], *, begins_phase: bool = False
    ) -> None:
        """The run is under `plan` now.

        Args:
          plan: the plan.
          costs_s: how long training paused, by phase, in seconds.
          begins_phase: whether step times before and after cannot be compared.
        """
        made, alike = self.state.pending, self._policy.steps_alike
        made = made if made is not None and made.decision.plan == plan else None
        tax_s = {} if made is None else {"compile_tax_s": max(0.0, made.tax_s)}
        self._guarded(lambda: self._policy.switched(plan, {**costs_s, **tax_s}, made))
        self._happened(
            MoveDone(
                plan=plan,
                costs_s=costs_s,
                steps_alike=alike,
                begins_phase=begins_phase,
            )
        )

    def failed(self, plan: Plan, why: str, *, costs_s: float = 0.0, is_back: bool = False) -> None:
        """The run cannot use `plan`.

        Args:
          plan: the plan.
          why: what went wrong.
          costs_s: seconds that it took.
          is_back: the run was under it, and is back under the plan before.
        """
        trial = self.state.trial  # without a standard, its steps ran beside a compilation
        known_s = trial.own_s if trial is not None and trial.before_s else ()
        trial_s = known_s if is_back else None
        self._guarded(lambda: self._policy.failed(plan, why, trial_s=trial_s))
        self._happened(SwitchFailed(plan=plan, why=why, costs_s=costs_s))

    def trial_over(self, costs_s: float = 0.0) -> None:
        """All processes keep the plan that was on trial.

        `costs_s`: seconds that it took to try to go back.
        """
        self._happened(TrialOver(costs_s=costs_s))

    def interrupted(self, *, reopens: bool = True) -> None:
        """What was pending or on trial is of no use any more.

        `reopens`: whether a mandatory question is asked again.
        """
        self._happened(Interrupted(reopens=reopens))

    def close(self) -> None:
        """Save what was learnt, after the run has ended."""
        self._guarded(self._policy.save)

    def _guarded(self, call: Callable[[], T]) -> T | None:
        """Call the policy. A defect in it ends the controller and not the run."""
        if self._is_broken:
            return None
        try:
            return call()
        except Exception as error:
            if self._fail is None:
                raise
            self._is_broken = True
            why = (
                f"the controller has failed and decides nothing more ({type(error).__name__}:"
                f" {error}); this is a defect of optimus_jax"
            )
            self._fail(why, traceback.format_exc())
            self._send(Command(kind="withdraw", why=why))
            return None

    # Decisions.

    def _decide(self, observation: Observation) -> None:
        policy = self._policy
        if policy.wants_probe:
            is_news = policy.changed_s != self._probed_of_s
            self._probed_of_s = policy.changed_s
            worth_s = policy.probe_worth_s if is_news else 0.0
            self._send(Command(kind="probe", anew=is_news, worth_s=worth_s))
        observation = self._without_tax(_without_waits(observation))
        for event in policy.notices(observation, self.state):
            self._happened(event)
        if self._data_waits.is_late != self._was_late:
            self._was_late = self._data_waits.is_late
            self._pace_changed(observation.step)
        question, state, slowed = self.state.question, self.state, policy.slowed
        if question is None:
            return
        if self._was_late and _can_wait(question):
            return  # it stays open until data come in time
        if self._rules.shares_cores and state.stage is Stage.CANARY and not question.mandatory:
            return  # compiling beside the first steps of a plan would make it look slow
        answered = policy.answer(
            question,
            observation,
            state,
            blocked=lambda asked: self._rules.blocked(state, asked, slowed),
        )
        if answered is None:
            return
        if self._was_late and answered.decision.plan is not None and _can_wait(answered.decision):
            return  # the run has to leave its plan no more
        answers = replace(question, mandatory=answered.decision.mandatory)
        cooled_step = self._rules.cool_until(state, slowed)
        if self._rules.blocked(state, answers, slowed) and cooled_step > state.step:
            answered = replace(answered, review_step=min(answered.review_step, cooled_step))
        self._happened(answered)

    def _pace_changed(self, step: int) -> None:
        """Say that the loader sets the pace, or look again."""
        if self._was_late:
            why = "steps wait for data, so under another plan they would take as long"
            self._announce(Decision(step=step, action="stay", plan=None, why=why))
        else:
            self._happened(News(question=Question(trigger="data come in time again")))

    def _without_tax(self, observation: Observation) -> Observation:
        """The observation with step times as they would be without the run's own compilation."""
        pending = self.state.pending
        if self.state.stage is not Stage.PREPARING or pending is None:
            return observation
        tax = pending.tax
        if tax is not None and tax > constants.MAX_COMPILE_SLOWDOWN:
            return observation
        times_s = () if tax is None else tuple(each / tax for each in observation.step_times_s)
        return replace(observation, step_times_s=times_s)

    def _happened(self, event: Event) -> None:
        self.state, commands = reduce(self.state, event, self._rules)
        self._do(commands)

    def _do(self, commands: Commands) -> None:
        for command in commands:
            if isinstance(command, Command):
                self._send(command)
            elif isinstance(command, Announce):
                self._announce(command.decision)
            else:
                self._guarded(partial(self._policy.charge, command.time_s))


def _can_wait(asked: Question | Decision) -> bool:
    """Whether a question, or a decision, is not about what the run has to do, or about a phase."""
    return not asked.mandatory and asked.at_step is None


def _without_waits(observation: Observation) -> Observation:
    """The observation without steps that waited for their data."""
    times_s = observation.step_times_s
    flags = waited(times_s, observation.data_waits_s)
    own_s = [time_s for time_s, flag in zip(times_s, flags, strict=True) if not flag]
    return replace(observation, step_times_s=tuple(own_s), data_waits_s=())
