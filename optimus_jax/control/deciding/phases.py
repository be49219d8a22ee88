"""Parts of a run with batches of their own that are known beforehand: batch-size ramps, curricula
of sequence lengths.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class BatchPhase:
    """A part of the run with its own batches."""

    first_step: int
    """Its first step, counted from 1."""
    global_batch: int
    """Examples of a step."""
    seq_len: int
    """Tokens of an example."""

    @property
    def steps_before(self) -> int:
        """Done when it begins."""
        return self.first_step - 1


class BatchPhases:
    """Those of one run.

    Args:
      phases: in order; may be empty. Those that begin after the run's end do not count.
      num_steps: of the run.
    """

    def __init__(self, phases: Sequence[BatchPhase], num_steps: int) -> None:
        self._phases, self._num_steps = (
            tuple([phase for phase in phases if phase.steps_before < num_steps]),
            num_steps,
        )
        self._looked_at: set[BatchPhase] = set()

    def steps_left(self, step: int) -> int:
        """Of the phase that the step after `step` is in."""
        ends = [phase.steps_before for phase in self._phases if phase.steps_before > step]
        return max(0, min([*ends, self._num_steps]) - step)

    def near(self, step: int, lead_steps: float) -> BatchPhase | None:
        """One that begins within `lead_steps`, and is told of once; None: there is none."""
        for phase in self._phases:
            if phase not in self._looked_at and 0 <= phase.steps_before - step <= lead_steps:
                self._looked_at.add(phase)
                return phase
        return None
