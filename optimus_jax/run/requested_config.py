"""The config that a command requests, for a new or a resumed run."""

import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from optimus_jax.config import Config, DataConfig, DistributedConfig
from optimus_jax.config.request import (
    make_config,
    named_settings,
    read_config,
    repeated_config,
    resumed_config,
)
from optimus_jax.errors import ConfigError, PlanError, explain
from optimus_jax.models.families import check_family
from optimus_jax.plan import Plan
from optimus_jax.run.initial_weights import check_initial_model, model_of_run
from optimus_jax.run.resumed_config import ResumedConfig
from optimus_jax.run_directory.directory import RunDirectory
from optimus_jax.system.paths import UserPath


def requested_config(
    model: str | None,
    base: Config | UserPath | None,
    run_dir: Path | None,
    resume: bool,
    overrides: dict[str, Any],
    is_auto: bool,
) -> Config:
    """The config of a new or resumed run; touches no device and writes nothing."""
    if is_auto and run_dir is None:
        raise ConfigError(
            explain(
                "no run to resume was named",
                given="--resume auto without a directory",
                do="give --run-dir DIR --resume auto",
            )
        )
    if not resume and model is None and base is None and overrides.get("init_from") is None:
        raise ConfigError(
            explain(
                "no model was named",
                given="none of --model, --config, --init-from and --resume",
                do="give --model NAME, such as gpt2-nano",
            )
        )
    if resume and run_dir is None:
        raise ConfigError(
            explain(
                "no run to resume was named",
                given="--resume without a directory",
                do="give --run-dir DIR --resume",
            )
        )
    if resume and not is_auto and base is not None:
        raise ConfigError(
            explain(
                "a resumed run has its own config",
                given="--resume with --config",
                do="leave --config out; settings that may change have flags and --set",
            )
        )
    initial = base if base is None or isinstance(base, Config) else read_config(base)
    if not resume:
        if model is None and initial is None:
            named = Config().with_values({"init_from": overrides["init_from"]}).init_from
            initial = None if named is None else Config(model=model_of_run(named))
        config = make_config(model, overrides, initial)
        check_initial_model(config)
    else:
        assert run_dir is not None
        before = RunDirectory.resume(run_dir, writer=False)
        if is_auto and not (model is None and base is None):
            # The command that started the run, given again.
            wanted = make_config(model, overrides, initial)
            config = repeated_config(before.config_text(), wanted)
        else:
            config = resumed_config(before.config_text(), model, overrides)
    check_family(config.model)
    return config


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
    sections = json.loads(replace(config, distributed=DistributedConfig(), data=nowhere).to_json())
    return {
        f"{section}.{name}" if name else section: json.dumps(value)
        for section, values in sections.items()
        for name, value in (values.items() if isinstance(values, dict) else [("", values)])
    }
