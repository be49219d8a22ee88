"""Moves a run to a mesh that the loop of its user asks for, between two steps.

It is a switch like those of a controller: the plan is compiled, the state moves from device to
device and is verified, and the journal has it. But nobody decides, nothing is compiled ahead, and
no trial follows.
"""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from optimus_jax.config import Config
from optimus_jax.config.request import dotted
from optimus_jax.control.phase_changes import log_move
from optimus_jax.control.switch import Switcher
from optimus_jax.errors import ConfigError, explain
from optimus_jax.mesh.topology import Topology
from optimus_jax.plan import Plan
from optimus_jax.planning.search.choice import choose_plan
from optimus_jax.planning.search.search import Pricing
from optimus_jax.run.inputs import Inputs
from optimus_jax.run_directory.directory import RunDirectory
from optimus_jax.training.state import TrainState
from optimus_jax.training.trainer import Trainer
from optimus_jax.training.watchers import Display

WHY = "the loop asked for it"


class MeshChanges:
    """Moves one run, in one process.

    Args:
      topology: the devices of the run.
      pricing: the cost model for a config; None: the speed of the devices is unknown.
      switcher: makes the run's switches.
      inputs: the batches of each plan.
      run: where moves are recorded.
      display: where they are shown.
    """

    def __init__(
        self,
        *,
        topology: Topology,
        pricing: Callable[[Config], Pricing | None],
        switcher: Switcher,
        inputs: Inputs,
        run: RunDirectory,
        display: Display,
    ) -> None:
        self._topology, self._pricing, self._switcher = topology, pricing, switcher
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
          was.
        Raises:
          ConfigError, PlanError: there is no such plan, or it needs more memory than there is.
            `state` is unchanged.
          StateLostError: see control/switch.py.
        """
        plan = self._plan(settings)
        with trainer.progress.during("switch"):
            self._display.message(f"after step {step}: compiling {plan.describe()}")
            preparation = self._switcher.prepare(plan)
            with suppress(Exception):  # raised below, in every process
                preparation.result()
            preparation.is_ready_everywhere()
            prepared = preparation.result()
            switched = self._switcher.enter(state, prepared, step=step, why=WHY, by_choice=True)
            if not switched.is_done:
                return trainer, switched.state, switched.why_not
            if not prepared.stays:
                log_move(self._run, prepared, switched, step, WHY)
                self._display.message(
                    f"after step {step} the run continues under {plan.describe()}; the move took"
                    f" {sum(switched.costs_s.values()):.2f} s"
                )
            trainer.learning.reset_skipped()
            trainer = trainer.under(switched.executable.program)
        trainer.progress.forget_steps()
        batches = self._inputs.phase_batches(trainer.program, step)
        trainer = replace(trainer, loader=batches.loader, held_out=batches.held_out)
        return trainer, switched.state, ""

    def _plan(self, settings: Mapping[str, Any]) -> Plan:
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
        open_layout = replace(config, parallel=config.parallel.with_open_layout())
        asked = open_layout.with_values(named)
        return choose_plan(asked, self._topology, self._pricing(asked), fixed=("data.",)).plan
