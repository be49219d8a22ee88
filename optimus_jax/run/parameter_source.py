"""What `--init-from` names: a run, of which parameters are read, or a published model."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from optimus_jax.config import Config, ModelConfig
from optimus_jax.config.run_checkpoint import INIT_FROM, RunCheckpoint
from optimus_jax.errors import ConfigError, explain
from optimus_jax.run.stored_run import run_to_read
from optimus_jax.run_directory.directory import RunDirectory
from optimus_jax.weights.published import PublishedSource


@dataclass(frozen=True)
class RunSource:
    """Another run, or one of its checkpoints."""

    named: RunCheckpoint

    def __str__(self) -> str:
        return str(self.named)

    def config(self) -> ModelConfig:
        """The run's model. Raises OptimusError if there is no such run."""
        return self.settings().model

    def tokenizer(self) -> str:
        """The run's tokenizer, as `--tokenizer` takes it: its own copy, if it has one."""
        own = open_run(self.named, checkpoint="none").tokenizer
        return self.settings().data.tokenizer if own is None else str(own)

    def settings(self) -> Config:
        """All settings of the run. Raises OptimusError if there is no such run."""
        return Config.from_json(open_run(self.named, checkpoint="none").config_text())


def parameter_source(init_from: str) -> PublishedSource | RunSource:
    """What a text names: a published model, or otherwise a run.

    Raises ConfigError for a published model with a step.
    """
    published = PublishedSource.parse(init_from, what=INIT_FROM)
    if published is not None:
        return published
    named = RunCheckpoint.parse(init_from, what=INIT_FROM)
    if named.step is not None and PublishedSource.parse(named.run, what=INIT_FROM) is not None:
        raise ConfigError(
            explain(
                "a published model has no checkpoints",
                given=f"{INIT_FROM} {init_from}",
                do=f"leave @{named.step} out",
            )
        )
    return RunSource(named)


def open_run(
    named: RunCheckpoint,
    *,
    checkpoint: int | Literal["none"] | None,
    say: Callable[[str], object] = lambda text: None,
) -> RunDirectory:
    """The directory of a run, or a local copy of it, to be read. Raises OptimusError if it holds no
    run.

    Args:
      checkpoint: as for `run_to_read`.
    """
    path = run_to_read(named.run, what=INIT_FROM, checkpoint=checkpoint, say=say)
    run = RunDirectory(path, writer=False)
    if not run.is_begun:
        wrong = "which has no config.json" if path.is_dir() else "which is not a directory"
        raise ConfigError(
            explain(
                f"{INIT_FROM} names neither a run nor a published model",
                given=f"{named.run}, {wrong}",
                do=f"give the directory that was the --run-dir of a run: {INIT_FROM} DIR, or"
                " DIR@STEP for one of its checkpoints; or that of a published model, with its"
                " config.json",
            )
        )
    return run
