"""What gives a new run its parameters: its seed, a checkpoint of another run, or a published model;
and adapters that PEFT saved beside the latter two.

`initial_weights` chooses, for new runs (run/first_state.py) and evaluations (run/evaluate.py).
Everything else of the state begins anew: the step, the optimizer's moments, the loss scale and the
position in the data.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from optimus_jax.checkpoint.checkpoints import Checkpoints
from optimus_jax.cluster.distributed import all_or_none
from optimus_jax.config import Config, ModelConfig
from optimus_jax.config.run_checkpoint import INIT_FROM, RunCheckpoint
from optimus_jax.errors import CheckpointError, ConfigError, DataError, argument, explain
from optimus_jax.models.merging import same_adapters
from optimus_jax.run.new_head import check_new_head, needs_new_head, without_head
from optimus_jax.run.parameter_source import RunSource, open_run, parameter_source
from optimus_jax.run.published_weights import PublishedWeights, with_adapters
from optimus_jax.run.stored_config import differing_models, saved_config
from optimus_jax.run_directory.directory import RunDirectory
from optimus_jax.training.state import TrainState, from_stored
from optimus_jax.training.step import Program
from optimus_jax.training.tasks import model_of, task_name, task_of
from optimus_jax.weights.directory import open_model
from optimus_jax.weights.published import PublishedSource
from optimus_jax.weights.published_adapters import PublishedAdapters


class InitialWeights(Protocol):
    """What gives a new run its parameters."""

    def initial_state(
        self, program: Program, say: Callable[[str], object]
    ) -> tuple[TrainState, str]:
        """The state before step 1, sharded as the plan says, and where its parameters came from.

        Every process must call this.

        Args:
          say: called with messages about the source.
        """
        ...


@dataclass(frozen=True)
class SeedWeights:
    """Parameters drawn from a seed."""

    seed: int

    def initial_state(
        self, program: Program, say: Callable[[str], object]
    ) -> tuple[TrainState, str]:
        """As `InitialWeights`."""
        return program.init(jnp.int32(self.seed)), f"seed {self.seed}"


@dataclass(frozen=True, kw_only=True)
class RunWeights:
    """The parameters in a checkpoint of another run, whatever its plan; its directory is only read.

    Each process reads the shards of its own devices.
    """

    named: RunCheckpoint
    tokenizer: str
    """Digest of the new run's tokenizer."""
    eos: int
    """The new run's token that ends a document."""

    def initial_state(
        self, program: Program, say: Callable[[str], object]
    ) -> tuple[TrainState, str]:
        """As `InitialWeights`.

        Raises:
          OptimusError: there is no such run or checkpoint, or it has another model or tokenizer.
        """
        with all_or_none():
            run = open_run(self.named, checkpoint=self.named.step, say=say)
            model = Config.from_json(run.config_text()).model
        tuning, is_new = model.tuning, needs_new_head(model, program.config.model)
        if is_new:
            check_new_head(program.config.model)
        wanted = program.abstract_params(tuning, stored=True)
        restored = Checkpoints(run.checkpoints, program.config.checkpoint, warn=say).restore(
            {"params": without_head(wanted) if is_new else wanted},
            self.named.step,
            paddable=program.shapes.with_tuning(tuning).may_be_padded,
            partial=True,
            check=lambda metadata: self._check(metadata, run, program.config),
        )
        target = program.abstract_params(tuning)
        params = from_stored(
            restored.state["params"],
            program.shapes,
            program.plan,
            jax.tree.map(lambda leaf: leaf.sharding, without_head(target) if is_new else target),
        )
        say(
            f"parameters from the checkpoint of step {restored.step} of {self.named.run}"
            + ("; the head, which it does not have, begins anew" if is_new else "")
        )
        if same_adapters(program.shapes.with_tuning(tuning).config, program.config.model):
            _say_what_is_compared(program, self.named.run, say)
        elif tuning.has_adapters:
            own = program.config.model.tuning
            say(
                f"adapters of {self.named.run} ({tuning.describe_adapters()}) are merged into the"
                " parameters"
                + (f"; new ones begin ({own.describe_adapters()})" if own.has_adapters else "")
                + (
                    f". The sums are rounded to {own.base_precision}, which loses part of what the"
                    " adapters have learnt: to keep it, give the new run the same adapters, or set"
                    " model.tuning.base_precision=bf16"
                    if own.is_quantised
                    else ""
                )
            )
        if (eos := _of_data(restored.metadata, "eos")) not in (None, self.eos):
            say(
                f"documents end with token {self.eos}; those of {self.named.run} ended with token"
                f" {eos}"
            )
        return program.state_with(params, tuning), str(RunCheckpoint(self.named.run, restored.step))

    def _check(self, metadata: Mapping[str, Any], run: RunDirectory, config: Config) -> None:
        """Raise OptimusError if the checkpoint has another model or tokenizer."""
        _check_model(saved_config(metadata).model, config, str(self.named))
        if (digest := _of_data(metadata, "tokenizer")) not in (None, self.tokenizer):
            raise DataError(
                explain(
                    "the tokenizer is not that of the run whose parameters are to be used: its"
                    " token ids mean other text",
                    given=f"digest {self.tokenizer}; {self.named.run} has {digest}",
                    do=f"give {argument('tokenizer', str(run.tokenizer or 'bytes'))}",
                )
            )


