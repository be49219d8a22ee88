"""The controller: closes the loop of a run.

It measures, decides, prepares, and moves the run to another plan.

The trainer reports each step to it, and asks at every step boundary whether the run leaves its plan
(`leaves`). If so, the trainer returns, `carry_out` moves the state, and another trainer continues
from there. The first steps under the new plan decide whether it is kept.
"""

import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace

import jax

from optimus_jax.config import ControlConfig
from optimus_jax.control.advisor import LEAD_S, Advisor
from optimus_jax.control.commands import Command, CommandBroadcast
from optimus_jax.control.coordinator import Coordinator, Mode
from optimus_jax.control.executables import Executable
from optimus_jax.control.live import Probes
from optimus_jax.control.pending_switch import SwitchTrial, UpcomingSwitch
from optimus_jax.control.phase_changes import PhaseChanges
from optimus_jax.control.signals import Observation
from optimus_jax.control.sources import Signals
from optimus_jax.control.switch import Switched, Switcher
from optimus_jax.data.batch import HostBatch
from optimus_jax.devices.hosts import devices_by_host
from optimus_jax.errors import OptimusError, first_line
from optimus_jax.plan import Plan
from optimus_jax.run_directory.directory import RunDirectory
from optimus_jax.run_directory.step_record import EvalRecord, StepRecord
from optimus_jax.training.state import TrainState
from optimus_jax.training.watchers import Display


