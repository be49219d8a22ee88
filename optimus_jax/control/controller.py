"""The controller: closes the loop of a run. It measures, decides, prepares, and moves the run to another plan.

The trainer tells it what only the loop can see and asks at every step boundary whether to go on (`leaves`). When it says
that the run leaves its plan, the trainer returns, `carry_out` moves the state, and another trainer goes on from there.
What is known of a plan's first steps decides whether it is kept.
"""

import statistics
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import jax

from optimus_jax.config import ControlConfig
from optimus_jax.control.advisor import LEAD_S, PUZZLED_STEPS, Advisor
from optimus_jax.control.canary import Verdict, is_clearly_slower, judge
from optimus_jax.control.council import Council, Order
from optimus_jax.control.executables import Executable
from optimus_jax.control.live import Probes
from optimus_jax.control.phase_changes import PhaseChanges
from optimus_jax.control.policy import CHOSEN, Decision
from optimus_jax.control.signals import Observation
from optimus_jax.control.sources import Signals
from optimus_jax.control.switch import Preparation, Switched, Switcher
from optimus_jax.data.sampler import Batch
from optimus_jax.errors import OptimusError
from optimus_jax.mesh.hosts import devices_by_host
from optimus_jax.plan import Plan
from optimus_jax.training.display import Display
from optimus_jax.training.run_directory import RunDirectory
from optimus_jax.training.state import TrainState
from optimus_jax.training.step_record import StepRecord

Mode = Literal["advise", "auto"]
NEWEST_STEPS = 3
"""With which a plan's first steps are compared where others may be of other conditions: as few as have a median that one outlier does not move."""
STEADY = 1.5
"""Steps that take no more than so many times what they took when a plan was chosen, nor less by as much, are taken for the same: compiling beside them explains that."""


@dataclass(kw_only=True)
class _Upcoming:
    """A plan on its way to be entered; the same in every process."""

    order: Order
    preparation: Preparation
    looks_since: int | None = None
    """The step after which it was ready and the first process began to look whether the reasons for it still hold."""
    may_go: bool = False
    """Whether it has found that they do."""
    usual_s: float | None = None
    """Median time of a step before it was being compiled; None: unknown."""
    tax_s: float = 0.0
    """By how much steps beside the compilation have been longer, in all."""


@dataclass(frozen=True, kw_only=True)
class _Trial:
    """The first steps under a new plan."""

    source: Plan
    plan: Plan
    costs_s: dict[str, float]
    """Of the switch: how long the run stood still."""
    tax_s: float
    """What preparing it took from steps."""
    before_s: tuple[float, ...]
    """Times of the last steps under the plan from before; empty: it is not to be compared with."""
    foretold_s: float
    """Predicted time of a step."""
    records: list[StepRecord] = field(default_factory=list)
    """Of its steps."""

    @property
    def spent_s(self) -> dict[str, float]:
        """All that the switch has cost, for the journal: a resumed run has no more to spend than this one."""
        return self.costs_s | {"compile_tax_s": self.tax_s, "first_steps_s": _excess_s([record.step_time_s for record in self.records])}


