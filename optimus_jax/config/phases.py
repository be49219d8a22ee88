"""Phases of a run: the batch shape of its steps, and where in the data each phase begins.

The *position* in the data is the number of examples used so far, counted separately for each
sequence length. Examples of one length are shuffled once per epoch. A phase continues where an
earlier phase of the same length stopped, so no example repeats before all have been used once.
Another length cuts the same tokens into other examples with a shuffle of their own: its first phase
begins at position 0, and tokens already seen at the old length may appear again at random.

So the batch of a step depends on the config and the step alone, however often the run was
stopped.
"""

from dataclasses import dataclass, replace

from optimus_jax.config import Config


@dataclass(frozen=True, kw_only=True)
class TrainingPhase:
    """Consecutive steps with the same batch size and sequence length."""

    steps_before: int
    """Steps completed before the phase begins."""
    last_step: int | None = None
    """Last step of the phase; None: it lasts until the run ends."""
    global_batch: int
    """Examples per step over all devices."""
    seq_len: int
    """Tokens per example."""
    examples_before: int = 0
    """Examples of this length that earlier phases have used."""

    def __str__(self) -> str:
        return f"{self.global_batch} x {self.seq_len} tokens from step {self.steps_before + 1}"


def phases_of(config: Config) -> tuple[TrainingPhase, ...]:
    """All phases of a run, in order; a single one if the config defines none."""
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
    """The phase that the step after `step` belongs to."""
    return next(phase for phase in reversed(phases_of(config)) if phase.steps_before <= step)


def in_phase(config: Config, phase: TrainingPhase) -> Config:
    """The config of a run that has this phase's batches throughout and evaluates as the whole run
    does.
    """
    if not config.data.phases:
        return config
    evaluation = replace(
        config.evaluation, examples=config.eval_examples, seq_len=config.eval_seq_len
    )
    return replace(
        config,
        evaluation=evaluation,
        data=replace(
            config.data, global_batch=phase.global_batch, seq_len=phase.seq_len, phases=()
        ),
    )
