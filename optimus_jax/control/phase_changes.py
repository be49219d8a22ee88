"""Moves a run from one phase to the next: the step for the new batches is compiled while the run is
still in the phase before.

Under the same plan no state moves, and the run only waits for what is left of the compilation. If
the batches need another plan (planning/search/phase_plans.py) the state moves as in any switch, but
without a trial: step times before and after cannot be compared, and the run cannot go back to the
old batches.
"""

import math
from collections.abc import Callable
from contextlib import suppress

from optimus_jax.config import Config
from optimus_jax.config.phases import TrainingPhase, in_phase, phase_after, phases_of
from optimus_jax.control.executables import Executable
from optimus_jax.control.preparation import Preparation, Prepared
from optimus_jax.control.switch import Switched, Switcher
from optimus_jax.errors import PlanError, explain
from optimus_jax.plan import Plan
from optimus_jax.run_directory.directory import RunDirectory
from optimus_jax.training.state import TrainState
from optimus_jax.training.watchers import Display

PlanOf = Callable[[TrainingPhase, Plan], Plan]
"""(phase, present plan) -> the plan of that phase."""


class PhaseChanges:
    """Moves one run from phase to phase, in one process.

    Args:
      config: the config of the whole run.
      plan_of: finds the plan of a phase.
      switcher: makes the run's switches.
      run: where changes of phase are recorded.
      display: where they are shown.
    """

    def __init__(
        self,
        config: Config,
        plan_of: PlanOf,
        switcher: Switcher,
        run: RunDirectory,
        display: Display,
    ) -> None:
        self._config, self._plan_of, self._switcher, self._run, self._display = (
            config,
            plan_of,
            switcher,
            run,
            display,
        )
        self._phases = phases_of(config)
        self._next: Preparation | None = None
        self._is_for: TrainingPhase | None = None
        self._source: Executable | None = None
        """The executable that `_next` switches from."""

    def prepare(self, step: int, *, within_steps: float = math.inf) -> None:
        """Begin to compile the next phase, if it begins within `within_steps` steps after `step`.

        If the run's executable has changed since, it begins again.
        """
        phase = next(
            (phase for phase in self._phases if step < phase.steps_before < self._config.steps),
            None,
        )
        if (
            phase is not None
            and phase.steps_before - step <= within_steps
            and not self._is_begun(phase)
        ):
            # The error is raised again when the phase begins, where the state can be saved.
            with suppress(PlanError):
                self._prepare(phase)

    def config_after(self, step: int) -> Config:
        """The config with the batches of the step after `step`."""
        return in_phase(self._config, phase_after(self._config, step))

    def is_due(self, step: int) -> bool:
        """Whether the step after `step` needs other batches than the run's executable is for."""
        phase, config = phase_after(self._config, step), self._switcher.running.program.config
        return (phase.global_batch, phase.seq_len) != (config.data.global_batch, config.seq_len)

    def enter(self, state: TrainState, step: int) -> Switched:
        """Enter the phase that begins after `step`; waits for its compilation if necessary.

        Raises:
          PlanError: the phase cannot be trained. `state` is unchanged.
          StateLostError: see control/switch.py.
        """
        phase, switcher = phase_after(self._config, step), self._switcher
        ahead = self._next if self._is_begun(phase) else None
        source, is_ready = switcher.running.plan, ahead is not None and ahead.is_done
        preparation = ahead or self._prepare(phase)
        if not is_ready:
            self._display.message(f"waiting for the step with {phase} to be compiled")
        prepared = _result(preparation, phase)
        why = f"the batches are {phase}"
        switched = switcher.enter(state, prepared, step=step, why=why)
        if switched.is_done:
            if not prepared.stays:
                log_move(self._run, prepared, switched, step, why)
            self.tell(
                source, switched, step, compile_s=prepared.target.compile_s, was_ready=is_ready
            )
        return switched

    def tell(
        self,
        source: Plan,
        switched: Switched,
        step: int,
        *,
        compile_s: float,
        was_ready: bool = True,
    ) -> None:
        """Record and show that the run has entered the phase that begins after `step`.

        Args:
          source: the plan before.
          switched: how the switch went.
          step: number of steps done.
          compile_s: seconds of the compilation.
          was_ready: whether it was done before the phase began.
        """
        plan, phase = switched.executable.plan, phase_after(self._config, step)
        self._run.log_event(
            "phase",
            step,
            global_batch=phase.global_batch,
            seq_len=phase.seq_len,
            examples_before=phase.examples_before,
            plan=plan.digest,
            from_plan=source.digest,
            layout=plan.describe(),
            compile_time_s=compile_s,
            was_ready=was_ready,
            step_delay_s=sum(switched.costs_s.values()),
        )
        changed = "" if plan == source else f", under {plan.describe()}"
        self._display.message(
            f"after step {step} the batches are {phase.global_batch} x {phase.seq_len}"
            f" tokens{changed}"
        )

    def _is_begun(self, phase: TrainingPhase) -> bool:
        return self._is_for == phase and self._source is self._switcher.running

    def _prepare(self, phase: TrainingPhase) -> Preparation:
        self._is_for, self._source, self._next = phase, self._switcher.running, None
        self._next = self._switcher.prepare(
            self._plan_of(phase, self._source.plan), config=in_phase(self._config, phase)
        )
        return self._next


def log_move(
    run: RunDirectory,
    prepared: Prepared,
    switched: Switched,
    step: int,
    why: str,
    *,
    waited_s: float | None = None,
) -> None:
    """Record that the state has moved after `step`, without a decision of a controller.

    Args:
      waited_s: seconds for which training waited for the plan to be compiled; None: it went on
        meanwhile.
    """
    plan = prepared.target.plan
    before_s = {"prepare_s": prepared.compile_s} if waited_s is None else {"wait_s": waited_s}
    phases_s = before_s | switched.costs_s
    run.log_event(
        "remesh",
        step,
        plan=plan.digest,
        layout=plan.describe(),
        from_plan=prepared.source.plan.digest,
        switch_method=None,
        why=why,
        phases_s={name.removesuffix("_s"): time_s for name, time_s in phases_s.items()},
        bytes_moved=prepared.forward.sent_bytes,
        step_delay_s=sum(switched.costs_s.values()) + (waited_s or 0.0),
    )


def _result(preparation: Preparation, phase: TrainingPhase) -> Prepared:
    """Wait for the preparation. Raises PlanError for whatever went wrong."""
    try:
        return preparation.result()
    except PlanError:
        raise
    except Exception as error:
        raise PlanError(
            explain(
                f"the step with {phase} cannot be compiled",
                given=f"{preparation.plan.describe()}: {error}",
                do=(
                    "start again with --resume on more devices or another --mesh; the state is"
                    " saved"
                ),
            )
        ) from error
