"""The controller: closes the loop of a run.

It measures, decides, prepares, and moves the run to another plan.

The trainer tells it what only the loop can see and asks at every step boundary whether to go on
(`leaves`). When it says that the run leaves its plan, the trainer returns, `carry_out` moves the
state, and another trainer goes on from there. What is known of a plan's first steps decides whether
it is kept.
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
from optimus_jax.data.batch import Batch
from optimus_jax.devices.hosts import devices_by_host
from optimus_jax.errors import OptimusError
from optimus_jax.plan import Plan
from optimus_jax.run_directory.directory import RunDirectory
from optimus_jax.run_directory.step_record import StepRecord
from optimus_jax.training.state import TrainState
from optimus_jax.training.watchers import Display


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
        if (
            upcoming is not None
            and upcoming.usual_s is not None
            and not upcoming.preparation.is_done
        ):
            upcoming.tax_s += record.step_time_s - upcoming.usual_s
        self._last_times_s.append(record.step_time_s)

    def evaluation(
        self, step: int, loss: float, perplexity: float, bits_per_byte: float | None
    ) -> None:
        """An evaluation says nothing about steps."""

    def is_probe_due(self, step: int) -> bool:
        """Whether to let the devices finish `step` and call `probe`; the same answer in every
        process.
        """
        return not self._is_crowded and self._signals.is_probe_due(step)

    def probe(self, step: int) -> None:
        """The devices are free: measure links and compute."""
        self._signals.probe(step)

    @property
    def is_on_trial(self) -> bool:
        """Whether the plan is new: if it does not train it is taken back.

        All processes have begun and end a trial after the same step.
        """
        return self._trial is not None

    def leaves(self, step: int) -> bool:
        """Whether the run is to go on under another plan after `step`."""
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
        if not self._commands.is_held(step):
            # All have heard of a boundary that a plan was prepared for.
            return (
                self._upcoming is not None
                and self._upcoming.command.at_step == step
                and self._is_ready(step)
            )
        for command in self._commands.receive(step, self._last_times_s):
            self._obey(command, step)
        return self._is_taken_back or self._is_ready(step)

    def carry_out(self, state: TrainState, step: int) -> tuple[TrainState, Executable]:
        """Move the state, which is used up, to the plan that was decided on, or back.

        Every process calls it after `step`.

        Returns:
          The state, and what the run goes on with; if the move failed, those from before.
        Raises:
          StateLostError: the newest checkpoint is all that is left.
        """
        switched = (
            self._take_back(state, step) if self._is_taken_back else self._switch(state, step)
        )
        return switched.state, switched.executable

    def enter_phase(self, switched: Switched, source: Plan) -> None:
        """The run has gone on to other batches, perhaps from plan `source` to another, without an
        order.

        What was being prepared is for the batches before, with which first steps cannot be compared
        any more either.
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
        """Signals of a run that goes on under another plan; seconds that it stood still for the
        first probes there.
        """
        config, started = executable.program.config, time.perf_counter()
        self._signals.enter(
            global_batch=config.data.global_batch,
            seq_len=config.seq_len,
            rounds=self._probes.on(executable.program.mesh),
        )
        return time.perf_counter() - started

    def stop(self, step: int) -> None:
        """The run ends on purpose after `step`."""
        self._switcher.stop(
            step=step, costs_s=self._trial.spent_s if self._trial is not None else {}
        )

    def close(self) -> None:
        """The run has ended, well or not."""
        if self._upcoming is not None and not self._upcoming.preparation.is_done:
            self._display.message(
                f"waiting for the compilation of {self._upcoming.preparation.plan.axes} to end"
            )
        self._switcher.close()
        self._coordinator.close()
        self._signals.close()

    def _look_ahead(self, step: int) -> None:
        """Have a phase that is near prepared, but not while the first steps under a plan are timed:
        compiling slows them on a CPU.
        """
        if self._changes is not None and self._trial is None:
            times_s = self._last_times_s
            lead_steps = LEAD_S / max(statistics.median(times_s), 1e-9) if times_s else 0.0
            self._changes.prepare(step, within_steps=max(self._settings.cooldown_steps, lead_steps))

    def _observed(self, step: int) -> Observation:
        """What the first process has seen."""
        observation = self._signals.observe(step, self._reported())
        return replace(observation, step_times_s=()) if self._is_crowded else observation

    @property
    def _is_crowded(self) -> bool:
        """Whether a plan is being compiled on the cores that are the devices: what is timed
        meanwhile says nothing of links or plans.
        """
        return (
            self._upcoming is not None
            and self._upcoming.looks_since is None
            and self._trial is None
            and jax.default_backend() == "cpu"
        )

    # What all processes do.

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
            if self._upcoming.preparation.is_done:  # no step was done meanwhile
                self._commands.send(Command(kind="go", plan=command.plan))
        elif command.kind == "withdraw":
            self._drop()
        elif (
            command.kind in ("look", "go")
            and self._upcoming is not None
            and self._upcoming.command.plan == command.plan
        ):
            self._upcoming.looks_since, self._upcoming.may_go = (
                step,
                self._upcoming.may_go or command.kind == "go",
            )
        elif command.kind == "probe":
            self._signals.ask_probe(step + 1, anew=command.anew, worth_s=command.worth_s)
        elif command.kind == "keep" and self._trial is not None:
            self._switcher.keep(step=step, why=command.why, costs_s=self._trial.spent_s)
            self._display.decision(f"kept: {command.why}")
            self._trial = None
            self._coordinator.judged(is_kept=True)
        elif command.kind == "take back" and self._trial is not None:
            self._is_taken_back = True
            self._drop()

    def _drop(self) -> None:
        """Nobody waits for what is being prepared any more."""
        if self._upcoming is not None:
            self._upcoming.preparation.withdraw()
            self._coordinator.charge(max(0.0, self._upcoming.tax_s))
        self._upcoming = None

    def _is_ready(self, step: int) -> bool:
        """Whether the plan that is being prepared is ready in all processes, at its boundary."""
        # While the first steps under a plan are watched, the way back has to stay open.
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
            self._give_up(
                preparation.plan, f"it could not be prepared: {str(error).splitlines()[0]}", step
            )
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
            bytes_moved=prepared.there.sent_bytes,
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
            f"after step {step} the run goes on under {target.describe()}; it stood still for"
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
            else "the first process said so"
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
        """A plan that the run cannot have, after a move that took so long."""
        self._run.log_event(
            "decision", step, action="stay", plan=plan.digest, layout=plan.describe(), why=why
        )
        self._display.decision(f"stay: {plan.axes}: {why}")
        self._coordinator.failed(plan, why)
        self._coordinator.charge(sum((costs_s or {}).values()))
        self._drop()


def _phases(costs_s: dict[str, float]) -> dict[str, float]:
    """By name alone: `move_s` is the time of phase `move`."""
    return {name.removesuffix("_s"): time_s for name, time_s in costs_s.items()}
