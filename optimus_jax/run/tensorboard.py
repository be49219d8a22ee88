"""The numbers of metrics.jsonl as TensorBoard scalars."""

import importlib.util
from pathlib import Path
from typing import Self

from optimus_jax.errors import ConfigError, explain
from optimus_jax.run_directory.step_record import EvalRecord, StepRecord


def check_installed() -> None:
    """Raise ConfigError if the extra `tensorboard` is not installed."""
    if importlib.util.find_spec("tensorboardX") is None:
        raise ConfigError(
            explain(
                "TensorBoard scalars need a package that is not installed",
                given="log.tensorboard=true",
                do="pip install 'optimus-jax[tensorboard]', or leave log.tensorboard out",
            )
        )


class TensorBoardWriter:
    """Writes scalars of a run as TensorBoard events.

    Args:
      directory: directory of the event files.
      first_step: first step that this process will train; TensorBoard hides what an earlier process
        wrote for this and later steps.
    Raises:
      ConfigError: the extra `tensorboard` is not installed.
    """

    def __init__(self, directory: Path, *, first_step: int = 1) -> None:
        check_installed()
        from tensorboardX import SummaryWriter

        self._writer = SummaryWriter(str(directory), purge_step=first_step)

    def step(self, record: StepRecord) -> None:
        """Write the scalars of a step; unknown ones are left out."""
        for tag, value in (
            ("train/loss", record.loss),
            ("train/grad_norm", record.grad_norm),
            ("train/lr", record.lr),
            ("train/loss_scale", record.loss_scale),
            ("speed/tokens_per_s", record.tokens_per_s),
            ("speed/step_time_s", record.step_time_s),
            ("speed/mfu", record.mfu),
            ("speed/peak_bytes", record.peak_bytes),
            *((f"train/{name}", value) for name, value in record.metrics.items()),
        ):
            self._add(tag, value, record.step)

    def evaluation(self, record: EvalRecord) -> None:
        """Write the scalars of an evaluation on held-out text."""
        for tag, value in (
            ("eval/loss", record.loss),
            ("eval/perplexity", record.perplexity),
            ("eval/bits_per_byte", record.bits_per_byte),
            *((f"eval/{name}", value) for name, value in record.metrics.items()),
        ):
            self._add(tag, value, record.step)

    def _add(self, tag: str, value: float | None, step: int) -> None:
        if value is not None:
            self._writer.add_scalar(tag, value, step)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._writer.close()