class Controller:
    """Watches one run in one process.

    Args:
      mode: whether it moves the run, or only says what it would do.
      settings: when it may move the run.
      num_steps: number of steps of the run.
      advisor: makes the decisions; used in process 0 only.
      signals: the measured signals.
      probes: makes the probes of each mesh.
      switcher: moves the state.
      changes: moves the run from phase to phase; None: it has only one.
      reported: returns the ids of devices that someone has reported to be bad.
      run: where decisions and switches are recorded.
      display: where they are shown.
    """

    def __init__(
        self,
        *,
        mode: Mode,
        settings: ControlConfig,
        num_steps: int,
        advisor: Advisor,
        signals: Signals,
        probes: Probes,
        switcher: Switcher,
        changes: PhaseChanges | None,
        reported: Callable[[], frozenset[int]],
        run: RunDirectory,
        display: Display,
    ) -> None:
        self._settings = settings
        self._signals, self._probes, self._switcher = signals, probes, switcher
        self._changes, self._reported, self._run, self._display = changes, reported, run, display
        self._commands = CommandBroadcast()
        self._coordinator = Coordinator(
            mode=mode,
            settings=settings,
            num_steps=num_steps,
            advisor=advisor,
            commands=self._commands,
            remarks=signals.remarks,
            run=run,
            display=display,
        )
        self._upcoming: UpcomingSwitch | None = None
        self._trial: SwitchTrial | None = None
        self._is_taken_back = False
        self._last_times_s: deque[float] = deque(maxlen=settings.window_steps)

    # Called by the trainer.

    def dispatched(self, *, data_wait_s: float, dispatch_s: float, batch: HostBatch) -> None:
        """Record that a step was dispatched to the devices."""
        self._signals.dispatched(data_wait_s=data_wait_s, dispatch_s=dispatch_s, batch=batch)

    def step(self, record: StepRecord) -> None:
        """Record a finished step."""
        self._signals.step(record)
        if self._trial is not None:
            self._trial.records.append(record)
        upcoming = self._upcoming
        if (
            upcoming is not None
            and upcoming.usual_s is not None
            and not upcoming.preparation.is_done
        ):
            upcoming.tax_s += record.step_time_s - upcoming.usual_s
        self._last_times_s.append(record.step_time_s)

    def evaluation(self, record: EvalRecord) -> None:
        """Do nothing: an evaluation says nothing about steps."""

    def is_probe_due(self, step: int) -> bool:
        """Whether to wait until the devices have finished `step`, then call `probe`; the same
        answer in every process.
        """
        return not self._is_crowded and self._signals.is_probe_due(step)

    def probe(self, step: int) -> None:
        """Measure links and compute, while the devices are idle after `step`."""
        self._signals.probe(step)

    @property
    def is_on_trial(self) -> bool:
        """Whether the plan is new and on trial: if it does not train it is taken back.

        All processes begin and end a trial after the same step.
        """
        return self._trial is not None

    def leaves(self, step: int) -> bool:
        """Whether the run leaves its plan after `step`."""
        self._look_ahead(step)
        if jax.process_index() == 0:
            self._coordinator.think(
                step,
                self._observed(step),
                trial=self._trial,
                upcoming=self._upcoming,
                last_times_s=tuple(self._last_times_s),
            )
        else:
            self._signals.observe(step)
        if not self._commands.is_broadcast_due(step):
            # All processes know the boundary that a plan was prepared for.
            return (
                self._upcoming is not None
                and self._upcoming.command.at_step == step
                and self._is_ready(step)
            )
        for command in self._commands.receive(step, self._last_times_s):
            self._obey(command, step)
        return self._is_taken_back or self._is_ready(step)

    def carry_out(self, state: TrainState, step: int) -> tuple[TrainState, Executable]:
        """Move the state to the plan that was decided on, or back; `state` is donated.

        Every process calls it after `step`.

        Returns:
          The state and the executable to continue with; if the move failed, the old ones.
        Raises:
          StateLostError: the state is lost, and only the newest checkpoint is left.
        """
        switched = (
            self._take_back(state, step) if self._is_taken_back else self._switch(state, step)
        )
        return switched.state, switched.executable

    def enter_phase(self, switched: Switched, source: Plan) -> None:
        """Record that the run has entered a phase with other batches, without a command.

        Its plan may have changed from `source` to another. What was being prepared is dropped,
        since it is for the old batches, and a trial ends, since step times with other batches
        cannot be compared.
        """
        self._drop()
        self._trial, self._is_taken_back = None, False
        self._last_times_s.clear()
        self._commands.forget()
        if switched.executable.plan != source:
            self._coordinator.switched(switched.executable.plan, switched.costs_s)
        self._coordinator.entered_phase()
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
        self._switcher.stop(
            step=step, costs_s=self._trial.spent_s if self._trial is not None else {}
        )

    def close(self) -> None:
        """Release what it holds, after the run has ended, successfully or not."""
        if self._upcoming is not None and not self._upcoming.preparation.is_done:
            self._display.message(
                f"waiting for the compilation of {self._upcoming.preparation.plan.axes} to end"
            )
        self._switcher.close()
        self._coordinator.close()
        self._signals.close()

    def _look_ahead(self, step: int) -> None:
        """Prepare a phase that is near, but not during the trial of a plan: compiling would slow
        its steps on a CPU.
        """
        if self._changes is not None and self._trial is None:
            times_s = self._last_times_s
            lead_steps = LEAD_S / max(statistics.median(times_s), 1e-9) if times_s else 0.0
            self._changes.prepare(step, within_steps=max(self._settings.cooldown_steps, lead_steps))

    def _observed(self, step: int) -> Observation:
        """The observation at the boundary after `step`, in process 0."""
        observation = self._signals.observe(step, self._reported())
        return replace(observation, step_times_s=()) if self._is_crowded else observation

    @property
    def _is_crowded(self) -> bool:
        """Whether a compilation shares its cores with CPU devices: times measured meanwhile say
        nothing about links or plans.
        """
        return (
            self._upcoming is not None
            and self._upcoming.looks_since is None
            and self._trial is None
            and jax.default_backend() == "cpu"
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
            self._upcoming = UpcomingSwitch(
                command=command,
                preparation=self._switcher.prepare(
                    command.plan,
                    config=config,
                    devices=devices[: command.plan.num_devices],
                    avoid=avoid,
                    also=lambda target: self._probes.prepare(target.program.mesh),
                ),
                usual_s=statistics.median(self._last_times_s) if self._last_times_s else None,
            )
            if self._upcoming.preparation.is_done:  # at once, before another step
                self._commands.send(Command(kind="switch", plan=command.plan))
        elif command.kind == "withdraw":
            self._drop()
        elif (
            command.kind in ("recheck", "switch")
            and self._upcoming is not None
            and self._upcoming.command.plan == command.plan
        ):
            self._upcoming.looks_since, self._upcoming.may_go = (
                step,
                self._upcoming.may_go or command.kind == "switch",
            )
        elif command.kind == "probe":
            self._signals.ask_probe(step + 1, anew=command.anew, worth_s=command.worth_s)
        elif command.kind == "keep" and self._trial is not None:
            self._switcher.keep(step=step, why=command.why, costs_s=self._trial.spent_s)
            self._display.decision(f"kept: {command.why}")
            self._trial = None
            self._coordinator.judged(is_kept=True)
        elif command.kind == "roll_back" and self._trial is not None:
            self._is_taken_back = True
            self._drop()

    def _drop(self) -> None:
        """Withdraw the upcoming switch, and charge for the delay that preparing it has caused."""
        if self._upcoming is not None:
            self._upcoming.preparation.withdraw()
            self._coordinator.charge(max(0.0, self._upcoming.tax_s))
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
        prepared, command, source = (
            self._upcoming.preparation.result(),
            self._upcoming.command,
            self._switcher.running.plan,
        )
        begins_phase = not prepared.has_same_batches
        target, decision = prepared.target.plan, self._coordinator.decision
        if begins_phase:
            switched = self._switcher.enter(state, prepared, step=step, why=command.why)
        else:
            switched = self._switcher.switch(
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
        tax_s = max(0.0, self._upcoming.tax_s)
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
            compile_tax_s=tax_s,
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
            self._trial = SwitchTrial(
                source=source,
                plan=target,
                costs_s=costs_s,
                tax_s=tax_s,
                before_s=self._coordinator.comparable(tuple(self._last_times_s)),
                predicted_s=self._coordinator.predicted_s,
            )
        self._coordinator.switched(target, costs_s | {"compile_tax_s": tax_s})
        self._upcoming = None
        self._last_times_s.clear()
        return switched

    def _take_back(self, state: TrainState, step: int) -> Switched:
        trial = self._trial
        assert trial is not None
        why = (
            self._coordinator.verdict.why
            if self._coordinator.verdict is not None
            else "process 0 decided it"
        )
        switched = self._switcher.take_back(state, step=step, why=why, costs_s=trial.spent_s)
        costs_s = switched.costs_s | {"settle_s": self._measure_anew(switched.executable)}
        self._coordinator.charge(sum(costs_s.values()))
        if switched.is_done:
            self._log_rollback(step, trial.plan, trial.source, why, costs_s)
            self._display.message(
                f"after step {step} the run goes back to {trial.source.describe()}: {why}"
            )
            self._coordinator.failed(trial.plan, why, is_back=True)
        else:
            self._run.log_event(
                "decision",
                step,
                action="stay",
                plan=trial.plan.digest,
                layout=trial.plan.describe(),
                why=f"it cannot be taken back: {switched.why_not}",
            )
        self._coordinator.judged(is_kept=False)
        self._trial, self._is_taken_back = None, False
        self._last_times_s.clear()
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

    def _give_up(
        self, plan: Plan, why: str, step: int, costs_s: Mapping[str, float] | None = None
    ) -> None:
        """Record that the run cannot use this plan, and charge the time of the failed switch."""
        self._run.log_event(
            "decision", step, action="stay", plan=plan.digest, layout=plan.describe(), why=why
        )
        self._display.decision(f"stay: {plan.axes}: {why}")
        self._coordinator.failed(plan, why)
        self._coordinator.charge(sum((costs_s or {}).values()))
        self._drop()


def _phases(costs_s: dict[str, float]) -> dict[str, float]:
    """Costs by phase name without the unit: `move_s` becomes `move`."""
    return {name.removesuffix("_s"): time_s for name, time_s in costs_s.items()}
