"""Whether a checkpoint belongs to the config that it is read under: what it was saved with is in
its metadata.

Every setting that changes what is computed is compared, and which those are follows from the
dataclasses: all of `model` and `data` but what only names something or is known by its content, the
seed, the optimizer and the number formats.
"""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from optimus_jax.config import DERIVED, Config
from optimus_jax.config.request import FIXED_FOR_A_RUN, KNOWN_BY_CONTENT
from optimus_jax.config.settings import setting_names, value_of
from optimus_jax.errors import CheckpointError, explain
from optimus_jax.run.resumed_config import UNSET, config_with_derived
from optimus_jax.run_directory.run_data import NOT_COMPARABLE

NAMES_ONLY = ("model.name", *KNOWN_BY_CONTENT)
"""Settings that name what is computed with, or where it lies; of data and tokenizer the content is
compared (run/first_state.py)."""
CHANGEABLE = ("optimizer.", "precision.", "evaluation.")
"""Sections that change what is computed and may be changed when a run goes on; that is said."""

EVALUATION_DATA = {"data.eval_fraction", "data.respect_documents"}
"""Settings of the data that say which of its tokens are evaluated, and with what attention."""


def check_stored_config(
    metadata: Mapping[str, Any], config: Config, *, sections: tuple[str, ...] = FIXED_FOR_A_RUN
) -> None:
    """Raise CheckpointError unless a checkpoint with this metadata is of the same model, batches
    and seed.

    Of sizes, another number of layers would pass for padding; of all else, nothing in the arrays
    would tell.

    Args:
      config: that the checkpoint is to be used under.
      sections: settings that have to be the same, by how they begin; data may differ where
        data.allow_change says so.
    """
    differing = _differing(saved_config(metadata), config, sections)
    if differing and not (
        config.data.allow_change and all(name.startswith("data.") for name in differing)
    ):
        name = next(iter(differing))
        before, _ = differing[name]
        raise CheckpointError(
            explain(
                (
                    "the checkpoint is of another model"
                    if name.startswith("model.")
                    else "the checkpoint is of a run with other data or another seed"
                ),
                given="; ".join(
                    f"saved with {other}={was}, asked for {asked}"
                    for other, (was, asked) in differing.items()
                ),
                do=(
                    f"bring back {name}={before} (config.json may have been edited), or start a"
                    " new run"
                ),
            )
        )


def describe_changes(saved: Config, config: Config) -> str | None:
    """What changes the computation and was otherwise when the checkpoint was saved, in one line;
    None: nothing.

    Args:
      saved: as `saved_config` has it.
      config: that the run goes on with, nothing left open.
    """
    changed = _differing(saved, config, (*FIXED_FOR_A_RUN, *CHANGEABLE))
    if not changed:
        return None
    return (
        "changed since the checkpoint was saved: "
        + ", ".join(f"{name} from {before} to {now}" for name, (before, now) in changed.items())
        + (f"; {NOT_COMPARABLE}" if EVALUATION_DATA & changed.keys() else "")
    )


def saved_config(metadata: Mapping[str, Any]) -> Config:
    """The config in a checkpoint's metadata, with what the run had derived, and the precision of
    its plan, which is what it computed in.

    One from before a setting was there has its default; what this version does not know is passed
    over.
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


def _differing(
    saved: Config, config: Config, sections: tuple[str, ...]
) -> dict[str, tuple[Any, Any]]:
    """Settings that were saved with another value, by name."""
    names = [
        name
        for name in setting_names(Config)
        if name.startswith(sections)
        and name not in NAMES_ONLY
        and not name.startswith("model.rope_scaling.")
    ]
    names += (
        ["model.rope_scaling"] if any("model.".startswith(section) for section in sections) else []
    )
    pairs = {name: (value_of(saved, name), value_of(config, name)) for name in names}
    # A value that is left open is the one that the run has derived.
    return {
        name: pair
        for name, pair in pairs.items()
        if pair[0] != pair[1] and not (name in UNSET and UNSET[name] in pair)
    }
