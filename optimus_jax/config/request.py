"""Makes a Config from the settings given at the command line or in Python."""

import dataclasses
import os
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from optimus_jax.config import DERIVED, Config, ModelConfig
from optimus_jax.config.advice import advice_for, advice_for_value, spelled_like
from optimus_jax.config.aliases import (
    PARAMETERS,
    RENAMED,
    RETIRED,
    SPELLED_ANEW,
    alias_of,
    meant_by_last_part,
    word,
)
from optimus_jax.config.axes import mesh_text
from optimus_jax.config.presets import model_preset
from optimus_jax.config.published_config import WHAT, published_kind
from optimus_jax.config.recipes import recipe_settings
from optimus_jax.config.run_checkpoint import INIT_FROM, RunCheckpoint
from optimus_jax.config.settings import (
    compared_settings,
    field_types,
    section_type,
    shown,
    value_of,
)
from optimus_jax.config.suggestions import known_settings, of_inner_section, of_section
from optimus_jax.config.tuning import SETTINGS_OF, Method, Tuning
from optimus_jax.errors import ConfigError, argument, explain
from optimus_jax.store.local_copies import local_file
from optimus_jax.system.hub_model import HubModel
from optimus_jax.system.json_input import read_json
from optimus_jax.system.paths import UserPath

SHORT_NAMES = {
    "data": "data.sources",
    "eval_data": "evaluation.data",
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
    "recipe": "recipe",
    "task": "task",
    "steps": "steps",
    "lr": "optimizer.lr",
    "seed": "seed",
    "init_from": "init_from",
    "eval_every": "eval_every",
    "checkpoint_every": "checkpoint.every",
    "control": "control",
    "cpu_devices": "cpu_devices",
    "progress": "log.progress",
    "verbose": "log.verbose",
    "log": "log.trackers",
    "profile": "log.profile",
    "coordinator": "distributed.coordinator",
    "num_processes": "distributed.num_processes",
    "process_id": "distributed.process_id",
}
"""Short name (of a flag or keyword argument) to the dotted name of a common setting."""

FIXED_FOR_A_RUN = (
    "model.",
    "data.",
    "seed",
    "init_from",
    "adapters_from",
    "task",
    "recipe",
    "optimizer.name",
)
"""Prefixes of settings that a resumed run keeps: another value would make it a different run."""
OF_ADAPTERS: Mapping[Method, frozenset[str]] = {
    method: frozenset(f"model.tuning.{name}" for name in names)
    for method, names in SETTINGS_OF.items()
}
"""Settings that say which adapters of a method a model has."""
KNOWN_BY_CONTENT = (
    "data.sources",
    "data.tokenizer",
    "data.eos",
    "data.chat_template",
    "data.text_field",
    "data.second_text_field",
    "data.label_field",
    "data.skip_bad_lines",
    "data.allow_change",
    "evaluation.data",
)
"""Exceptions to FIXED_FOR_A_RUN: data files may have moved. run/first_state.py compares their
content."""
SAVED_WITH_A_RUN = (*FIXED_FOR_A_RUN, "precision.moments")
"""FIXED_FOR_A_RUN, and the format of what checkpoints hold. A resumed run must not be advised to
change any of these."""


def make_config(
    model: str | ModelConfig | None, overrides: Mapping[str, Any], base: Config | None = None
) -> Config:
    """A new run's config.

    Args:
      model: a model, or the name of a preset; None: the base's model.
      overrides: short or dotted names of settings to values.
      base: the config to start from; None: the defaults.
    Raises:
      ConfigError: a name is unknown or a value does not fit.
    """
    # All changes at once: only the final combination has to be valid.
    if not isinstance(model, ModelConfig | None):
        model = model_preset(model)
    chosen, named = {} if model is None else {"model": dataclasses.asdict(model)}, dotted(overrides)
    recipe = recipe_settings(named["recipe"]) if named.get("recipe") else {}
    config = (base or Config()).with_values({**chosen, **recipe, **named})
    _check_adapters(config.model.tuning, named)
    return _with_whole_paths(config)


