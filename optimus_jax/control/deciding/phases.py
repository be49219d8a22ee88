"""The phases of a run as decisions see them: how long the present one lasts, and when the next is
near.
"""

from collections.abc import Sequence

from optimus_jax.config.phases import TrainingPhase


class Phases:
    """The phases of one run.

    Args:
      phases: in order; may be empty. Phases that begin after the run's end are ignored.
      num_steps: number of steps of the run.
    """

    def __init__(self, phases: Sequence[TrainingPhase], num_steps: int) -> None:
        self._phases, self._num_steps = (
            tuple([phase for phase in phases if phase.steps_before < num_steps]),
            num_steps,
        )
        self._looked_at: set[TrainingPhase] = set()

    def steps_left(self, step: int) -> int:
        """Steps left after `step` in the phase of the next step."""
        ends = [phase.steps_before for phase in self._phases if phase.steps_before > step]
        return max(0, min([*ends, self._num_steps]) - step)

    def near(self, step: int, lead_steps: float) -> TrainingPhase | None:
        """A phase that begins within `lead_steps`; None: there is none. Returns each phase once."""
        for phase in self._phases:
            if phase not in self._looked_at and 0 <= phase.steps_before - step <= lead_steps:
                self._looked_at.add(phase)
                return phase
        return None
