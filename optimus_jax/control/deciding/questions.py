"""What there is to decide: the questions that follow from what is new about a run.

At most step boundaries there is none. There is one when conditions have changed, devices are lost
or back, memory runs short, a phase is near, or the step times of a plan have become known.
"""

import math
from collections.abc import Iterator
from typing import Literal

from optimus_jax.control import constants
from optimus_jax.control.deciding.candidates import has_room, is_legal
from optimus_jax.control.deciding.memory_watch import MemoryWatch
from optimus_jax.control.deciding.phases import Phases
from optimus_jax.control.deciding.plan_history import PlanHistory
from optimus_jax.control.deciding.prices import Prices
from optimus_jax.control.deciding.run_progress import RunProgress
from optimus_jax.control.deciding.watch import Watch
from optimus_jax.control.signals import Observation
from optimus_jax.control.switch_state import PendingSwitch, Question
from optimus_jax.data.batch import BatchShape


class Questions:
    """The questions of one run. The other parts of its advisor are read, and not changed.

    Args:
      cooldown_steps: `controller.cooldown_steps`; a phase is prepared for at least as early.
    """

    def __init__(
        self,
        *,
        run_progress: RunProgress,
        plan_history: PlanHistory,
        phases: Phases,
        prices: Prices,
        watch: Watch,
        memory_watch: MemoryWatch,
        cooldown_steps: int,
    ) -> None:
        self._run_progress, self._plan_history = run_progress, plan_history
        self._phases, self._prices = phases, prices
        self._watch, self._memory_watch = watch, memory_watch
        self._cooldown_steps = cooldown_steps
        self.lost: frozenset[int] = frozenset()
        """Lost devices."""
        self._at_risk: frozenset[int] = frozenset()
        """Lost devices that the run uses, or is about to use."""
        self._looked = False
        """Whether a question was asked once step times with these batches were known."""

    def new(
        self,
        observation: Observation,
        *,
        is_new_batch: bool,
        conditions: str,
        memory: Literal["pressed", "relieved"] | None,
        pending: PendingSwitch | None,
    ) -> Iterator[Question]:
        """Yields what there is to decide that is new.

        Args:
          observation: the newest readings.
          is_new_batch: whether they are the first with these batches.
          conditions: what is new about conditions, in words; empty: nothing is.
          memory: what is new about memory, as `MemoryWatch.observe` returns it.
          pending: the switch that is being prepared.
        """
        batch = BatchShape(observation.global_batch, observation.seq_len)
        if is_new_batch:
            self._looked = False
        lost, self.lost = self.lost, observation.lost_devices
        # Asked once about the same devices, if the plan that is used, or about to be, has some.
        now = self._plan_history.now
        without = pending.decision.without if pending else now.without
        at_risk, self._at_risk = self._at_risk, self.lost - without
        is_worse = bool(self._at_risk - at_risk) or (bool(self._at_risk) and self.lost != lost)
        forced = (
            ["devices are lost"] * is_worse
            + ["the new batch does not divide evenly under this plan"]
            * (is_new_batch and not is_legal(now.plan, self._prices.of(batch).config))
            + ["memory runs short"] * (memory == "pressed")
        )
        if forced:
            yield Question(trigger="; ".join(forced), mandatory=True)
        if (question := self._about_phase()) is not None:
            yield question
        # News that comes before the level of step times is known waits for that level: otherwise
        # plans would be compared on readings alone, without any measured step time.
        others = (
            ["devices are back"] * bool(lost - self.lost)
            + [conditions] * (bool(conditions) and self._looked)
            + ["memory is free again"] * (memory == "relieved")
        )
        if others:
            yield Question(trigger="; ".join(others))
        elif (
            not self._looked
            and (pending is None or pending.decision.at_step is not None)
            and not forced
            and self._watch.detector.count >= constants.MIN_LEVEL_STEPS
        ):
            self._looked = True
            yield Question(trigger="step times are known")

    def has_to_move(self, batch: BatchShape, at_step: int | None) -> bool:
        """Whether the present plan cannot be kept for these batches, from `at_step` on (None:
        now).
        """
        now, priced = self._plan_history.now, self._prices.of(batch)
        if not self.lost <= now.without or not is_legal(now.plan, priced.config):
            return True
        if at_step is None:
            return self._memory_watch.is_pressed
        return not has_room(now.plan, self._memory_watch.applied(priced))

    def _about_phase(self) -> Question | None:
        """The question about a phase that is near enough to prepare for; None: there is none."""
        level = self._watch.detector.level
        phase = self._phases.near(
            self._run_progress.step,
            max(
                self._cooldown_steps,
                constants.PHASE_LEAD_S / math.exp(level) if level is not None else 0.0,
            ),
        )
        if phase is None:
            return None
        batch = BatchShape(phase.global_batch, phase.seq_len)
        mandatory = self.has_to_move(batch, phase.steps_before)
        is_far = phase.steps_before - self._run_progress.step > constants.MIN_LEVEL_STEPS
        if is_far and not self._looked and not mandatory:
            return None  # the plan for the present batches comes first
        self._phases.asked(phase)
        return Question(
            trigger=f"the phase that begins at step {phase.steps_before + 1}",
            batch=batch,
            at_step=phase.steps_before,
            mandatory=mandatory,
        )
