"""The config that a command requests, for a new or a resumed run."""

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from optimus_jax.config import Config, DataConfig, DistributedConfig, ModelConfig
from optimus_jax.config.presets import PRESETS
from optimus_jax.config.request import (
    OF_ADAPTERS,
    dotted,
    make_config,
    named_settings,
    read_config,
    repeated_config,
    resumed_config,
)
from optimus_jax.config.run_checkpoint import INIT_FROM
from optimus_jax.data.recordings import NO_LANGUAGE, names_no_language
from optimus_jax.errors import ConfigError, PlanError, argument, explain
from optimus_jax.plan import Plan
from optimus_jax.run.initial_weights import check_initial_model
from optimus_jax.run.named_run import RUN_DIR, check_names_run
from optimus_jax.run.parameter_source import parameter_source
from optimus_jax.run.resumed_config import ResumedConfig
from optimus_jax.run_directory.directory import RunDirectory
from optimus_jax.system.hub_model import HubModel
from optimus_jax.system.paths import UserPath
from optimus_jax.training.config_checks import check_config
from optimus_jax.training.tasks import kept_model
from optimus_jax.weights.published import MODEL, PublishedSource, model_named
from optimus_jax.weights.published_adapters import PublishedAdapters

INIT, ADAPTERS, TOKENIZER = "init_from", "adapters_from", "data.tokenizer"
LANGUAGE, TUNING = "data.language", "model.tuning."
"""Settings."""


def requested_config(
    model: str | ModelConfig | None,
    base: Config | UserPath | None,
    run_dir: Path | None,
    resume: bool,
    overrides: dict[str, Any],
    is_auto: bool,
) -> Config:
    """The config of a new or resumed run; touches no device and writes nothing."""
    overrides = dotted(overrides)
    if is_auto and run_dir is None:
        raise ConfigError(
            explain(
                "no run to resume was named",
                given="--resume auto without a directory",
                do=f"give {argument('run_dir', 'DIR')} too",
            )
        )
    if not resume and model is None and base is None and overrides.get("init_from") is None:
        raise ConfigError(
            explain(
                "no model was named",
                given="none of model, config, init_from and resume",
                do=f"give {argument('model', 'NAME')}, such as gpt2-nano",
            )
        )
    if resume and run_dir is None:
        raise ConfigError(
            explain(
                "no run to resume was named",
                given="--resume without a directory",
                do=f"give {argument('run_dir', 'DIR')} too",
            )
        )
    if resume and not is_auto and base is not None:
        raise ConfigError(
            explain(
                "a resumed run has its own config",
                given="--resume with --config",
                do=f"leave {argument('config')} out; settings that may change have flags"
                " and --set, in Python keywords",
            )
        )
    initial = base if base is None or isinstance(base, Config) else read_config(base)
    if not resume:
        config = _new_config(model, overrides, initial)
        check_initial_model(config, overrides)
    else:
        assert run_dir is not None
        check_names_run(str(run_dir), what=RUN_DIR)
        text = RunDirectory.resume(run_dir, writer=False).config_text()
        if isinstance(model, ModelConfig) and not is_auto:
            raise ConfigError(
                explain(
                    "a resumed run has its own model",
                    given=f"resume=True with a ModelConfig, {model.name}",
                    do="leave the model out",
                )
            )
        named = None if isinstance(model, ModelConfig) else model
        if named is not None and named not in PRESETS and Config.from_json(text).init_from:
            # a published model, which may be gone by now, or on a hub that cannot be reached
            begun_with = str(HubModel.parse(named, bare=True) or named)
            config = resumed_config(text, None, {INIT: begun_with, **overrides})
        elif is_auto and not (model is None and base is None):
            # The command that started the run, given again.
            config = repeated_config(text, _new_config(model, overrides, initial))
        else:
            config = resumed_config(text, named, overrides)
    check_config(config, overrides, is_new=not resume)
    return config