def _check_adapters(tuning: Tuning, named: Mapping[str, Any]) -> None:
    """Raise ConfigError if a setting of adapters is among those named, and has no use."""
    unused = named.keys() & frozenset().union(*OF_ADAPTERS.values()) - OF_ADAPTERS[tuning.method]
    if not unused:
        return
    raise ConfigError(
        explain(
            f"{tuning.method} has no such setting"
            if tuning.has_adapters
            else "settings of adapters have no use without adapters: all of the model would be"
            " trained",
            given=", ".join(f"{name}={shown(named[name])}" for name in sorted(unused))
            + f"; model.tuning.method={tuning.method}",
            do="add --set model.tuning.method=lora, or leave them out",
        )
    )


def read_config(path: UserPath) -> Config:
    """The config in a file or object, such as a run's config.json, without that run's local
    directory. Raises OptimusError if it cannot be read.
    """
    try:
        # `build` names the setting that is not finite
        value = read_json(local_file(path, what="--config"), finite=False)
    except (OSError, ValueError) as error:
        raise ConfigError(
            explain(
                "a config cannot be read",
                given=f"{path}: {error}",
                do="give --config the config.json of a run",
            )
        ) from error
    if (kind := published_kind(value)) is not None:
        flag = "--model" if kind == "model" else INIT_FROM
        raise ConfigError(
            explain(
                f"--config names the config of {WHAT[kind]}, not that of a run",
                given=path,
                do=f"give its directory: {flag} {os.path.dirname(path) or '.'}",
            )
        )
    return Config.from_value(_in_our_words(value)).with_values({"store.local_dir": None})


def resumed_config(text: str, model: str | None, overrides: Mapping[str, Any]) -> Config:
    """The config of a resumed run, with the changes that a resumed run allows.

    Args:
      text: the run's config.json.
      model: name of the model if it was given again; it must be the run's.
    Raises:
      ConfigError: a setting that a resumed run keeps was changed.
    """
    old, derived = Config.from_json(text), Config.derived_in(text)
    settings = dotted(overrides)
    new = _with_whole_paths(old.with_values(settings))
    changed = [
        name for name in settings if _is_fixed(name) and _is_changed(name, old, new, derived)
    ]
    if model is not None and model != old.model.name:
        changed.append("model")
    if changed:
        raise ConfigError(
            explain(
                "a resumed run keeps its model, data and seed",
                given="changes to " + ", ".join(changed),
                do="leave them out, or start a new run with another --run-dir",
            )
        )
    return new


def repeated_config(text: str, wanted: Config) -> Config:
    """The config of a run that is resumed by repeating its first command, perhaps with allowed
    changes.

    Args:
      text: the run's config.json.
      wanted: the config that the command gives, as for a new run.
    Raises:
      ConfigError: a setting that a resumed run keeps was changed.
    """
    old, derived = Config.from_json(text), Config.derived_in(text)
    if not wanted.model.labels:  # the data decided
        labels = {"labels": old.model.labels, "labelled": old.model.labelled}
        wanted = dataclasses.replace(wanted, model=dataclasses.replace(wanted.model, **labels))
    fixed = [name for name in compared_settings(Config) if _is_fixed(name)]
    if changed := [name for name in fixed if _is_changed(name, old, wanted, derived)]:
        raise ConfigError(
            explain(
                "the run in this directory has another model, data or seed",
                given="changes to " + ", ".join(changed),
                do="use the settings of the run's start, or a new run with another --run-dir",
            )
        )
    return wanted


def _with_whole_paths(config: Config) -> Config:
    named = config.init_from
    return dataclasses.replace(
        config,
        data=config.data.with_whole_paths(),
        evaluation=config.evaluation.with_whole_paths(),
        init_from=named
        and str(
            HubModel.parse(named) or RunCheckpoint.parse(named, what=INIT_FROM).with_whole_path()
        ),
        adapters_from=config.adapters_from and os.path.abspath(config.adapters_from),
    )


def _is_fixed(name: str) -> bool:
    return name.startswith(FIXED_FOR_A_RUN) and name not in KNOWN_BY_CONTENT


def named_settings(overrides: Mapping[str, Any]) -> frozenset[str]:
    """The dotted names of the settings given. Raises ConfigError for an unknown one."""
    return frozenset(dotted(overrides))