@dataclass(frozen=True)
class AdapterWeights:
    """The parameters of another source, and published adapters beside them."""

    base: InitialWeights
    adapters: PublishedAdapters

    def initial_state(
        self, program: Program, say: Callable[[str], object]
    ) -> tuple[TrainState, str]:
        """As `InitialWeights`.

        Raises:
          OptimusError: the source cannot be read; or the adapters cannot, or are others than those
            of the run.
        """
        state, weights = self.base.initial_state(program, say)
        with all_or_none():
            adapters = self.adapters.read_for(program.config.model)
        shardings = program.state_shardings.params
        params = with_adapters(state.params, adapters, program.shapes, shardings)
        say(f"adapters from {self.adapters}")
        _say_what_is_compared(program, str(self.adapters), say)
        return replace(state, params=params), weights


def initial_weights(
    config: Config, identity: Mapping[str, Any], used_before: str | None = None
) -> InitialWeights:
    """The source that a config names.

    Args:
      identity: the identity of the run's data.
      used_before: where an earlier start of the same run found its parameters, as `initial_state`
        returned it; None: this is the first start.
    """
    if config.init_from is None:
        return SeedWeights(config.seed)
    source = parameter_source(used_before or config.init_from)
    if isinstance(source, PublishedSource):
        weights: InitialWeights = PublishedWeights(source)
    else:
        weights = RunWeights(
            named=source.named, tokenizer=identity["tokenizer"], eos=identity["eos"]
        )
    if config.adapters_from is None:
        return weights
    return AdapterWeights(weights, PublishedAdapters(Path(config.adapters_from)))


def check_initial_model(config: Config, named: Collection[str] = ()) -> None:
    """Raise OptimusError unless what `config.init_from` names exists and has the model of `config`;
    touches no device.

    Of a model on the hub, only its config.json is looked at: weights are fetched when the run has a
    plan.

    Args:
      named: dotted names of the settings that the user gave, for errors.
    """
    if config.init_from is None:
        return
    source = parameter_source(config.init_from)
    if config.adapters_from is not None:
        _check_adapters(config, source)
    model, vocab_size = source.config(), config.model.vocab_size
    if isinstance(source, PublishedSource):
        if vocab_size < model.vocab_size and "model.vocab_size" in named:
            raise CheckpointError(
                explain(
                    "the vocabulary of a published model can only grow",
                    given=f"model.vocab_size={vocab_size}; {source} has {model.vocab_size}",
                    do=f"leave it out, or choose {model.vocab_size} or more",
                )
            )
        model = replace(model, vocab_size=max(vocab_size, model.vocab_size))  # tokens are added
    _check_model(model, config, str(source), named)
    if isinstance(source, PublishedSource) and isinstance(source.place, Path):
        open_model(source.place, needs_head=task_of(config).predicts_tokens)


def _say_what_is_compared(program: Program, source: str, say: Callable[[str], object]) -> None:
    """Say that the reference of a task lacks what adapters of another run have learnt."""
    config = program.config
    if config.model.tuning.has_adapters and task_of(config).has_reference:
        say(
            f"task {task_name(config)} compares with the model without adapters, so without what"
            f" those of {source} have learnt; to compare with these too, export them merged into a"
            " model, and begin with that"
        )


def _check_adapters(config: Config, source: PublishedSource | RunSource) -> None:
    """Raise OptimusError unless the adapters that a config names fit its model and settings."""
    if (own := source.config().tuning).has_adapters:
        raise ConfigError(
            explain(
                "adapters are for a model without others",
                given=f"{config.adapters_from}, for {source}, which has {own.method}",
                do=f"export that run, which merges its adapters, and give {INIT_FROM} the export",
            )
        )
    PublishedAdapters(Path(config.adapters_from or "")).read_for(config.model)


def _check_model(
    model: ModelConfig, config: Config, source: str, named: Collection[str] = ()
) -> None:
    """Raise CheckpointError unless parameters of a model are those that a run needs.

    Args:
      source: where they come from, for errors.
      named: as for `check_initial_model`.
    """
    theirs, own = model, model_of(config)
    if own.generator is not None and own.generator != theirs.generator:
        raise CheckpointError(
            explain(
                "parameters to begin with have no generator, or another one",
                given=f"{source}; {own.name} has {own.generator}",
                do=f"leave {INIT_FROM} out, or begin with a run of the same model",
            )
        )
    if needs_new_head(theirs, own):
        theirs, own = theirs.body, own.body
    differing = differing_models(theirs, own)
    if not differing:
        return
    given = [each for each in named if each.startswith(tuple(differing))]
    advice = [f"leave {', '.join(sorted(given))} out"] if given else []
    if any(not any(each.startswith(name) for each in given) for name in differing):
        advice.append(
            f"leave --model or --config out, so that the new run has the model of {INIT_FROM}"
        )
    raise CheckpointError(
        explain(
            "the parameters that the run is to begin with are those of another model",
            given=f"{source} has "
            + "; ".join(
                f"{name}={theirs}, requested {requested}"
                for name, (theirs, requested) in differing.items()
            ),
            do=", and ".join(advice),
        )
    )


def _of_data(metadata: Mapping[str, Any], name: str) -> Any:
    """A value of the identity of a checkpoint's data; None: not recorded."""
    return (metadata.get("data") or {}).get(name)