def _new_config(
    model: str | ModelConfig | None, overrides: dict[str, Any], base: Config | None
) -> Config:
    """The config of a new run.

    A published model comes with its parameters, and parameters with the tokenizer of their texts,
    unless the settings name others. One of sound that knows English alone names no language.
    Published adapters come with their settings, and with the model that they name, unless another
    is named.
    """
    published = _published(model)
    if published is not None:
        overrides = {INIT: str(published), **overrides}
    overrides = _with_base_of_adapters(overrides, base, published)
    sources = _sources(overrides, base)
    source = published if sources.init_from is None else parameter_source(sources.init_from)
    adapters = sources.adapters_from and PublishedAdapters(Path(sources.adapters_from))
    if source is not None and base is None and TOKENIZER not in overrides:
        # Parameters of a run need the run's own tokenizer, and that of bytes has no file.
        own = adapters and isinstance(source, PublishedSource) and adapters.tokenizer()
        tokenizer = own or source.tokenizer()
        if tokenizer is not None:
            overrides = {TOKENIZER: tokenizer, **overrides}
        elif source.config().reads != "images":
            raise ConfigError(
                explain(
                    "the model comes without a tokenizer.json",
                    given=source,
                    do=f"give the tokenizer of its texts with {argument('tokenizer')}",
                )
            )
    if (
        isinstance(source, PublishedSource)
        and base is None
        and source.config().reads == "sound"
        and names_no_language(source.generation())
    ):
        overrides = {LANGUAGE: NO_LANGUAGE, **overrides}
    config = None
    if model is not None:
        config = model_named(model)
    elif source is not None and base is None:
        config = source.config()
    if adapters:
        tuning, _ = adapters.read(config or (base or Config()).model)
        if (method := overrides.get(f"{TUNING}method", tuning.method)) != tuning.method:
            raise ConfigError(
                explain(
                    "adapters from a directory are kept: a run cannot begin with others in their"
                    " place, or with a model into which they are merged",
                    given=f"{TUNING}method={method}; {adapters} has {tuning.method}",
                    do=f"leave {TUNING}method out, which begins with these adapters; to merge them,"
                    f" export that run, and give {INIT_FROM} the export",
                )
            )
        # The others say what else is trained.
        overrides = {
            name: getattr(tuning, name.removeprefix(TUNING))
            for name in (f"{TUNING}method", *sorted(OF_ADAPTERS[tuning.method]))
        } | overrides
    config = make_config(config, overrides, base)
    return replace(config, model=kept_model(config))


def _with_base_of_adapters(
    overrides: dict[str, Any], base: Config | None, published: PublishedSource | None
) -> dict[str, Any]:
    """Settings in which `init_from` names no adapters, but the model that these are for."""
    named = _sources({INIT: overrides[INIT]} if INIT in overrides else {}, base).init_from
    adapters = named and PublishedAdapters.parse(named, what=INIT_FROM)
    if not adapters:
        return overrides
    if published is None:
        model = adapters.base(do=f"name it: {MODEL} DIR {INIT_FROM} {named}")
    else:
        model = str(published)
    return {ADAPTERS: str(adapters)} | overrides | {INIT: model}


def _sources(overrides: Mapping[str, Any], base: Config | None) -> Config:
    """A config that says where the parameters come from."""
    given = {name: overrides[name] for name in (INIT, ADAPTERS) if name in overrides}
    return (base or Config()).with_values(given)


def _published(model: str | ModelConfig | None) -> PublishedSource | None:
    """The published model that a text names; None: it is a preset, or not given by name."""
    if model is None or isinstance(model, ModelConfig) or model in PRESETS:
        return None
    return PublishedSource.parse(model, what=MODEL)


def read_resumed_config(
    requested: Config, run_dir: Path, overrides: dict[str, Any]
) -> ResumedConfig:
    """The config of the run in a directory, resumed as `requested`; touches no device and writes
    nothing."""
    run = RunDirectory.resume(run_dir, writer=False)
    precision = None
    # if the plan is needed later, its error is raised then
    with suppress(OSError, ValueError, PlanError):
        precision = Plan.from_json(run.plan_text() or "").precision
    return ResumedConfig.of(run.config_text(), requested, named_settings(overrides), precision)


def shared_settings(config: Config) -> dict[str, str]:
    """Settings that must be equal in all processes, by name, so that an error can name the one that
    differs.

    Paths of data may differ between hosts; the data's content is compared after reading.
    """
    nowhere = replace(
        config.data,
        sources=DataConfig().sources,
        tokenizer=DataConfig().tokenizer,
        chat_template=None,
    )
    held_out = ("own",) if config.evaluation.data else ()
    same = replace(
        config,
        distributed=DistributedConfig(),
        data=nowhere,
        evaluation=replace(config.evaluation, data=held_out),
    )
    sections = json.loads(same.to_json())
    found = {
        f"{section}.{name}" if name else section: json.dumps(value)
        for section, values in sections.items()
        for name, value in (values.items() if isinstance(values, dict) else [("", values)])
    }
    # It is not kept, so that it is not in the JSON.
    return found | {"log.profile": json.dumps(config.log.profile)}
