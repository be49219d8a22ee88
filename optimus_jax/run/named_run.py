"""Refuses names of published models, adapters and checkpoints where that of a run is wanted."""

from pathlib import Path

from optimus_jax.config.published_config import WHAT
from optimus_jax.config.run_checkpoint import INIT_FROM, RunCheckpoint
from optimus_jax.errors import ConfigError, explain
from optimus_jax.system.command import typed_command
from optimus_jax.system.paths import user_path
from optimus_jax.weights.published import MODEL, PublishedSource
from optimus_jax.weights.published_adapters import PublishedAdapters

RUN, RUN_DIR = "--run", "--run-dir"
"""Flags that name a run: to read it, and to train it."""
_STEP = {RUN: "--step {step}", RUN_DIR: "--resume --set checkpoint.resume_step={step}"}
"""How to choose a checkpoint beside these flags."""


def check_names_run(text: str, *, what: str) -> None:
    """Raise ConfigError if a name is that of something published, or has a step that belongs
    elsewhere. Whether there is a run is checked when it is read.

    Args:
      text: as typed.
      what: name of the flag or argument.
    """
    published = PublishedSource.parse(text, what=what)
    adapters = None if published else PublishedAdapters.parse(text, what=what)
    if published is not None or adapters is not None:
        kind, flag = ("model", MODEL) if published is not None else ("adapters", INIT_FROM)
        raise ConfigError(
            explain(
                f"{what} names {WHAT[kind]}, not a run",
                given=published or adapters,
                do=f"give the directory of a run; {typed_command('train')} {flag} {text} begins"
                " one with it",
            )
        )
    named = RunCheckpoint.parse(text, what=what)
    if named.step is None or Path(text).exists():
        return
    run = user_path(named.run, what=what)
    if isinstance(run, Path) and run.is_dir():
        step = f" {_STEP[what].format(step=named.step)}" if what in _STEP else ""
        raise ConfigError(
            explain(
                f"{what} takes the name of a run, without a step",
                given=text,
                do=f"give {what} {named.run}{step}" if what[:1] == "-" else f"give {named.run}",
            )
        )