class Controller:
    """Watches one run in one process.

    Args:
      mode: whether it moves the run, or only says what it would do.
      settings: when it may.
      num_steps: of the run.
      advisor: decides; the first process's.
      signals: what is measured.
      probes: of each mesh.
      switcher: moves the state.
      changes: between the run's phases; None: it has one.
      reported: ids of devices that someone has reported to be bad.
      run: where decisions and switches are written down.
      display: where they are shown.
    """

    def __init__(self, *, mode: Mode, settings: ControlConfig, num_steps: int, advisor: Advisor, signals: Signals, probes: Probes, switcher: Switcher,
                 changes: PhaseChanges | None, reported: Callable[[], frozenset[int]], run: RunDirectory, display: Display) -> None:
        self._mode, self._settings, self._num_steps = mode, settings, num_steps
        self._advisor, self._signals, self._probes, self._switcher = advisor, signals, probes, switcher
        self._changes, self._reported, self._run, self._display = changes, reported, run, display
        self._council = Council()
        self._decision: Decision | None = None
        """The switch that is being prepared, in the process that decided it."""
        self._decided_among_s: tuple[float, ...] = ()
        """The newest step times when it was decided."""
        self._upcoming: _Upcoming | None = None
        self._trial: _Trial | None = None
        self._verdict: Verdict | None = None
        """Of a trial, while other processes have not heard it."""
        self._is_taken_back = self._is_broken = False
        self._probed_of_s: float | None = None
        """When those steps changed for whose sake a probe was asked for last."""
        self._last_times_s: deque[float] = deque(maxlen=settings.window_steps)

    # What the trainer says.

    def dispatched(self, *, data_wait_s: float, dispatch_s: float, batch: Batch) -> None:
        """A step was handed to the devices."""
        self._signals.dispatched(data_wait_s=data_wait_s, dispatch_s=dispatch_s, batch=batch)

    def step(self, record: StepRecord) -> None:
        """A step was finished."""
        self._signals.step(record)
        if self._trial is not None:
            self._trial.records.append(record)
        upcoming = self._upcoming
        if upcoming is not None and upcoming.usual_s is not None and not upcoming.preparation.is_done:
            upcoming.tax_s += record.step_time_s - upcoming.usual_s
        self._last_times_s.append(record.step_time_s)

    def evaluation(self, step: int, loss: float, perplexity: float, bits_per_byte: float | None) -> None:
        """An evaluation says nothing about steps."""

    def is_probe_due(self, step: int) -> bool:
        """Whether to let the devices finish `step` and call `probe`; the same answer in every process."""
        return not self._is_crowded and self._signals.is_probe_due(step)

    def probe(self, step: int) -> None:
        """The devices are free: measure links and compute."""
        self._signals.probe(step)

    def leaves(self, step: int) -> bool:
        """Whether the run is to go on under another plan after `step`."""
        self._look_ahead(step)
        if jax.process_index() == 0:
            self._think(step)
        else:
            self._signals.observe(step)
        if not self._council.is_held(step):
            # All have heard of a boundary that a plan was prepared for.
            return self._upcoming is not None and self._upcoming.order.at_step == step and self._is_ready(step)
        for order in self._council.hear(step, self._last_times_s):
            self._obey(order, step)
        return self._is_taken_back or self._is_ready(step)

    def carry_out(self, state: TrainState, step: int) -> tuple[TrainState, Executable]:
        """Move the state, which is used up, to the plan that was decided on, or back. Every process calls it after `step`.

        Returns:
          The state, and what the run goes on with; if the move failed, those from before.
        Raises:
          StateLostError: the newest checkpoint is all that is left.
        """
        switched = self._take_back(state, step) if self._is_taken_back else self._switch(state, step)
        return switched.state, switched.executable

    def enter_phase(self, switched: Switched, source: Plan) -> None:
        """The run has gone on to other batches, perhaps from plan `source` to another, without an order.

        What was being prepared is for the batches before, with which first steps cannot be compared any more either.
        """
        self._drop()
        self._decision = self._trial = self._verdict = None
        self._is_taken_back = False
        self._last_times_s.clear()
        self._council.forget()
        if self._advises:
            if switched.executable.plan != source:
                self._advisor.switched(switched.executable.plan, switched.costs_s)
            self._advisor.dropped()
        self._measure_anew(switched.executable)

    def _measure_anew(self, executable: Executable) -> float:
        """Signals of a run that goes on under another plan; seconds that it stood still for the first probes there."""
        config, started = executable.program.config, time.perf_counter()
        self._signals.enter(global_batch=config.data.global_batch, seq_len=config.seq_len, rounds=self._probes.on(executable.program.mesh))
        return time.perf_counter() - started

    def stop(self, step: int) -> None:
        """The run ends on purpose after `step`."""
        self._switcher.stop(step=step, costs_s=self._trial.spent_s if self._trial is not None else {})

    def close(self) -> None:
        """The run has ended, well or not."""
        if self._upcoming is not None and not self._upcoming.preparation.is_done:
            self._display.message(f"waiting for the compilation of {self._upcoming.preparation.plan.axes} to end")
        self._switcher.close()
        if self._advises:
            self._advisor.save()
        self._signals.close()

    def _look_ahead(self, step: int) -> None:
        """Have a phase that is near prepared, but not while the first steps under a plan are timed: compiling slows them on a CPU."""
        if self._changes is not None and self._trial is None:
            times_s = self._last_times_s
            lead_steps = LEAD_S / max(statistics.median(times_s), 1e-9) if times_s else 0.0
            self._changes.prepare(step, within_steps=max(self._settings.cooldown_steps, lead_steps))

    @property
    def _advises(self) -> bool:
        """Whether this process has an advisor that can be told things."""
        return jax.process_index() == 0 and not self._is_broken

    @property
    def _is_crowded(self) -> bool:
        """Whether a plan is being compiled on the cores that are the devices: what is timed meanwhile says nothing of links or plans."""
        return self._upcoming is not None and self._upcoming.looks_since is None and self._trial is None and jax.default_backend() == "cpu"

    # What the first process thinks.

    def _think(self, step: int) -> None:
        """Observe, judge the first steps under a new plan, decide; orders are given to the council."""
        observation = self._signals.observe(step, self._reported())
        if self._is_crowded:
            observation = replace(observation, step_times_s=())
        trial = self._trial
        times_s = [record.step_time_s for record in trial.records] if trial is not None else []
        is_over = len(times_s) > self._settings.canary_steps
        if trial is not None and self._verdict is None and (is_over or is_clearly_slower(times_s, trial.before_s)):
            verdict = judge(
                times_s, losses=[record.loss for record in trial.records], before_s=trial.before_s,
                foretold_s=trial.foretold_s, steps_left=self._num_steps - step, back_s=sum(trial.costs_s.values()))
            if is_over or not verdict.keep:
                self._verdict = verdict
                self._advisor.charge(_excess_s(times_s))
                self._council.give(Order(kind="keep" if verdict.keep else "take back", why=verdict.why))
        if self._is_broken or (self._verdict is not None and not self._verdict.keep):
            return  # what is decided now would be of a plan that the run is about to leave
        if self._advisor.wants_probe:
            is_news = self._advisor.changed_s != self._probed_of_s
            self._council.give(Order(kind="probe", anew=is_news, worth_s=self._advisor.probe_worth_s if is_news else 0.0))
            self._probed_of_s = self._advisor.changed_s
        decision = self._decided(observation)
        if decision is not None:
            self._announce(decision)
            if self._mode == "auto":
                self._act_on(decision)
        if self._upcoming is not None:
            self._consider_going(self._upcoming, step)

    def _decided(self, observation: Observation) -> Decision | None:
        """What the advisor says. A mistake in it costs the run its controller, and not its steps."""
        try:
            return self._advisor.decide(observation)
        except Exception as error:
            self._is_broken, self._decision = True, None
            why = f"the controller has failed and decides nothing more ({type(error).__name__}: {error}); this is a defect of optimus_jax"
            self._run.log_event("decision", observation.step, action="stay", plan=None, layout=None, why=why, traceback=traceback.format_exc())
            self._display.message(why)
            self._council.give(Order(kind="withdraw", why=why))
            return None

    def _consider_going(self, upcoming: _Upcoming, step: int) -> None:
        """Whether what was decided some time ago is still to be done, now that it is ready.

        On cores that are the devices the advisor was not shown steps while it was compiled. If they are others than they were, why has to be known first.
        """
        decision, plan = self._decision, upcoming.order.plan
        if decision is None or decision.plan != plan or upcoming.may_go or self._trial is not None or not upcoming.preparation.is_done:
            return
        self._council.take_back("go")  # steps may have changed since it was given
        if decision.mandatory or self._is_steady():
            self._council.give(Order(kind="go", plan=plan))
        elif upcoming.looks_since is None:
            self._council.give(Order(kind="look", plan=plan))
        elif self._is_as_it_was(step - upcoming.looks_since):
            self._council.give(Order(kind="go", plan=plan))

    def _is_steady(self) -> bool:
        """Whether each of the last steps, beside the compilation, was about as long as those before it."""
        newest_s = tuple(self._last_times_s)[-NEWEST_STEPS:]
        if len(newest_s) < NEWEST_STEPS or not self._decided_among_s or self._advisor.is_puzzled:
            return False
        before_s = statistics.median(self._decided_among_s)
        return before_s / STEADY <= min(newest_s) and max(newest_s) <= STEADY * before_s

    def _is_as_it_was(self, looked_steps: int) -> bool:
        unseen_steps = NEWEST_STEPS if jax.default_backend() == "cpu" else 0
        return looked_steps >= PUZZLED_STEPS or (looked_steps >= unseen_steps and not self._advisor.is_puzzled)

    def _announce(self, decision: Decision) -> None:
        record = decision.as_json()
        record["inputs"] |= self._signals.remarks()
        self._run.log_event("decision", decision.step, layout=decision.plan.describe() if decision.plan else None, **record)
        self._display.decision(f"{decision.action}: {decision.why}")

    def _act_on(self, decision: Decision) -> None:
        if decision.plan is not None:
            self._decision, self._decided_among_s = decision, tuple(self._last_times_s)[-NEWEST_STEPS:]
            self._council.give(Order(kind="prepare", plan=decision.plan, without=decision.without, at_step=decision.at_step, why=decision.why))
        elif self._decision is not None:
            self._decision = None
            self._council.give(Order(kind="withdraw", why=decision.why))

    # What all processes do.

    def _obey(self, order: Order, step: int) -> None:
        if order.kind == "prepare":
            assert order.plan is not None
            everything = devices_by_host()
            devices = [device for device in everything if device.id not in order.without]
            avoid = frozenset(device for device in everything if device.id in order.without)
            config = None if self._changes is None else self._changes.config_after(max(step, order.at_step or 0))
            self._drop()
            self._upcoming = _Upcoming(order=order, preparation=self._switcher.prepare(
                order.plan, config=config, devices=devices[:order.plan.num_devices], avoid=avoid, also=lambda target: self._probes.prepare(target.program.mesh)),
                usual_s=statistics.median(self._last_times_s) if self._last_times_s else None)
            if self._upcoming.preparation.is_done:  # no step was done meanwhile
                self._council.give(Order(kind="go", plan=order.plan))
        elif order.kind == "withdraw":
            self._drop()
        elif order.kind in ("look", "go") and self._upcoming is not None and self._upcoming.order.plan == order.plan:
            self._upcoming.looks_since, self._upcoming.may_go = step, self._upcoming.may_go or order.kind == "go"
        elif order.kind == "probe":
            self._signals.ask_probe(step + 1, anew=order.anew, worth_s=order.worth_s)
        elif order.kind == "keep" and self._trial is not None:
            self._switcher.keep(step=step, why=order.why, costs_s=self._trial.spent_s)
            self._display.decision(f"kept: {order.why}")
            self._trial = self._verdict = None
        elif order.kind == "take back" and self._trial is not None:
            self._is_taken_back = True
            self._drop()

    def _drop(self) -> None:
        """Nobody waits for what is being prepared any more."""
        if self._upcoming is not None:
            self._upcoming.preparation.withdraw()
            if self._advises:
                self._advisor.charge(max(0.0, self._upcoming.tax_s))
        self._upcoming = None

    def _is_ready(self, step: int) -> bool:
        """Whether the plan that is being prepared is ready in all processes, at its boundary."""
        # While the first steps under a plan are watched, the way back has to stay open.
        if self._upcoming is None or self._trial is not None:
            return False
        order, preparation = self._upcoming.order, self._upcoming.preparation
        if not self._upcoming.may_go if order.at_step is None else step < order.at_step:
            return False
        if order.at_step is None and self._changes is not None and self._changes.is_due(step):
            return False  # it was prepared for the batches that end here
        try:
            return preparation.is_ready_everywhere()
        except OptimusError as error:
            self._give_up(preparation.plan, f"it could not be prepared: {str(error).splitlines()[0]}", step)
            return False

    def _switch(self, state: TrainState, step: int) -> Switched:
        assert self._upcoming is not None
        prepared, order, source = self._upcoming.preparation.result(), self._upcoming.order, self._switcher.running.plan
        begins_phase = not prepared.has_same_batches
        target, decision = prepared.target.plan, self._decision
        if begins_phase:
            switched = self._switcher.enter(state, prepared, step=step, why=order.why)
        else:
            switched = self._switcher.switch(state, prepared, step=step, why=order.why, by_choice=decision is None or not decision.mandatory)
        costs_s = switched.costs_s | {"settle_s": self._measure_anew(switched.executable)}
        if not switched.is_done:
            self._log_rollback(step, target, source, f"the move failed: {switched.why_not}", costs_s)
            self._give_up(target, switched.why_not, step, costs_s)
            return switched
        tax_s = max(0.0, self._upcoming.tax_s)
        self._run.log_event(
            "remesh", step, plan=target.digest, layout=target.describe(), from_plan=source.digest, rung=decision and decision.rung, why=order.why,
            phases_s=_phases({"prepare_s": prepared.compile_s, **costs_s}), bytes_moved=prepared.there.sent_bytes, compile_tax_s=tax_s,
            step_delay_s=sum(costs_s.values()))
        self._run.log_event("compile", step, compile_time_s=prepared.target.compile_s, step_bytes_per_device=prepared.target.step_bytes)
        self._display.message(f"after step {step} the run goes on under {target.describe()}; it stood still for {sum(costs_s.values()):.2f} s")
        if begins_phase and self._changes is not None:
            self._changes.tell(source, switched, step, compile_s=prepared.target.compile_s)
        elif not begins_phase:
            # What the run had to leave is no measure: fewer devices may be slower.
            # While it was prepared on cores that are the devices, nobody looked whether steps were still alike.
            newest = NEWEST_STEPS if jax.default_backend() == "cpu" else 2 * self._settings.canary_steps
            alike = max(1, min(self._advisor.steps_alike, newest))
            before_s = () if decision is not None and decision.mandatory else tuple(self._last_times_s)[-alike:]
            self._trial = _Trial(source=source, plan=target, costs_s=costs_s, tax_s=tax_s, before_s=before_s, foretold_s=_foretold_s(decision))
        if self._advises:
            self._advisor.switched(target, costs_s | {"compile_tax_s": tax_s})
        self._upcoming = self._decision = None
        self._last_times_s.clear()
        return switched

    def _take_back(self, state: TrainState, step: int) -> Switched:
        trial = self._trial
        assert trial is not None
        why = self._verdict.why if self._verdict is not None else "the first process said so"
        switched = self._switcher.take_back(state, step=step, why=why, costs_s=trial.spent_s)
        costs_s = switched.costs_s | {"settle_s": self._measure_anew(switched.executable)}
        if self._advises:
            self._advisor.charge(sum(costs_s.values()))
        if switched.is_done:
            self._log_rollback(step, trial.plan, trial.source, why, costs_s)
            self._display.message(f"after step {step} the run goes back to {trial.source.describe()}: {why}")
            if self._advises:
                self._advisor.failed(trial.plan, why, is_back=True)
        else:
            self._run.log_event("decision", step, action="stay", plan=trial.plan.digest, layout=trial.plan.describe(),
                                why=f"it cannot be taken back: {switched.why_not}")
        self._trial = self._verdict = self._decision = None
        self._is_taken_back = False
        self._last_times_s.clear()
        return switched

    def _log_rollback(self, step: int, plan: Plan, back_to: Plan, why: str, costs_s: dict[str, float]) -> None:
        self._run.log_event("rollback", step, plan=back_to.digest, layout=back_to.describe(), from_plan=plan.digest, why=why, phases_s=_phases(costs_s),
                            step_delay_s=sum(costs_s.values()))

    def _give_up(self, plan: Plan, why: str, step: int, costs_s: Mapping[str, float] | None = None) -> None:
        """A plan that the run cannot have, after a move that took so long."""
        self._run.log_event("decision", step, action="stay", plan=plan.digest, layout=plan.describe(), why=why)
        self._display.decision(f"stay: {plan.axes}: {why}")
        if self._advises:
            self._advisor.failed(plan, why)
            self._advisor.charge(sum((costs_s or {}).values()))
        self._drop()
        self._decision = None


def _excess_s(step_times_s: Sequence[float]) -> float:
    """By how much the first of these steps was longer than the others."""
    return max(0.0, step_times_s[0] - statistics.median(step_times_s[1:])) if len(step_times_s) > 1 else 0.0


def _phases(costs_s: dict[str, float]) -> dict[str, float]:
    """By name alone: `move_s` is the time of phase `move`."""
    return {name.removesuffix("_s"): time_s for name, time_s in costs_s.items()}


def _foretold_s(decision: Decision | None) -> float:
    """Predicted step time of the plan decided on; NaN in a process that did not decide."""
    chosen = [each.step_time_s for each in decision.alternatives if each.verdict == CHOSEN] if decision is not None else []
    return chosen[0] if chosen else float("nan")
