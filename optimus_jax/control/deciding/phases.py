"""Batch phases: planned parts of a run with another batch shape, as in batch-size ramps and
sequence-length curricula.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class BatchPhase:
    """A part of the run with its own batch shape."""

    first_step: int
    """First step of the phase, counted from 1."""
    global_batch: int
    """Examples per step."""
    seq_len: int
    """Tokens per example."""

    @property
    def steps_before(self) -> int:
        """Number of steps done before the phase begins."""
        return self.first_step - 1


class BatchPhases:
    """The batch phases of one run.

    Args:
      phases: in order; may be empty. Phases that begin after the run's end are ignored.
      num_steps: number of steps of the run.
    """

    def __init__(self, phases: Sequence[BatchPhase], num_steps: int) -> None:
        self._phases, self._num_steps = (
            tuple([phase for phase in phases if phase.steps_before < num_steps]),
            num_steps,
        )
        self._looked_at: set[BatchPhase] = set()

    def steps_left(self, step: int) -> int:
        """Steps left after `step` in the phase of the next step."""
        ends = [phase.steps_before for phase in self._phases if phase.steps_before > step]
        return max(0, min([*ends, self._num_steps]) - step)

    def near(self, step: int, lead_steps: float) -> BatchPhase | None:
        """A phase that begins within `lead_steps`; None: there is none. Returns each phase once."""
        for phase in self._phases:
            if phase not in self._looked_at and 0 <= phase.steps_before - step <= lead_steps:
                self._looked_at.add(phase)
                return phase
        return None
