"""The coordinator: what process 0 does for all processes.

It lets the advisor decide, judges the first steps under a plan, and sends commands.

Every process has a coordinator, but only the one of process 0 is active: the others ignore calls.
"""

import statistics
import traceback
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax

from optimus_jax.config import ControlConfig
from optimus_jax.control.advisor import MAX_WAIT_STEPS, Advisor
from optimus_jax.control.canary import Verdict, is_clearly_slower, judge
from optimus_jax.control.commands import Command, CommandBroadcast
from optimus_jax.control.pending_switch import SwitchTrial, UpcomingSwitch, excess_s
from optimus_jax.control.policy import CHOSEN, Decision
from optimus_jax.control.signals import Observation
from optimus_jax.plan import Plan
from optimus_jax.run_directory.directory import RunDirectory
from optimus_jax.training.watchers import Display

Mode = Literal["advise", "auto"]
NEWEST_STEPS = 3
"""Number of newest steps that a plan's first steps are compared with, where older ones may have run
in other conditions: the fewest whose median a single outlier does not move."""
STEADY = 1.5
"""Step times count as unchanged within this factor of those when the plan was chosen: compiling in
the background explains such a difference."""


class Coordinator:
    """The coordinator of one run.

    Args:
      mode: `auto` sends commands; `advise` only shows what they would be.
      settings: the controller's settings.
      num_steps: number of steps of the run.
      advisor: makes the decisions.
      commands: broadcasts its commands.
      remarks: returns what is recorded with a decision besides its readings.
      run: where decisions are recorded.
      display: where they are shown.
    """

    def __init__(
        self,
        *,
        mode: Mode,
        settings: ControlConfig,
        num_steps: int,
        advisor: Advisor,
        commands: CommandBroadcast,
        remarks: Callable[[], Mapping[str, Any]],
        run: RunDirectory,
        display: Display,
    ) -> None:
        self.decision: Decision | None = None
        """The switch that is being prepared; None: there is none, or another process decided it."""
        self.verdict: Verdict | None = None
        """The verdict on a trial, until the other processes have received it."""
        self._mode, self._settings, self._num_steps = mode, settings, num_steps
        self._advisor, self._commands, self._remarks, self._run, self._display = (
            advisor,
            commands,
            remarks,
            run,
            display,
        )
        self._decided_among_s: tuple[float, ...] = ()
        """The newest step times when the decision was made."""
        self._probed_of_s: float | None = None
        """When steps changed, for the change that a probe was last requested for."""
        self._is_broken = False

    # Questions to it.

    def think(
        self,
        step: int,
        observation: Observation,
        *,
        trial: SwitchTrial | None,
        upcoming: UpcomingSwitch | None,
        last_times_s: tuple[float, ...],
    ) -> None:
        """Judge the first steps under a new plan, decide, and send `go` for a plan that is ready.

        Args:
          step: the last step done.
          observation: the run's signals after `step`.
          trial: the trial of a new plan; None: no plan is on trial.
          upcoming: the switch that is being prepared; None: there is none.
          last_times_s: times of the newest steps under the plan, in seconds.
        """
        if trial is not None and self.verdict is None:
            self._judge(trial, step)
        if self._is_broken or (self.verdict is not None and not self.verdict.keep):
            return  # a decision now would be about a plan that the run is about to leave
        if self._advisor.wants_probe:
            is_news = self._advisor.changed_s != self._probed_of_s
            self._commands.send(
                Command(
                    kind="probe",
                    anew=is_news,
                    worth_s=self._advisor.probe_worth_s if is_news else 0.0,
                )
            )
            self._probed_of_s = self._advisor.changed_s
        decision = self._decided(observation)
        if decision is not None:
            self._announce(decision)
            if self._mode == "auto":
                self._act_on(decision, last_times_s)
        if upcoming is not None and trial is None:
            self._consider_going(upcoming, step, last_times_s)

    def comparable(self, last_times_s: tuple[float, ...]) -> tuple[float, ...]:
        """The times of the old plan's last steps that the new plan's first steps are compared with.

        Empty: there is nothing to compare with.
        """
        # A plan that the run had to leave is no standard: fewer devices may be slower.
        if self.decision is not None and self.decision.mandatory:
            return ()
        # While the plan was compiled on the cores of CPU devices, nobody checked whether steps
        # stayed alike.
        newest = NEWEST_STEPS if jax.default_backend() == "cpu" else 2 * self._settings.canary_steps
        return last_times_s[-max(1, min(self._advisor.steps_alike, newest)) :]

    @property
    def predicted_s(self) -> float:
        """Predicted step time of the plan decided on; NaN: another process decided."""
        chosen = (
            [each.step_time_s for each in self.decision.alternatives if each.verdict == CHOSEN]
            if self.decision is not None
            else []
        )
        return chosen[0] if chosen else float("nan")

    # Reports to it.

    def switched(self, plan: Plan, costs_s: Mapping[str, float]) -> None:
        """Record that the run is under this plan now. `costs_s`: its delay by phase of the switch,
        in seconds."""
        self.decision = None
        if self._hears:
            self._advisor.switched(plan, costs_s)

    def failed(self, plan: Plan, why: str, *, is_back: bool = False) -> None:
        """Record that the run cannot use this plan. `is_back`: it was entered and taken back."""
        self.decision = None
        if self._hears:
            self._advisor.failed(plan, why, is_back=is_back)

    def judged(self, *, is_kept: bool) -> None:
        """Record that all processes know how the trial ended.

        If the plan was not kept, the decision that was being prepared is dropped.
        """
        self.verdict, self.decision = None, self.decision if is_kept else None

    def entered_phase(self) -> None:
        """Drop the decision and the verdict, since they are about the batches before this phase."""
        self.decision = self.verdict = None
        if self._hears:
            self._advisor.dropped()

    def charge(self, time_s: float) -> None:
        """Charge this much more of the run's time to switches."""
        if self._hears:
            self._advisor.charge(time_s)

    def close(self) -> None:
        """Save what was learnt, after the run has ended."""
        if self._hears:
            self._advisor.save()

    @property
    def _hears(self) -> bool:
        """Whether the advisor is active: in process 0, unless it has failed."""
        return jax.process_index() == 0 and not self._is_broken

    # Decisions.

    def _judge(self, trial: SwitchTrial, step: int) -> None:
        """Decide whether the plan on trial is kept, as soon as its first steps show it."""
        times_s = [record.step_time_s for record in trial.records]
        is_over = len(times_s) > self._settings.canary_steps
        if not is_over and not is_clearly_slower(times_s, trial.before_s):
            return
        verdict = judge(
            times_s,
            losses=[record.loss for record in trial.records],
            before_s=trial.before_s,
            predicted_s=trial.predicted_s,
            steps_left=self._num_steps - step,
            back_s=sum(trial.costs_s.values()),
        )
        if is_over or not verdict.keep:
            self.verdict = verdict
            self._advisor.charge(excess_s(times_s))
            self._commands.send(
                Command(kind="keep" if verdict.keep else "roll_back", why=verdict.why)
            )

    def _decided(self, observation: Observation) -> Decision | None:
        """The advisor's decision. An exception in it disables the controller, but does not end the
        run."""
        try:
            return self._advisor.decide(observation)
        except Exception as error:
            self._is_broken, self.decision = True, None
            why = (
                f"the controller has failed and decides nothing more ({type(error).__name__}:"
                f" {error}); this is a defect of optimus_jax"
            )
            self._run.log_event(
                "decision",
                observation.step,
                action="stay",
                plan=None,
                layout=None,
                why=why,
                traceback=traceback.format_exc(),
            )
            self._display.message(why)
            self._commands.send(Command(kind="withdraw", why=why))
            return None

    def _announce(self, decision: Decision) -> None:
        record = decision.as_json()
        record["inputs"] |= self._remarks()
        self._run.log_event(
            "decision",
            decision.step,
            layout=decision.plan.describe() if decision.plan else None,
            **record,
        )
        self._display.decision(f"{decision.action}: {decision.why}")

    def _act_on(self, decision: Decision, last_times_s: tuple[float, ...]) -> None:
        if decision.plan is not None:
            self.decision, self._decided_among_s = decision, last_times_s[-NEWEST_STEPS:]
            self._commands.send(
                Command(
                    kind="prepare",
                    plan=decision.plan,
                    without=decision.without,
                    at_step=decision.at_step,
                    why=decision.why,
                )
            )
        elif self.decision is not None:
            self.decision = None
            self._commands.send(Command(kind="withdraw", why=decision.why))

    def _consider_going(
        self, upcoming: UpcomingSwitch, step: int, last_times_s: tuple[float, ...]
    ) -> None:
        """Decide whether a switch that is ready is still wanted.

        On CPU devices the advisor has not seen steps during the compilation. If they have changed,
        the reason has to be known first.
        """
        decision, plan = self.decision, upcoming.command.plan
        if (
            decision is None
            or decision.plan != plan
            or upcoming.may_go
            or not upcoming.preparation.is_done
        ):
            return
        self._commands.cancel("switch")  # steps may have changed since it was given
        if decision.mandatory or self._is_steady(last_times_s[-NEWEST_STEPS:]):
            self._commands.send(Command(kind="switch", plan=plan))
        elif upcoming.looks_since is None:
            self._commands.send(Command(kind="recheck", plan=plan))
        elif self._is_as_it_was(step - upcoming.looks_since):
            self._commands.send(Command(kind="switch", plan=plan))

    def _is_steady(self, newest_s: tuple[float, ...]) -> bool:
        """Whether the last steps took about as long as those before the compilation."""
        if len(newest_s) < NEWEST_STEPS or not self._decided_among_s or self._advisor.is_puzzled:
            return False
        before_s = statistics.median(self._decided_among_s)
        return before_s / STEADY <= min(newest_s) and max(newest_s) <= STEADY * before_s

    def _is_as_it_was(self, looked_steps: int) -> bool:
        unseen_steps = NEWEST_STEPS if jax.default_backend() == "cpu" else 0
        return looked_steps >= MAX_WAIT_STEPS or (
            looked_steps >= unseen_steps and not self._advisor.is_puzzled
        )
