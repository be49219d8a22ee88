"""From what a user types, at the command line or in Python, to a Config."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from optimus_jax.config import Config
from optimus_jax.errors import ConfigError, explain, nearest
from optimus_jax.paths import UserPath
from optimus_jax.presets import model_preset
from optimus_jax.settings import setting_names, value_of
from optimus_jax.store.local_copies import local_file

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
KNOWN_BY_CONTENT = ("data.sources", "data.tokenizer", "data.eos", "data.text_field", "data.skip_bad_lines", "data.allow_change")
"""And of that what may be said otherwise: files that have moved are the same data. Whether they are, their content says (first_state.py)."""
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
    return _with_whole_paths((base or Config()).with_values(preset | _dotted(overrides)))


def read_config(path: UserPath) -> Config:
    """The config in a file or object, such as a run's config.json, without the place where that run works. Raises OptimusError if there is none."""
    try:
        text = local_file(path, what="--config").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(explain("a config cannot be read", given=f"{path}: {error}", do="give --config the config.json of a run")) from error
    return Config.from_json(text).with_values({"store.local_dir": None})


def resumed_config(text: str, model: str | None, overrides: Mapping[str, Any]) -> Config:
    """The config of a run that goes on, with changes to what may change.

    Args:
      text: the run's config.json.
      model: name of the model if it was given again; it must be the run's.
    Raises:
      ConfigError: a change would make it another run.
    """
    old, derived = Config.from_json(text), Config.derived_in(text)
    settings = _dotted(overrides)
    new = _with_whole_paths(old.with_values(settings))
    changed = [name for name in settings if _is_fixed(name) and _is_changed(name, old, new, derived)]
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
    old, derived = Config.from_json(text), Config.derived_in(text)
    fixed = [name for name in setting_names(Config) if _is_fixed(name) and not name.startswith("model.rope_scaling.")] + ["model.rope_scaling"]
    if changed := [name for name in fixed if _is_changed(name, old, wanted, derived)]:
        raise ConfigError(explain(
            "the run in this directory has another model, data or seed", given="changes to " + ", ".join(changed),
            do="give what the run was begun with, or start a new run with another --run-dir"))
    return wanted


def _with_whole_paths(config: Config) -> Config:
    return dataclasses.replace(config, data=config.data.with_whole_paths())


def _is_fixed(name: str) -> bool:
    return name.startswith(FIXED_FOR_A_RUN) and name not in KNOWN_BY_CONTENT


def named_settings(overrides: Mapping[str, Any]) -> frozenset[str]:
    """The dotted names of what a user has named. Raises ConfigError for an unknown one."""
    return frozenset(_dotted(overrides))


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
    found = {SHORT_NAMES.get(name, name): (value,) if name == "data" and isinstance(value, str) else value
             for name, value in overrides.items()}
    return _of_one_name(found)


EVAL_EXAMPLES, OLD_EVAL_EXAMPLES = "evaluation.examples", "eval_batches"


def _of_one_name(values: dict[str, Any]) -> dict[str, Any]:
    """Whichever name of the evaluation set was used, the other one no longer counts."""
    if values.get(EVAL_EXAMPLES) is not None and values.get(OLD_EVAL_EXAMPLES) is not None:
        raise ConfigError(explain(
            f"{OLD_EVAL_EXAMPLES} is the old name of {EVAL_EXAMPLES}",
            given=f"{OLD_EVAL_EXAMPLES}={values[OLD_EVAL_EXAMPLES]}, {EVAL_EXAMPLES}={values[EVAL_EXAMPLES]}",
            do=f"give {EVAL_EXAMPLES} only"))
    if values.get(OLD_EVAL_EXAMPLES) is not None:
        return values | {EVAL_EXAMPLES: None}
    if EVAL_EXAMPLES in values:
        return values | {OLD_EVAL_EXAMPLES: None}
    return values | {EVAL_EXAMPLES: None} if OLD_EVAL_EXAMPLES in values else values


def _is_changed(name: str, old: Config, new: Config, derived: Mapping[str, Any]) -> bool:
    """Whether a setting says another thing than it did; a length that was left open has been derived."""
    if name != "data.seq_len":
        return value_of(new, name) != value_of(old, name)
    before = derived.get(name, old.seq_len) if old.data.seq_len is None else old.data.seq_len
    return (before if new.data.seq_len is None and old.data.seq_len is None else new.seq_len) != before