def typed(changes: Mapping[str, Any]) -> str:
    """Command-line text for these settings, as a shell reads it: a flag where one exists, else
    `--set`.

    Args:
      changes: dotted names to values.
    """
    flags = {dotted: short.replace("_", "-") for short, dotted in SHORT_NAMES.items()}
    words = [
        word
        for name, value in changes.items()
        for word in (
            (f"--{flags[name]}", _text(value))
            if name in flags
            else ("--set", f"{name}={_text(value)}")
        )
    ]
    return shlex.join(words)


def _text(value: Any) -> str:
    """A value as `--set` takes it."""
    if isinstance(value, tuple):
        return ",".join(map(_text, value))
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


Entry = tuple[str, Any, str]
"""A setting as given: its name, its value, and the text that the user typed."""


def say(text: str) -> None:
    """Print a note, for example that another framework's name was translated."""
    print(f"note: {text}", file=sys.stderr)


def canonical(entries: Iterable[Entry], *, note: Callable[[str], None] = say) -> dict[str, Any]:
    """Settings by their dotted names, whichever name they were given by.

    Args:
      entries: names are short (`lr`), dotted (`optimizer.lr`) or another framework's
        (`learning_rate`).
      note: called with a message for each translated name of another framework.
    Raises:
      ConfigError: a name is unknown, or a setting has two values.
    """
    entries = list(entries)
    others = {word(name): value for name, value, _ in entries}
    found: dict[str, tuple[Any, str]] = {}
    for name, value, typed in entries:
        target, is_ours = _target(name, value, others)
        if not is_ours:
            note(f"{name} is taken as {target}")
        if (
            target in (SHORT_NAMES["data"], SHORT_NAMES["eval_data"])
            and name != target
            and isinstance(value, str)
        ):
            # only in the text of --set does a comma separate paths; a string given in Python is one
            # path
            value = (value,)
        if target == SHORT_NAMES["mesh"]:
            value = mesh_text(value)
        if (advice := advice_for_value(target, value)) is not None:
            raise ConfigError(explain(f"unknown value for {target}", given=typed, do=advice))
        if target in found and not _same(found[target][0], value):
            raise ConfigError(
                explain(
                    f"{target} is given two values",
                    given=f"{found[target][1]} and {typed}",
                    do="give one of them",
                )
            )
        found[target] = value, typed
    return _of_one_name({target: value for target, (value, _) in found.items()})


def _target(name: str, value: Any, others: Mapping[str, Any]) -> tuple[str, bool]:
    """The dotted name of a setting, and whether `name` is this project's name for it.

    Raises ConfigError for an unknown name.
    """
    names = known_settings()
    for own in (name, name.replace("-", "_")):
        if own in SHORT_NAMES or own in RENAMED:
            return SHORT_NAMES.get(own) or RENAMED[own], True
        if own in names or any(each.startswith(f"{own}.") for each in names):
            return own, True
        if own in RETIRED:
            raise ConfigError(
                explain(
                    f"there is no setting {own} any more",
                    given=f"{name}={shown(value)}",
                    do=RETIRED[own],
                )
            )
    target = alias_of(name)
    if target is not None and target not in PARAMETERS:
        return target, False
    parameter = target or (word(name) if word(name) in PARAMETERS else None)
    advice = (
        f"write {argument(parameter, str(value))}: it is not a setting"
        if parameter
        else advice_for(name, value, others)
    )
    if advice is None and (meant := meant_by_last_part(name)) is not None:
        advice = f"did you mean {meant!r}?"
    raise ConfigError(
        explain(
            f"unknown setting {name!r}",
            given=f"{name}={shown(value)}",
            do=advice
            or of_inner_section(name)
            or spelled_like(name, [*SHORT_NAMES, *names], value, others)
            or of_section(name, SHORT_NAMES),
        )
    )


def _same(value: Any, other: Any) -> bool:
    """Whether two values, as typed, mean the same."""
    if isinstance(value, list | tuple) or isinstance(other, list | tuple):
        return (
            [*map(str, value)] == [*map(str, other)]
            if isinstance(value, list | tuple) and isinstance(other, list | tuple)
            else False
        )
    try:
        return str(value) == str(other) or float(value) == float(other)
    except (TypeError, ValueError):
        return False


