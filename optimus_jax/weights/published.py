"""What `--model` and `--init-from` name besides presets and runs: the directory of a published
model, or a model on the hub.
"""

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from optimus_jax.config import ModelConfig
from optimus_jax.config.presets import PRESETS, model_preset
from optimus_jax.config.published_config import WHAT, published_kind
from optimus_jax.config.run_checkpoint import INIT_FROM
from optimus_jax.errors import CheckpointError, ConfigError, explain
from optimus_jax.store.hub import TOKENIZER, TOKENIZER_FILES, commit_of, hub_directory
from optimus_jax.system.hub_model import HubModel
from optimus_jax.system.json_input import JSONInputError, parse_json
from optimus_jax.system.paths import UserPath, user_path
from optimus_jax.weights.directory import (
    CONFIG,
    CONFIG_FILES,
    WEIGHTS,
    has_weights,
    patterns_of,
    read_config,
)
from optimus_jax.weights.file_bytes import MAX_CONFIG_BYTES, read_whole
from optimus_jax.weights.peft_directory import BASE, read_peft_config
from optimus_jax.weights.peft_directory import CONFIG as ADAPTERS

MODEL = "--model"
"""Flag that names a model."""
GENERATION_CONFIG = "generation_config.json"
"""File that says how texts are written with a model."""


@dataclass(frozen=True)
class PublishedSource:
    """A published model: a directory, or a model on the hub."""

    place: Path | HubModel
    """An absolute path, or the model's name."""

    @classmethod
    def parse(cls, text: str, *, what: str) -> "PublishedSource | None":
        """The published model that a text names; None: it names none, but perhaps a run.

        Args:
          what: name of the flag, for errors. With MODEL, ORG/NAME is a model on the hub too.
        """
        if (model := HubModel.parse(text, bare=what == MODEL)) is not None:
            return cls(model)
        path = user_path(text, what=what)
        if isinstance(path, Path) and path.name == CONFIG and path.is_file():
            path = path.parent  # the file stands for its directory
        return cls(path.absolute()) if isinstance(path, Path) and _is_published(path) else None

    def __str__(self) -> str:
        return str(self.place)

    def config(self) -> ModelConfig:
        """The model. Its name is that of the directory or repository.

        Raises OptimusError if its config.json cannot be read, or is of an unsupported model.
        """
        config = read_config(self._directory(*CONFIG_FILES))
        place = self.place
        name = place.name if isinstance(place, Path) else place.repository.rpartition("/")[2]
        return replace(config, name=name)

    def tokenizer(self) -> str | None:
        """The tokenizer's name, as `--tokenizer` takes it; None: there is no tokenizer.json."""
        directory = self._directory(*TOKENIZER_FILES)
        return str(self.place) if (directory / TOKENIZER).exists() else None

    def generation(self) -> dict[str, Any]:
        """Its generation_config.json; empty if it has none. Raises ConfigError if it is damaged."""
        path = self._directory(GENERATION_CONFIG) / GENERATION_CONFIG
        if not path.exists():
            return {}
        try:
            found = parse_json(read_whole(path, MAX_CONFIG_BYTES), finite=False)
            if isinstance(found, dict):
                return found
            given = f"a {type(found).__name__}"
        except (CheckpointError, JSONInputError) as error:
            given = str(error)
        raise ConfigError(
            explain(
                f"{path} does not say how texts are written",
                given=given,
                do="use the file that came with the weights, or remove it",
            )
        )

    def fetched(self) -> Path:
        """The directory with its config.json and weights, for `open_model`.

        Of a model on the hub, files that the cache lacks are fetched: safetensors, or PyTorch's if
        there are none. Raises StoreError if that fails.
        """
        directory = self._directory(*CONFIG_FILES)
        for name in WEIGHTS:
            directory = self._directory(*CONFIG_FILES, *patterns_of(name))
            if has_weights(directory, name):
                break
        return directory

    def exact(self, directory: Path) -> str:
        """The name of what `fetched` returned: of a model on the hub, with the commit."""
        if isinstance(self.place, Path):
            return str(self.place)
        return str(replace(self.place, revision=commit_of(directory)))

    def _directory(self, *files: str) -> Path:
        """The directory, or a local one with those of the files that the hub has."""
        return self.place if isinstance(self.place, Path) else hub_directory(self.place, files)


def checked_model(model: object) -> str | ModelConfig:
    """A model that a program gives, as settings name it. Raises ConfigError for what is none."""
    if isinstance(model, os.PathLike):
        model = os.fspath(model)
    if isinstance(model, str | ModelConfig):
        return model
    raise ConfigError(
        explain(
            "a model is the name of a preset, a directory, ORG/NAME on the hub, or a ModelConfig",
            given=f"the class {model.__name__}"
            if isinstance(model, type)
            else f"a {type(model).__name__}",
            do="give one of these; layers of your own are a row of FAMILIES or BLOCKS, which a"
            " ModelConfig names (docs/howto/own_block.md)",
        )
    )


def model_named(name: UserPath | ModelConfig) -> ModelConfig:
    """The model that `--model` names: a preset, a directory, or a model on the hub. A ModelConfig,
    which a program may give, is one itself.

    Of a published model, only `CONFIG_FILES` are read.

    Raises OptimusError if there is none of that name.
    """
    name = checked_model(name)
    if isinstance(name, ModelConfig):
        return name
    source = PublishedSource.parse(name, what=MODEL)
    if name in PRESETS:
        if source is not None:
            raise ConfigError(
                explain(
                    f"{MODEL} names a preset, and a published model in a directory of that name",
                    given=name,
                    do=f"write {MODEL} ./{name} for the directory, or rename it",
                )
            )
        return model_preset(name)
    if source is not None:
        return source.config()
    path = user_path(name, what=MODEL)
    if isinstance(path, Path) and (path.exists() or "/" in name):
        raise _no_model(name, path)
    return model_preset(name)


def _is_published(path: Path) -> bool:
    """Whether a directory is that of a published model, and not of a run."""
    if any(has_weights(path, name) for name in WEIGHTS):
        return True
    return published_kind(_config_in(path)) == "model"


def _config_in(directory: Path) -> object:
    """The content of a config.json; None: it is missing or not JSON."""
    try:
        return parse_json(read_whole(directory / CONFIG, MAX_CONFIG_BYTES), finite=False)
    except (CheckpointError, JSONInputError):
        return None


def _no_model(name: str, path: Path) -> ConfigError:
    """The error for a path that is not that of a published model."""
    if (path / ADAPTERS).is_file():
        return ConfigError(
            explain(
                f"{MODEL} names {WHAT['adapters']}, not a model",
                given=f"{name}, for {read_peft_config(path).get(BASE)}",
                do=f"begin with them and that model: {INIT_FROM} {name}; if it is elsewhere, add"
                f" {MODEL} DIR",
            )
        )
    given = "which has no config.json" if path.is_dir() else "which is no directory"
    if (path / CONFIG).exists():
        config = _config_in(path)
        if isinstance(config, dict) and isinstance(config.get("model"), dict):
            return ConfigError(
                explain(
                    f"{MODEL} names a run",
                    given=name,
                    do=f"begin with its model and parameters: {INIT_FROM} {name}",
                )
            )
        given = f"whose config.json is not that of {WHAT['model']}"
    return ConfigError(
        explain(
            f"{MODEL} names no model",
            given=f"{name}, {given}",
            do="give a preset such as gpt2-nano, the directory of a published model with its"
            " config.json, or ORG/NAME of one on the Hugging Face hub",
        )
    )
