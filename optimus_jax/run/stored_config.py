"""Comparison of a run's config with the one in a checkpoint's metadata.

All settings that affect the computation are compared. They follow from the config's dataclasses:
`model` and `data` (except names, and files that are compared by content), the seed, the optimizer
and the number formats.
"""

import dataclasses
import json
from collections.abc import Collection, Mapping
from typing import Any

from optimus_jax.config import DERIVED, Config, ModelConfig, Tuning
from optimus_jax.config.request import FIXED_FOR_A_RUN, KNOWN_BY_CONTENT
from optimus_jax.config.settings import compared_settings, setting_names, value_of
from optimus_jax.errors import CheckpointError, explain
from optimus_jax.models.families import features_of
from optimus_jax.models.huggingface_config import IMAGE_SCALING
from optimus_jax.run.resumed_config import UNSET, config_with_derived
from optimus_jax.run_directory.run_data import NOT_COMPARABLE

NAMES_ONLY = ("model.name", *KNOWN_BY_CONTENT)
"""Names and paths, which are not compared. Data and tokenizer are compared by content
(run/first_state.py)."""
CHANGEABLE = (
    "optimizer.",
    "precision.",
    "preference.",
    "masking.",
    "patch_masking.",
    "augmentation.",
    "evaluation.",
)
"""Sections that affect the computation but may change on resume; changes are reported."""

NOT_IN_WEIGHTS = (
    "model.dropout",
    "model.init_std",
    *(f"model.{name}" for name in IMAGE_SCALING),
    *setting_names(Tuning, "model.tuning."),
)
"""Settings of a model that concern only training and the draw of new parameters, the scaling of
images, and its adapters: parameters of a model with others, or with none, can be used."""
EVALUATION_DATA = {"data.eval_fraction", "data.respect_documents"}
"""Data settings that determine which tokens are evaluated, and with what attention mask."""


def check_stored_config(
    metadata: Mapping[str, Any],
    config: Config,
    *,
    sections: tuple[str, ...] = FIXED_FOR_A_RUN,
) -> None:
    """Raise CheckpointError unless a checkpoint has the same model, batches and seed as `config`.

    The arrays alone do not show a difference: a different number of layers looks like padding, and
    other settings leave the shapes alone.

    Args:
      metadata: the checkpoint's metadata.
      config: the config to use the checkpoint with.
      sections: prefixes of the settings that must be equal; those of `data.` may differ if
        data.allow_change is set.
    """
    differing = differing_settings(saved_config(metadata), config, sections)
    if differing and not (
        config.data.allow_change and all(name.startswith("data.") for name in differing)
    ):
        name = next(iter(differing))
        before, _ = differing[name]
        raise CheckpointError(
            explain(
                (
                    "the checkpoint belongs to another model"
                    if name.startswith("model.")
                    else "the checkpoint belongs to a run with different data or another seed"
                ),
                given="; ".join(
                    f"saved with {other}={saved}, requested {requested}"
                    for other, (saved, requested) in differing.items()
                ),
                do=f"set {name}={before} again (config.json may have been edited), or start a new"
                " run",
            )
        )


def describe_changes(saved: Config, config: Config) -> str | None:
    """Settings that affect the computation and changed since a checkpoint was saved, in one line;
    None if there are none.

    Args:
      saved: the checkpoint's config, from `saved_config`.
      config: the config of the resumed run, with all derived values.
    """
    changed = differing_settings(saved, config, (*FIXED_FOR_A_RUN, *CHANGEABLE))
    if not changed:
        return None
    return (
        "changed since the checkpoint was saved: "
        + ", ".join(f"{name} from {before} to {now}" for name, (before, now) in changed.items())
        + (f"; {NOT_COMPARABLE}" if EVALUATION_DATA & changed.keys() else "")
    )


def saved_config(metadata: Mapping[str, Any]) -> Config:
    """The config in a checkpoint's metadata, with the run's derived values and the precision of its
    plan.

    A setting that the metadata lacks has its default; a setting unknown to this version is ignored.
    """
    values = json.loads(metadata["config"])
    known = {DERIVED, *(field.name for field in dataclasses.fields(Config))}
    saved = config_with_derived(
        json.dumps({name: value for name, value in values.items() if name in known})
    )
    return (
        saved
        if "plan" not in metadata
        else saved.with_values({"precision.compute": json.loads(metadata["plan"])["precision"]})
    )


def differing_models(saved: ModelConfig, model: ModelConfig) -> dict[str, tuple[Any, Any]]:
    """As `differing_settings`, for two models: empty if parameters of one, without its adapters,
    are those of the other.
    """
    has_length = features_of(model).positions == "learned"
    return differing_settings(
        Config(model=saved),
        Config(model=model),
        ("model.",),
        may_differ=(*NOT_IN_WEIGHTS, *(() if has_length else ("model.max_length",))),
    )


def differing_settings(
    saved: Config, config: Config, sections: tuple[str, ...], *, may_differ: Collection[str] = ()
) -> dict[str, tuple[Any, Any]]:
    """Name of each setting with different values -> (saved, current).

    Args:
      sections: prefixes of the settings that are compared.
      may_differ: settings of these sections that are not compared.
    """
    names = [
        name
        for name in compared_settings(Config)
        if name.startswith(sections) and name not in (*NAMES_ONLY, *may_differ)
    ]
    pairs = {name: (value_of(saved, name), value_of(config, name)) for name in names}
    # An unset value stands for the one that the run derived, so it does not differ from any.
    return {
        name: pair
        for name, pair in pairs.items()
        if pair[0] != pair[1] and not (name in UNSET and UNSET[name] in pair)
    }
