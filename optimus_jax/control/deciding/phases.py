"""The phases of a run as decisions see them: how long the present one lasts, and when the next is
near.
"""

from collections.abc import Iterable, Sequence

from optimus_jax.config.phases import TrainingPhase


def steps_left(step: int, ends: Iterable[int]) -> int:
    """Steps after `step` until the first of these boundaries that is not over; 0: all are."""
    return min([end - step for end in ends if end > step], default=0)


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
        self._asked: set[TrainingPhase] = set()

    def steps_left(self, step: int) -> int:
        """Steps left after `step` in the phase of the next step."""
        ends = [phase.steps_before for phase in self._phases]
        return steps_left(step, (*ends, self._num_steps))

    def tokens_left(self, step: int, tokens_per_step: int) -> int:
        """Tokens of the steps after `step`.

        Args:
          tokens_per_step: those of a step before the first phase; of all steps, if there is none.
        """
        ends = [*[phase.steps_before for phase in self._phases[1:]], self._num_steps]
        sizes = [phase.global_batch * phase.seq_len for phase in self._phases] or [tokens_per_step]
        begins = [0, *ends]
        return sum(
            size * max(0, end - max(begin, step))
            for size, begin, end in zip(sizes, begins, ends, strict=False)
        )

    def beginning(self, step: int) -> TrainingPhase | None:
        """The phase that begins after `step`; None: none does."""
        return next((phase for phase in self._phases if phase.steps_before == step), None)

    def near(self, step: int, lead_steps: float) -> TrainingPhase | None:
        """A phase that begins within `lead_steps` and is not decided about yet; None: there is
        none.
        """
        for phase in self._phases:
            if phase not in self._asked and 0 <= phase.steps_before - step <= lead_steps:
                return phase
        return None

    def asked(self, phase: TrainingPhase) -> None:
        """Record that there is a question about this phase."""
        self._asked.add(phase)
