"""The coordinator: what process 0 does for all processes.

It has the advisor decide, judges the first steps under a plan, and sends commands.

Every process has one; in the others it has nothing to say, and what it is told goes unheard.
"""

import statistics
import traceback
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax

from optimus_jax.config import ControlConfig
from optimus_jax.control.advisor import PUZZLED_STEPS, Advisor
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
"""With which a plan's first steps are compared where others may be of other conditions: as few as
have a median that one outlier does not move."""
STEADY = 1.5
"""Steps that take no more than so many times what they took when a plan was chosen, nor less by as
much, are taken for the same: compiling beside them explains that."""


class Coordinator:
    """Of one run.

    Args:
      mode: `auto` sends commands; `advise` only shows what they would be.
      settings: of the controller.
      num_steps: of the run.
      advisor: decides.
      commands: broadcasts its commands.
      remarks: what is written down with decisions beside readings.
      run: where decisions are written down.
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
        """The switch that is being prepared; None: none is, or another process decided it."""
        self.verdict: Verdict | None = None
        """Of a trial, while other processes have not heard it."""
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
        """When those steps changed for whose sake a probe was asked for last."""
        self._is_broken = False

    # What it is asked.

    def think(
        self,
        step: int,
        observation: Observation,
        *,
        trial: SwitchTrial | None,
        upcoming: UpcomingSwitch | None,
        last_times_s: tuple[float, ...],
    ) -> None:
        """Judge the first steps under a new plan, decide, and say whether a plan that is ready may
        be entered.

        Args:
          step: the last one done.
          observation: of the run until then.
          last_times_s: of the newest steps under the plan.
        """
        if trial is not None and self.verdict is None:
            self._judge(trial, step)
        if self._is_broken or (self.verdict is not None and not self.verdict.keep):
            return  # what is decided now would be of a plan that the run is about to leave
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
        """Of the last steps under the plan that is being left, those that a new plan's first ones
        are compared with; empty: none is.
        """
        # What the run had to leave is no measure: fewer devices may be slower.
        if self.decision is not None and self.decision.mandatory:
            return ()
        # While the plan was prepared on cores that are the devices, nobody looked whether steps
        # were still alike.
        newest = NEWEST_STEPS if jax.default_backend() == "cpu" else 2 * self._settings.canary_steps
        return last_times_s[-max(1, min(self._advisor.steps_alike, newest)) :]

    @property
    def predicted_s(self) -> float:
        """Predicted step time of the plan decided on; NaN where another process decided."""
        chosen = (
            [each.step_time_s for each in self.decision.alternatives if each.verdict == CHOSEN]
            if self.decision is not None
            else []
        )
        return chosen[0] if chosen else float("nan")

    # What it is told.

    def switched(self, plan: Plan, costs_s: Mapping[str, float]) -> None:
        """The run is under this plan now, after it stood still for so long, by phase of the
        switch."""
        self.decision = None
        if self._hears:
            self._advisor.switched(plan, costs_s)

    def failed(self, plan: Plan, why: str, *, is_back: bool = False) -> None:
        """The run cannot have this plan, or `is_back` from it."""
        self.decision = None
        if self._hears:
            self._advisor.failed(plan, why, is_back=is_back)

    def judged(self, *, is_kept: bool) -> None:
        """All processes have heard how the trial ended.

        If the plan was not to be kept, what was being prepared beside it is dropped.
        """
        self.verdict, self.decision = None, self.decision if is_kept else None

    def entered_phase(self) -> None:
        """The run has other batches: what was decided or judged was of those before."""
        self.decision = self.verdict = None
        if self._hears:
            self._advisor.dropped()

    def charge(self, time_s: float) -> None:
        """Switching took so much more of the run's time."""
        if self._hears:
            self._advisor.charge(time_s)

    def close(self) -> None:
        """The run has ended: keep what was learnt."""
        if self._hears:
            self._advisor.save()

    @property
    def _hears(self) -> bool:
        """Whether the advisor can be told things."""
        return jax.process_index() == 0 and not self._is_broken

    # How it thinks.

    def _judge(self, trial: SwitchTrial, step: int) -> None:
        """Whether the plan on trial is kept, as soon as its first steps say so."""
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
                Command(kind="keep" if verdict.keep else "take back", why=verdict.why)
            )

    def _decided(self, observation: Observation) -> Decision | None:
        """What the advisor says. A mistake in it costs the run its controller, and not its
        steps."""
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
        """Whether what was decided some time ago is still to be done, now that it is ready.

        On cores that are the devices the advisor was not shown steps while it was compiled. If they
        are others than they were, why has to be known first.
        """
        decision, plan = self.decision, upcoming.command.plan
        if (
            decision is None
            or decision.plan != plan
            or upcoming.may_go
            or not upcoming.preparation.is_done
        ):
            return
        self._commands.cancel("go")  # steps may have changed since it was given
        if decision.mandatory or self._is_steady(last_times_s[-NEWEST_STEPS:]):
            self._commands.send(Command(kind="go", plan=plan))
        elif upcoming.looks_since is None:
            self._commands.send(Command(kind="look", plan=plan))
        elif self._is_as_it_was(step - upcoming.looks_since):
            self._commands.send(Command(kind="go", plan=plan))

    def _is_steady(self, newest_s: tuple[float, ...]) -> bool:
        """Whether each of the last steps, beside the compilation, was about as long as those before
        it.
        """
        if len(newest_s) < NEWEST_STEPS or not self._decided_among_s or self._advisor.is_puzzled:
            return False
        before_s = statistics.median(self._decided_among_s)
        return before_s / STEADY <= min(newest_s) and max(newest_s) <= STEADY * before_s

    def _is_as_it_was(self, looked_steps: int) -> bool:
        unseen_steps = NEWEST_STEPS if jax.default_backend() == "cpu" else 0
        return looked_steps >= PUZZLED_STEPS or (
            looked_steps >= unseen_steps and not self._advisor.is_puzzled
        )
