"""The controller: measures a run, and carries out the commands of process 0, in every process.

The trainer reports each step to it, and asks at every step boundary whether the run leaves its plan
(`leaves`). If so, the trainer returns, `carry_out` moves the state, and another trainer continues
from there. What process 0 decides is control/runtime.py's part.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import jax
from jax.experimental import multihost_utils

from optimus_jax.config import ControlConfig
from optimus_jax.control import constants
from optimus_jax.control.commands import Command, CommandBroadcast
from optimus_jax.control.executables import Executable
from optimus_jax.control.live import Probes
from optimus_jax.control.phase_changes import PhaseChanges
from optimus_jax.control.policy import Decision
from optimus_jax.control.preparation import Preparation
from optimus_jax.control.runtime import Policy, Runtime
from optimus_jax.control.signals import Observation
from optimus_jax.control.sources import Signals
from optimus_jax.control.switch import Switched, Switcher
from optimus_jax.control.switch_state import SwitchRules, SwitchState
from optimus_jax.data.batch import HostBatch
from optimus_jax.devices.hosts import devices_by_host
from optimus_jax.errors import OptimusError, first_line
from optimus_jax.plan import Plan
from optimus_jax.run_directory.directory import RunDirectory
from optimus_jax.run_directory.step_record import EvalRecord, StepRecord
from optimus_jax.training.state import TrainState
from optimus_jax.training.watchers import Display


@dataclass(kw_only=True)
class _Upcoming:
    """A plan that is being prepared for a switch."""

    command: Command
    preparation: Preparation
    is_checked: bool = False
    """Whether the plan was ready, and process 0 looks again whether the reasons for the switch
    still hold."""
    may_go: bool = False
    """Whether they do."""
    is_awaited: bool = False
    """Whether training has paused for its compilation."""


class Controller:
    """Watches one run in one process.

    Args:
      policy: decides; used in process 0 only.
      rules: when the run may be moved, and whether it is or the controller only advises.
      state: what process 0 knows of the run's earlier switches.
      signals: the measured signals.
      probes: makes the probes of each mesh.
      switcher: moves the state.
      changes: moves the run from phase to phase; None: it has only one.
      reported: returns the ids of devices that someone has reported to be bad.
      compile_pause_s: the longest time for which training pauses while a plan is compiled, because
        the compiler shares its cores with the devices; 0: it does not.
      run: where decisions and switches are recorded.
      display: where they are shown.
    """

    def __init__(
        self,
        *,
        policy: Policy,
        rules: SwitchRules,
        state: SwitchState,
        signals: Signals,
        probes: Probes,
        switcher: Switcher,
        changes: PhaseChanges | None,
        reported: Callable[[], frozenset[int]],
        compile_pause_s: float = 0.0,
        run: RunDirectory,
        display: Display,
    ) -> None:
        self._settings: ControlConfig = rules.settings
        self._acts = rules.acts
        self._signals, self._probes, self._switcher = signals, probes, switcher
        self._changes, self._reported, self._run, self._display = changes, reported, run, display
        self._commands = CommandBroadcast()
        self._runtime = (
            Runtime(
                policy,
                rules,
                send=self._commands.send,
                announce=self._announce,
                fail=self._fail,
                state=state,
            )
            if jax.process_index() == 0
            else None
        )
        self._shares_cores, self._compile_pause_s = rules.shares_cores, compile_pause_s
        self._upcoming: _Upcoming | None = None
        self._trial: tuple[Plan, Plan] | None = None
        """The plans before and after the switch whose first steps are on trial."""
        self._back_why: str | None = None
        """Why the run goes back to the plan before; None: it does not."""
        self._new: list[StepRecord] = []
        """Records of the steps since the last boundary."""
        self._step, self._paused_s = 0, 0.0
        self._rows, self._rows_before = 0, 0
        """Rows of a batch that this process loads, and that it loaded before the newest switch."""
        self._recent_s: deque[float] = deque(maxlen=rules.settings.window_steps)

    # Called by the trainer.

    def dispatched(self, *, dispatch_s: float, batch: HostBatch) -> None:
        """Record that a step was dispatched to the devices."""
        self._signals.dispatched(dispatch_s=dispatch_s, batch=batch)
        self._rows = len(next(iter(batch.values()), ()))

    def step(self, record: StepRecord) -> None:
        """Record a finished step."""
        self._signals.step(record)
        self._new.append(record)
        self._recent_s.append(record.step_time_s)

    def evaluation(self, record: EvalRecord) -> None:
        """Do nothing: an evaluation says nothing about steps."""

    def pauses_for(self, step: int) -> Literal["probe", "compile"] | None:
        """What to wait for until the devices have finished `step`, and then call `pause`; None:
        nothing. The same answer in every process.
        """
        if self._waits_for_compiler:
            return "compile"
        return "probe" if not self._is_crowded and self._signals.is_probe_due(step) else None

    def pause(self, step: int) -> None:
        """Measure links and compute, or let the compiler have the cores, while the devices are idle
        after `step`.
        """
        if not self._waits_for_compiler:
            self._signals.probe(step)
            return
        assert self._upcoming is not None
        started, self._upcoming.is_awaited = time.perf_counter(), True
        preparation = self._upcoming.preparation
        if not preparation.is_done:
            self._display.message(f"training pauses while {preparation.plan.axes} is compiled")
        preparation.wait(self._compile_pause_s)
        if jax.process_count() > 1:  # so that no step waits for a process that still compiles
            multihost_utils.sync_global_devices("compiled")
        self._paused_s += time.perf_counter() - started

    @property
    def is_on_trial(self) -> bool:
        """Whether the plan is new and on trial: if it does not train it is taken back.

        All processes begin and end a trial after the same step.
        """
        return self._trial is not None

    def leaves(self, step: int) -> bool:
        """Whether the run leaves its plan after `step`."""
        self._look_ahead(step)
        self._step = step
        if self._runtime is None:
            self._signals.observe(step)
        else:
            self._commands.cancel("switch")  # steps may have changed since it was given
            self._runtime.boundary(
                self._observed(step),
                times_s=[record.step_time_s for record in self._new],
                data_waits_s=[record.data_wait_s or 0.0 for record in self._new],
                loads_more=self._trial is not None and self._rows > self._rows_before,
                paused_s=self._paused_s,
                losses=[record.loss for record in self._new],
                is_compiled=self._is_compiled,
            )
        self._new.clear()
        self._paused_s = 0.0
        # All processes know the boundary that a plan was prepared for.
        is_planned = self._upcoming is not None and self._upcoming.command.at_step == step
        if not (is_planned or self._commands.is_broadcast_due(step)):
            return False
        for command in self._commands.receive(step, self._recent_s):
            self._obey(command, step)
        return self._back_why is not None or self._is_ready(step)

    def carry_out(self, state: TrainState, step: int) -> tuple[TrainState, Executable]:
        """Move the state to the plan that was decided on, or back; `state` is donated.

        Every process calls it after `step`.

        Returns:
          The state and the executable to continue with; if the move failed, the old ones.
        Raises:
          StateLostError: the state is lost, and only the newest checkpoint is left.
        """
        switched = (
            self._take_back(state, step)
            if self._back_why is not None
            else self._switch(state, step)
        )
        return switched.state, switched.executable

    def enter_phase(self, switched: Switched, source: Plan) -> None:
        """Record that the run has entered a phase with other batches, without a command.

        Its plan may have changed from `source` to another. What was being prepared is dropped,
        since it is for the old batches, and a trial ends, since step times with other batches
        cannot be compared.
        """
        self._drop()
        self._trial, self._back_why = None, None
        self._forget_steps()
        self._commands.forget()
        plan = switched.executable.plan
        if self._runtime is not None:
            if plan != source:
                self._runtime.moved(plan, switched.costs_s, begins_phase=True)
            self._runtime.interrupted()
        self._measure_anew(switched.executable)

    def _measure_anew(self, executable: Executable) -> float:
        """Reset the signals for a run under another executable.

        Returns the seconds for which training paused for the first probes on its mesh.
        """
        config, started = executable.program.config, time.perf_counter()
        self._signals.enter(
            global_batch=config.data.global_batch,
            seq_len=config.seq_len,
            rounds=self._probes.on(executable.program.mesh),
        )
        return time.perf_counter() - started

    def stop(self, step: int) -> None:
        """Record that the run ends on purpose after `step`."""
        self._switcher.stop(step=step, costs_s=self._spent_s())

    def close(self) -> None:
        """Release what it holds, after the run has ended, successfully or not."""
        if self._upcoming is not None and not self._upcoming.preparation.is_done:
            self._display.message(
                f"waiting for the compilation of {self._upcoming.preparation.plan.axes} to end"
            )
        self._switcher.close()
        if self._runtime is not None:
            self._runtime.close()
        self._signals.close()

    def _look_ahead(self, step: int) -> None:
        """Prepare a phase that is near, but not during the trial of a plan: compiling would slow
        its steps on a CPU. All processes begin at the same boundary, and so compile in the same
        order.
        """
        if self._changes is not None and self._trial is None:
            time_s = self._commands.step_time_s
            lead_steps = 0.0 if time_s is None else constants.PHASE_LEAD_S / time_s
            self._changes.prepare(step, within_steps=max(self._settings.cooldown_steps, lead_steps))

    def _observed(self, step: int) -> Observation:
        """The observation at the boundary after `step`, in process 0."""
        observation = self._signals.observe(step, self._reported())
        # What is compiled for a phase, or not wanted any more, takes the cores too.
        is_slowed = self._is_crowded or (self._shares_cores and self._switcher.is_compiling)
        return replace(observation, step_times_s=(), data_waits_s=()) if is_slowed else observation

    @property
    def _is_crowded(self) -> bool:
        """Whether a compilation shares its cores with CPU devices: times measured meanwhile say
        nothing about links or plans.
        """
        return (
            self._shares_cores
            and self._upcoming is not None
            and not self._upcoming.is_checked
            and self._trial is None
        )

    @property
    def _waits_for_compiler(self) -> bool:
        """Whether training pauses so that a plan that is to be entered is compiled sooner."""
        return (
            self._compile_pause_s > 0
            and self._upcoming is not None
            and not self._upcoming.is_awaited
            and self._upcoming.command.at_step is None
            and self._trial is None
        )

    def _is_compiled(self) -> bool:
        """Whether the switch that is pending is compiled in this process, or has failed to be."""
        pending, upcoming = self._runtime and self._runtime.state.pending, self._upcoming
        return (
            pending is not None
            and upcoming is not None
            and upcoming.command.target == pending.decision.target
            and upcoming.preparation.is_done
        )

    # Done by all processes.

    def _obey(self, command: Command, step: int) -> None:
        if command.kind == "prepare":
            assert command.plan is not None
            everything = devices_by_host()
            devices = [device for device in everything if device.id not in command.without]
            avoid = frozenset(device for device in everything if device.id in command.without)
            config = (
                None
                if self._changes is None
                else self._changes.config_after(max(step, command.at_step or 0))
            )
            self._drop()
            self._upcoming = _Upcoming(
                command=command,
                preparation=self._switcher.prepare(
                    command.plan,
                    config=config,
                    devices=devices[: command.plan.num_devices],
                    avoid=avoid,
                    also=lambda target: self._probes.prepare(target.program.mesh),
                ),
            )
            if self._runtime is not None and self._is_compiled():
                self._runtime.compiled(at_once=True)
        elif command.kind == "withdraw":
            self._drop()
        elif (
            command.kind in ("recheck", "switch")
            and self._upcoming is not None
            and self._upcoming.command.plan == command.plan
        ):
            self._upcoming.is_checked = True
            self._upcoming.may_go |= command.kind == "switch"
        elif command.kind == "probe":
            self._signals.ask_probe(step + 1, anew=command.anew, worth_s=command.worth_s)
        elif command.kind == "keep" and self._trial is not None:
            self._keep(command.why, step)
            self._display.decision(f"kept: {command.why}")
        elif command.kind == "roll_back" and self._trial is not None:
            self._back_why = command.why
            self._drop()

    def _keep(self, why: str, step: int) -> None:
        """End the trial."""
        self._switcher.keep(step=step, why=why, costs_s=self._spent_s())
        self._trial = None
        if self._runtime is not None:
            self._runtime.trial_over()

    def _spent_s(self) -> dict[str, float]:
        """What the switch on trial has cost, by phase, for the journal, which process 0 writes."""
        trial = self._runtime and self._runtime.state.trial
        return {} if trial is None else trial.spent_s

    def _forget_steps(self) -> None:
        """Forget the steps under a plan that the run has left."""
        self._recent_s.clear()
        self._new.clear()

    def _drop(self) -> None:
        """Withdraw the upcoming switch."""
        if self._upcoming is not None:
            self._upcoming.preparation.withdraw()
        self._upcoming = None

    def _is_ready(self, step: int) -> bool:
        """Whether the plan that is being prepared is ready in all processes, at its boundary."""
        # During the trial of a plan it must stay possible to go back to the plan before it.
        if self._upcoming is None or self._trial is not None:
            return False
        command, preparation = self._upcoming.command, self._upcoming.preparation
        if not self._upcoming.may_go if command.at_step is None else step < command.at_step:
            return False
        if command.at_step is None and self._changes is not None and self._changes.is_due(step):
            return False  # it was prepared for the batches that end here
        try:
            return preparation.is_ready_everywhere()
        except OptimusError as error:
            self._give_up(preparation.plan, f"it could not be prepared: {first_line(error)}", step)
            return False

    def _switch(self, state: TrainState, step: int) -> Switched:
        assert self._upcoming is not None
        runtime, prepared, command, source = (
            self._runtime,
            self._upcoming.preparation.result(),
            self._upcoming.command,
            self._switcher.running.plan,
        )
        pending = runtime and runtime.state.pending
        if pending is not None and pending.decision.target != command.target:
            pending = None
        decision = pending and pending.decision
        begins_phase, target = not prepared.has_same_batches, prepared.target.plan
        if runtime is not None:
            runtime.move_begun()
        enter = self._switcher.enter if begins_phase else self._switcher.switch
        switched = enter(
            state,
            prepared,
            step=step,
            why=command.why,
            by_choice=decision is None or not decision.mandatory,
        )
        costs_s = switched.costs_s | {"settle_s": self._measure_anew(switched.executable)}
        if not switched.is_done:
            self._log_rollback(
                step, target, source, f"the move failed: {switched.why_not}", costs_s
            )
            self._give_up(target, switched.why_not, step, costs_s)
            return switched
        self._run.log_event(
            "remesh",
            step,
            plan=target.digest,
            layout=target.describe(),
            from_plan=source.digest,
            switch_method=decision and decision.switch_method,
            why=command.why,
            phases_s=_phases({"prepare_s": prepared.compile_s, **costs_s}),
            bytes_moved=prepared.forward.sent_bytes,
            compile_tax_s=max(0.0, pending.tax_s) if pending is not None else 0.0,
            step_delay_s=sum(costs_s.values()),
        )
        self._run.log_event(
            "compile",
            step,
            compile_time_s=prepared.target.compile_s,
            step_bytes_per_device=prepared.target.step_bytes,
        )
        self._display.message(
            f"after step {step} the run continues under {target.describe()}; training paused for"
            f" {sum(costs_s.values()):.2f} s"
        )
        if begins_phase and self._changes is not None:
            self._changes.tell(source, switched, step, compile_s=prepared.target.compile_s)
        elif not begins_phase:
            self._trial, self._rows_before = (source, target), self._rows
        if runtime is not None:
            runtime.moved(target, costs_s, begins_phase=begins_phase)
        self._upcoming = None
        self._forget_steps()
        return switched

    def _take_back(self, state: TrainState, step: int) -> Switched:
        assert self._trial is not None, "only a plan on trial is taken back"
        assert self._back_why is not None, "process 0 says why"
        (source, plan), why = self._trial, self._back_why
        if self._runtime is not None:
            self._runtime.move_begun()
        switched = self._switcher.take_back(state, step=step, why=why, costs_s=self._spent_s())
        costs_s = switched.costs_s | {"settle_s": self._measure_anew(switched.executable)}
        if switched.is_done:
            self._log_rollback(step, plan, source, why, costs_s)
            self._display.message(
                f"after step {step} the run goes back to {source.describe()}: {why}"
            )
            if self._runtime is not None:
                self._runtime.failed(plan, why, costs_s=sum(costs_s.values()), is_back=True)
        else:
            self._log_stay(step, plan, f"it cannot be taken back: {switched.why_not}")
            if self._runtime is not None:
                self._runtime.trial_over(costs_s=sum(costs_s.values()))
        self._trial, self._back_why = None, None
        self._forget_steps()
        return switched

    def _log_rollback(
        self, step: int, plan: Plan, back_to: Plan, why: str, costs_s: dict[str, float]
    ) -> None:
        self._run.log_event(
            "rollback",
            step,
            plan=back_to.digest,
            layout=back_to.describe(),
            from_plan=plan.digest,
            why=why,
            phases_s=_phases(costs_s),
            step_delay_s=sum(costs_s.values()),
        )

    def _log_stay(self, step: int, plan: Plan, why: str) -> None:
        self._run.log_event(
            "decision", step, action="stay", plan=plan.digest, layout=plan.describe(), why=why
        )

    def _give_up(
        self, plan: Plan, why: str, step: int, costs_s: Mapping[str, float] | None = None
    ) -> None:
        """Record that the run cannot use this plan, and the time of the failed switch."""
        self._log_stay(step, plan, why)
        self._display.decision(f"stay: {plan.axes}: {why}")
        if self._runtime is not None:
            self._runtime.failed(plan, why, costs_s=sum((costs_s or {}).values()))
        self._drop()

    # Records of process 0.

    def _announce(self, decision: Decision) -> None:
        record = decision.as_json()
        record["inputs"] |= self._signals.remarks()
        self._run.log_event(
            "decision",
            decision.step,
            layout=decision.plan.describe() if decision.plan else None,
            **record,
        )
        advises = decision.action == "switch" and not self._acts
        self._display.decision(f"{'would ' * advises}{decision.action}: {decision.why}")

    def _fail(self, why: str, traceback: str) -> None:
        self._run.log_event(
            "decision",
            self._step,
            action="stay",
            plan=None,
            layout=None,
            why=why,
            traceback=traceback,
        )
        self._display.message(why)


def _phases(costs_s: dict[str, float]) -> dict[str, float]:
    """Costs by phase name without the unit: `move_s` becomes `move`."""
    return {name.removesuffix("_s"): time_s for name, time_s in costs_s.items()}
