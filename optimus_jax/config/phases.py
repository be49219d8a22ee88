"""Phases of a run: which batches its steps have, and where in the data each phase begins.

The *position* in the data is the number of examples that were used so far, counted for each length
by itself: examples of one length are a deck that is shuffled once an epoch, and a phase deals on
from where an earlier phase of the same length has stopped, so that none comes twice before all have
come once. Another length cuts the same tokens into other examples, which are another deck: its
first phase begins with the first card, and tokens that were seen in examples of the old length come
again in those of the new one as often as chance has it.

So the batch of a step follows from the config and the step alone, however often the run was
stopped.
"""

from dataclasses import dataclass, replace

from optimus_jax.config import Config, EvaluationConfig


@dataclass(frozen=True, kw_only=True)
class TrainingPhase:
    """Steps with batches of one kind."""

    steps_before: int
    """Done when it begins."""
    last_step: int | None
    """Its last one; None: it lasts until the run ends."""
    global_batch: int
    """Examples per step over all devices."""
    seq_len: int
    """Tokens per example."""
    examples_before: int
    """Of this length, that earlier phases have used."""

    def __str__(self) -> str:
        return f"{self.global_batch} x {self.seq_len} tokens from step {self.steps_before + 1}"


def phases_of(config: Config) -> tuple[TrainingPhase, ...]:
    """All phases of a run, in order; one where the config names none."""
    global_batch, seq_len, begins = (
        config.data.global_batch,
        config.seq_len,
        [0, *[phase.after_step for phase in config.data.phases]],
    )
    used: dict[int, int] = {}
    found = []
    for given, begin, end in zip(
        (None, *config.data.phases), begins, [*begins[1:], None], strict=True
    ):
        if given is not None:
            global_batch, seq_len = given.global_batch or global_batch, given.seq_len or seq_len
        before = used.get(seq_len, 0)
        found.append(
            TrainingPhase(
                steps_before=begin,
                last_step=end,
                global_batch=global_batch,
                seq_len=seq_len,
                examples_before=before,
            )
        )
        used[seq_len] = before + ((end or begin) - begin) * global_batch
    return tuple(found)


def phase_after(config: Config, step: int) -> TrainingPhase:
    """That the step after `step` belongs to."""
    return next(phase for phase in reversed(phases_of(config)) if phase.steps_before <= step)


def in_phase(config: Config, phase: TrainingPhase) -> Config:
    """The config of a run that has the batches of this phase all the time, and evaluates as the
    whole run does.
    """
    if not config.data.phases:
        return config
    evaluation = EvaluationConfig(examples=config.eval_examples, seq_len=config.eval_seq_len)
    return replace(
        config,
        evaluation=evaluation,
        data=replace(
            config.data, global_batch=phase.global_batch, seq_len=phase.seq_len, phases=()
        ),
    )