def parameters(
    overrides: Mapping[str, Any], given: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arguments of `train` given by another framework's name, such as `output_dir`, and the
    remaining settings.

    Args:
      given: arguments given by this project's names; None: not given.
    Raises:
      ConfigError: an argument has two values.
    """
    found, rest = dict(given), dict(overrides)
    for name, value in overrides.items():
        if (target := alias_of(name)) in PARAMETERS:
            if found.get(target) is not None and not _same(found[target], value):
                raise ConfigError(
                    explain(
                        f"{target} is given two values",
                        given=f"{target}={found[target]} and {name}={value}",
                        do="give one of them",
                    )
                )
            say(f"{name} is taken as {target}")
            found[target] = value
            del rest[name]
    return found, rest


def dotted(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """`canonical` of settings given in Python."""
    return canonical((name, value, f"{name}={shown(value)}") for name, value in overrides.items())


def _in_our_words(value: Any) -> Any:
    """The JSON value of a config, with names of other frameworks translated. Raises
    ConfigError."""
    if not isinstance(value, Mapping):
        return value
    kinds, entries, result = field_types(Config), [], {}
    for name, item in value.items():
        if (
            name in kinds
            and isinstance(item, Mapping)
            and (section := section_type(kinds[name])) is not None
        ):
            known = [each for each in SPELLED_ANEW if each.startswith(f"{name}.")]
            own = {*field_types(section), *(each.rpartition(".")[2] for each in known)}
            result[name] = {inner: each for inner, each in item.items() if inner in own}
            entries += [
                pair
                for inner, each in item.items()
                if inner not in own
                for pair in _leaves(f"{name}.{inner}", each)
            ]
        elif name in kinds or name == DERIVED:
            result[name] = item
        else:
            entries += _leaves(name, item)
    for target, item in canonical(
        (name, item, f"{name}: {shown(item)}") for name, item in entries
    ).items():
        section, _, leaf = target.rpartition(".")
        place = result.setdefault(section, {}) if section else result
        if not isinstance(place, dict) or "." in section:
            raise ConfigError(
                explain(
                    f"setting {target!r} cannot be set at this level",
                    given=shown(item),
                    do=f"write it inside {section!r}",
                )
            )
        if leaf in place and not _same(place[leaf], item):
            raise ConfigError(
                explain(
                    f"{target} is given two values",
                    given=f"{shown(place[leaf])} and {shown(item)}",
                    do="give one of them",
                )
            )
        place[leaf] = item
    return result


def _leaves(name: str, item: Any) -> list[tuple[str, Any]]:
    """The values of a nested section, by dotted names."""
    if not isinstance(item, Mapping) or not item or name.count(".") > 9:
        return [(name, item)]
    return [pair for inner, each in item.items() for pair in _leaves(f"{name}.{inner}", each)]


EVAL_EXAMPLES, OLD_EVAL_EXAMPLES = "evaluation.examples", "eval_batches"


def _of_one_name(values: dict[str, Any]) -> dict[str, Any]:
    """Reset the other name of the evaluation set's size, so that only the given one counts."""
    if values.get(EVAL_EXAMPLES) is not None and values.get(OLD_EVAL_EXAMPLES) is not None:
        raise ConfigError(
            explain(
                f"{OLD_EVAL_EXAMPLES} is the old name of {EVAL_EXAMPLES}",
                given=(
                    f"{OLD_EVAL_EXAMPLES}={values[OLD_EVAL_EXAMPLES]},"
                    f" {EVAL_EXAMPLES}={values[EVAL_EXAMPLES]}"
                ),
                do=f"give {EVAL_EXAMPLES} only",
            )
        )
    if values.get(OLD_EVAL_EXAMPLES) is not None:
        return values | {EVAL_EXAMPLES: None}
    if EVAL_EXAMPLES in values:
        return values | {OLD_EVAL_EXAMPLES: None}
    return values | {EVAL_EXAMPLES: None} if OLD_EVAL_EXAMPLES in values else values


def _is_changed(name: str, old: Config, new: Config, derived: Mapping[str, Any]) -> bool:
    """Whether a setting has changed. An unset sequence length compares by its derived value."""
    if name != "data.seq_len":
        return value_of(new, name) != value_of(old, name)
    before = derived.get(name, old.seq_len) if old.data.seq_len is None else old.data.seq_len
    return (
        before if new.data.seq_len is None and old.data.seq_len is None else new.seq_len
    ) != before
