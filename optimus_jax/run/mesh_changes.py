"""Moves a run to a mesh that the loop of its user asks for, between two steps.

It is a switch like those of a controller: the plan is compiled, the state moves from device to
device and is verified, and the journal has it. But nobody decides, nothing is compiled ahead, and
no trial follows.
"""

import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from optimus_jax.cluster.distributed import all_or_none, assert_same_everywhere
from optimus_jax.config import Config, ParallelConfig
from optimus_jax.config.request import SAVED_WITH_A_RUN, dotted
from optimus_jax.control.phase_changes import log_move
from optimus_jax.control.preparation import Prepared
from optimus_jax.control.switch import Switcher
from optimus_jax.errors import ConfigError, explain
from optimus_jax.plan import Plan
from optimus_jax.planning.local_cluster import known_devices
from optimus_jax.planning.search.choice import choose_plan
from optimus_jax.run.first_plan import RunDevices
from optimus_jax.run.inputs import Inputs
from optimus_jax.run_directory.directory import RunDirectory
from optimus_jax.training.state import TrainState
from optimus_jax.training.trainer import Trainer
from optimus_jax.training.watchers import Display

WHY = "the loop asked for it"
OF_A_MESH = ("send_slack", "stage_residuals", "sequence_parallel")
"""Settings of `parallel` that not every mesh can have."""
POLL_S = 0.2
"""Seconds between two looks at whether the run is to stop."""


class MeshChanges:
    """Moves one run, in one process.

    Args:
      devices: the devices of the run.
      switcher: makes the run's switches.
      inputs: the batches of each plan.
      run: where moves are recorded.
      display: where they are shown.
    """

    def __init__(
        self,
        *,
        devices: RunDevices,
        switcher: Switcher,
        inputs: Inputs,
        run: RunDirectory,
        display: Display,
    ) -> None:
        self._devices, self._switcher = devices, switcher
        self._inputs, self._run, self._display = inputs, run, display

    def __call__(
        self, trainer: Trainer, state: TrainState, step: int, settings: Mapping[str, Any]
    ) -> tuple[Trainer, TrainState, str]:
        """Move the state, which is donated, to another plan. All processes call it after `step`.

        Args:
          settings: of `parallel`, by name; those of the layout that are not given are the planner's
            or the defaults, as at a start.
        Returns:
          The trainer and the state to go on with, and why the state could not be moved; empty: it
          was, or the run was asked to stop meanwhile.
        Raises:
          ConfigError, PlanError: there is no such plan, or it needs more memory than there is.
            `state` is unchanged.
          StateLostError: see control/switch.py.
        """
        plan, source = self._plan(settings), trainer.program.plan
        self._display.message(f"after step {step}: compiling {plan.describe()}")
        started = time.perf_counter()
        with trainer.progress.during("compile"):
            prepared = self._prepared(plan, trainer)
        if prepared is None:
            return trainer, state, ""
        waited_s = time.perf_counter() - started
        with trainer.progress.during("switch"):
            switched = self._switcher.enter(
                state, prepared, step=step, why=WHY, kept_why=WHY, by_choice=False
            )
        if not switched.is_done:
            costs_s = {"wait_s": waited_s, **switched.costs_s}
            self._run.log_event(
                "rollback",
                step,
                plan=source.digest,
                layout=source.describe(),
                from_plan=plan.digest,
                why=f"the move failed: {switched.why_not}",
                phases_s={name.removesuffix("_s"): time_s for name, time_s in costs_s.items()},
                step_delay_s=sum(costs_s.values()),
            )
            return trainer, switched.state, switched.why_not
        if not prepared.stays:
            log_move(self._run, prepared, switched, step, WHY, waited_s=waited_s)
            target = prepared.target
            self._run.log_event(
                "compile",
                step,
                compile_time_s=target.compile_s,
                step_bytes_per_device=target.step_bytes,
            )
            self._display.message(
                f"after step {step} the run continues under {plan.describe()}; the move took"
                f" {sum(switched.costs_s.values()):.2f} s"
            )
        trainer.learning.reset_skipped()
        trainer.progress.forget_steps()
        trainer = trainer.under(switched.executable.program)
        batches = self._inputs.phase_batches(trainer.program, step)
        trainer = replace(trainer, loader=batches.loader, held_out=batches.held_out)
        return trainer, switched.state, ""

    def _plan(self, settings: Mapping[str, Any]) -> Plan:
        """The plan of a mesh, the same in all processes."""
        with all_or_none():
            asked = self._asked(settings)
        cluster = None
        if asked.parallel.axes is None:
            cluster = self._devices.local_cluster or known_devices(self._devices.topology)
        with all_or_none():
            plan = choose_plan(
                asked,
                self._devices.topology,
                None if cluster is None else cluster.pricing(asked),
                fixed=(*SAVED_WITH_A_RUN, "precision."),
            ).plan
        assert_same_everywhere({"the plan to move to": plan.digest})
        return plan

    def _asked(self, settings: Mapping[str, Any]) -> Config:
        """The config with these settings of the layout, and the defaults of all others."""
        config = self._switcher.running.program.config
        named = dotted(settings)
        if others := [name for name in named if not name.startswith("parallel.")]:
            raise ConfigError(
                explain(
                    "a run changes its layout, and nothing else",
                    given=", ".join(f"{name}={named[name]}" for name in others),
                    do="give settings of `parallel`, such as zero=1 or microbatches=4",
                )
            )
        defaults = {name: getattr(ParallelConfig(), name) for name in OF_A_MESH}
        open_layout = replace(config.parallel.with_open_layout(), **defaults)
        return replace(config, parallel=open_layout).with_values(named)

    def _prepared(self, plan: Plan, trainer: Trainer) -> Prepared | None:
        """All that the switch needs, compiled; None: the run is to stop. Raises what went wrong, in
        every process.
        """
        preparation = self._switcher.prepare(plan)
        while trainer.is_alone and not preparation.is_done:
            preparation.wait(POLL_S)
            if trainer.requested_stop != "done":
                preparation.withdraw()
                return None
        with suppress(Exception):
            preparation.result()
        preparation.is_ready_everywhere()
        return preparation.result()
