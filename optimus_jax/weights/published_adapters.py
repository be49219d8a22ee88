"""Adapters as PEFT publishes them: a directory without the model, which it names."""

import os
from dataclasses import dataclass, replace
from pathlib import Path

from optimus_jax.config import ModelConfig, Tuning
from optimus_jax.config.presets import PRESETS
from optimus_jax.config.run_checkpoint import RunCheckpoint
from optimus_jax.errors import ConfigError, explain
from optimus_jax.models.merging import same_adapters
from optimus_jax.models.peft_reading import from_peft
from optimus_jax.models.shapes import Params
from optimus_jax.store.hub import TOKENIZER
from optimus_jax.system.hub_model import HubModel
from optimus_jax.system.paths import Url, UserPath, user_path
from optimus_jax.weights.directory import WEIGHTS, has_weights
from optimus_jax.weights.peft_directory import BASE, CONFIG, REVISION, read_peft, read_peft_config
from optimus_jax.weights.published import MODEL, PublishedSource, checked_model, model_named


@dataclass(frozen=True)
class PublishedAdapters:
    """A directory of adapters, with or without a tokenizer."""

    directory: Path
    """An absolute path."""

    @classmethod
    def parse(cls, text: str, *, what: str) -> "PublishedAdapters | None":
        """The adapters that a text names; None: it names something else, such as a run.

        Args:
          what: name of the flag, for errors.
        """
        if HubModel.parse(text) is not None:
            return None
        path = user_path(text, what=what)
        if not isinstance(path, Path) or not (path / CONFIG).is_file():
            return None
        is_whole = any(has_weights(path, name) for name in WEIGHTS)
        return None if is_whole else cls(path.absolute())

    def __str__(self) -> str:
        return str(self.directory)

    def base(self, do: str) -> str:
        """The model that they say they are for: a directory, hf://ORG/NAME, or a run.

        Args:
          do: what a user can do if there is none, for errors.
        Raises:
          ConfigError: it is not named, or not found.
        """
        config = read_peft_config(self.directory)
        named, revision = config.get(BASE), config.get(REVISION)
        if isinstance(named, str) and named:
            if (model := HubModel.parse(named, bare=True)) is not None:
                exact = revision if isinstance(revision, str) and revision else model.revision
                return str(replace(model, revision=exact))
            run = RunCheckpoint.parse(named, what=BASE)
            if isinstance(user_path(run.run, what=BASE), Url) or os.path.isdir(run.run):
                return str(run.with_whole_path())
        raise ConfigError(
            explain(
                "the model that adapters are for is not found",
                given=f"{BASE}={named!r} in {self.directory / CONFIG}",
                do=do,
            )
        )

    def published_base(self) -> PublishedSource:
        """The published model that they are for. Raises ConfigError as `base`, or if it is a
        run's.
        """
        base = self.base(do=f"write the directory of a published model there as {BASE}")
        source = PublishedSource.parse(base, what=BASE)
        if source is None:
            raise ConfigError(
                explain(
                    "the adapters are not for a published model",
                    given=f"{self}, for {base}",
                    do="give the run whose adapters they are",
                )
            )
        return source

    def tokenizer(self) -> str | None:
        """The name of their tokenizer, as `--tokenizer` takes it; None: there is none."""
        return str(self.directory) if (self.directory / TOKENIZER).is_file() else None

    def read(self, model: ModelConfig) -> tuple[Tuning, Params]:
        """What the adapters are, and their parameters, as `from_peft`.

        Args:
          model: the model that they are for.
        Raises:
          ConfigError: there are none, or they have a feature that ours do not.
          CheckpointError: their tensors are damaged, or do not fit the model.
        """
        return from_peft(*read_peft(self.directory), model.base)

    def read_for(self, model: ModelConfig) -> Params:
        """Their parameters, for a model that has such adapters already.

        Raises OptimusError as `read` does, or if the adapters of `model` are others.
        """
        tuning, params = self.read(model)
        if not same_adapters(model, replace(model, tuning=tuning)):
            raise ConfigError(
                explain(
                    "the settings are those of other adapters",
                    given=f"{model.tuning.describe_adapters()}; {self.directory} has"
                    f" {tuning.describe_adapters()}",
                    do="leave them out: they are read from the directory",
                )
            )
        return params


def adapters_named(name: UserPath | ModelConfig) -> PublishedAdapters | None:
    """The adapters that `--model` names; None: it names a model. Raises ConfigError as
    `checked_model`.
    """
    name = checked_model(name)
    if isinstance(name, ModelConfig) or name in PRESETS:
        return None
    return PublishedAdapters.parse(name, what=MODEL)


def model_with_adapters(
    name: UserPath | ModelConfig, beside: PublishedAdapters | None = None
) -> ModelConfig:
    """`model_named`, with adapters; a directory of these names the model that they are for.

    Args:
      beside: adapters for the model that `name` names; None: those that `name` names, if any.
    Raises:
      OptimusError: as `model_named`, or the adapters cannot be read.
    """
    if beside is not None:
        model, adapters = model_named(name), beside
    elif (adapters := adapters_named(name)) is not None:
        model = adapters.published_base().config()
    else:
        return model_named(name)
    tuning, _ = adapters.read(model)
    return replace(model, tuning=tuning)
