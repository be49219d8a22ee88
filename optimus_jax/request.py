"""From what a user types, at the command line or in Python, to a Config."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from optimus_jax.config import Config
from optimus_jax.errors import ConfigError, explain, nearest
from optimus_jax.json_input import read_json
from optimus_jax.presets import model_preset
from optimus_jax.settings import setting_names

SHORT_NAMES = {
    "data": "data.sources",
    "tokenizer": "data.tokenizer",
    "seq_len": "data.seq_len",
    "global_batch": "data.global_batch",
    "phases": "data.phases",
    "mesh": "parallel.mesh",
    "zero": "parallel.zero",
    "microbatches": "parallel.microbatches",
    "schedule": "parallel.schedule",
    "remat": "parallel.remat",
    "precision": "precision.compute",
    "steps": "steps",
    "lr": "optimizer.lr",
    "seed": "seed",
    "eval_every": "eval_every",
    "checkpoint_every": "checkpoint.every",
    "control": "control",
    "cpu_devices": "cpu_devices",
    "progress": "log.progress",
    "coordinator": "distributed.coordinator",
    "num_processes": "distributed.num_processes",
    "process_id": "distributed.process_id",
}
"""Settings that people need often, by the name that flags and keyword arguments have for them."""

FIXED_FOR_A_RUN = ("model.", "data.", "seed")
"""What a resumed run keeps: another value would change what its steps mean."""
SAVED_WITH_A_RUN = (*FIXED_FOR_A_RUN, "precision.moments")
"""And what its checkpoints hold in one format: to advise a run that goes on to change it would be wrong."""


def make_config(model: str | None, overrides: Mapping[str, Any], base: Config | None = None) -> Config:
    """A new run's config.

    Args:
      model: name of a preset; None: the base's model.
      overrides: short or dotted names of settings to values.
      base: what to begin with; None: the defaults.
    Raises:
      ConfigError: a name is unknown or a value does not fit.
    """
    # In one go: only the whole has to make sense.
    preset = {} if model is None else {"model": dataclasses.asdict(model_preset(model))}
    return (base or Config()).with_values(preset | _dotted(overrides))


def read_config(path: str | Path) -> Config:
    """The config in a file, such as a run's config.json. Raises ConfigError if there is none."""
    try:
        value = read_json(path)
    except (OSError, ValueError) as error:
        raise ConfigError(explain("a config cannot be read", given=f"{path}: {error}", do="give --config the config.json of a run")) from error
    return Config.from_value(value)


def resumed_config(text: str, model: str | None, overrides: Mapping[str, Any]) -> Config:
    """The config of a run that goes on, with changes to what may change.

    Args:
      text: the run's config.json.
      model: name of the model if it was given again; it must be the run's.
    Raises:
      ConfigError: a change would make it another run.
    """
    old = Config.from_json(text)
    settings = _dotted(overrides)
    new = old.with_values(settings)
    changed = [name for name in settings if name.startswith(FIXED_FOR_A_RUN) and name != "data.allow_change" and _value(new, name) != _value(old, name)]
    if model is not None and model != old.model.name:
        changed.append("model")
    if changed:
        raise ConfigError(explain(
            "a resumed run keeps its model, data and seed", given="changes to " + ", ".join(changed),
            do="leave them out, or start a new run with another --run-dir"))
    return new


def repeated_config(text: str, wanted: Config) -> Config:
    """The config of a run that goes on by the very command that began it, or by one that changes what may change.

    Args:
      text: the run's config.json.
      wanted: what the command says, as for a new run.
    Raises:
      ConfigError: it would be another run.
    """
    old = Config.from_json(text)
    fixed = [name for name in setting_names(Config) if name.startswith(FIXED_FOR_A_RUN) and name != "data.allow_change"
             and not name.startswith("model.rope_scaling.")] + ["model.rope_scaling"]
    if changed := [name for name in fixed if _value(old, name) != _value(wanted, name)]:
        raise ConfigError(explain(
            "the run in this directory has another model, data or seed", given="changes to " + ", ".join(changed),
            do="give what the run was begun with, or start a new run with another --run-dir"))
    return wanted


def typed(changes: Mapping[str, Any]) -> str:
    """What to type for these settings: a flag where there is one, else `--set`.

    Args:
      changes: dotted names to values.
    """
    flags = {dotted: short.replace("_", "-") for short, dotted in SHORT_NAMES.items()}
    return " ".join(f"--{flags[name]} {_text(value)}" if name in flags else f"--set {name}={_text(value)}" for name, value in changes.items())


def _text(value: Any) -> str:
    """A value as `--set` takes it."""
    if isinstance(value, tuple):
        return ",".join(map(_text, value))
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def _dotted(overrides: Mapping[str, Any]) -> dict[str, Any]:
    known = {*SHORT_NAMES, *setting_names(Config)}
    unknown = [name for name in overrides if "." not in name and name not in known]
    if unknown:
        raise ConfigError(explain(f"unknown setting {unknown[0]!r}", given=f"{unknown[0]}={overrides[unknown[0]]}",
                                  do=nearest(unknown[0], known)))
    # A comma separates paths only in text that --set has: a string given in Python is one path.
    return {SHORT_NAMES.get(name, name): (value,) if name == "data" and isinstance(value, str) else value
            for name, value in overrides.items()}


def _value(config: Config, name: str) -> Any:
    value: Any = config
    for part in name.split("."):
        value = getattr(value, part)
    return value
