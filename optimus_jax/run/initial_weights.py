"""What gives a new run its parameters: its seed, or a checkpoint of another run.

`initial_weights` chooses, and only run/first_state.py calls it. Everything else of the state begins
anew: the step, the optimizer's moments, the loss scale and the position in the data. Another source
(run/huggingface_weights.py) is a class with `initial_state`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import jax
import jax.numpy as jnp

from optimus_jax.checkpoint.checkpoints import Checkpoints
from optimus_jax.cluster.distributed import all_or_none
from optimus_jax.config import Config, ModelConfig, Tuning
from optimus_jax.config.run_checkpoint import INIT_FROM, RunCheckpoint
from optimus_jax.config.settings import setting_names
from optimus_jax.errors import ConfigError, DataError, explain
from optimus_jax.run.stored_config import check_stored_config
from optimus_jax.run.stored_run import run_to_read
from optimus_jax.run_directory.directory import RunDirectory
from optimus_jax.system.json_input import parse_json
from optimus_jax.training.state import TrainState, from_stored
from optimus_jax.training.step import Program

NOT_IN_WEIGHTS = ("model.dropout", "model.init_std", *setting_names(Tuning, "model.tuning."))
"""Settings of a model that concern only training and the draw of new parameters, and its
adapters: those of the other run are merged unless the new run has the same."""


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
            run = _open(self.named, checkpoint=self.named.step, say=say)
            tuning = Config.from_json(run.config_text()).model.tuning
        restored = Checkpoints(run.checkpoints, program.config.checkpoint, warn=say).restore(
            {"params": program.abstract_params(tuning, stored=True)},
            self.named.step,
            paddable=program.shapes.with_tuning(tuning).may_be_padded,
            partial=True,
            check=lambda metadata: self._check(metadata, run, program.config),
        )
        params = from_stored(
            restored.state["params"],
            program.shapes,
            program.plan,
            jax.tree.map(lambda leaf: leaf.sharding, program.abstract_params(tuning)),
        )
        say(f"parameters from the checkpoint of step {restored.step} of {self.named.run}")
        if (eos := _of_data(restored.metadata, "eos")) not in (None, self.eos):
            say(
                f"documents end with token {self.eos}; those of {self.named.run} ended with token"
                f" {eos}"
            )
        return program.state_with(params, tuning), str(RunCheckpoint(self.named.run, restored.step))

    def _check(self, metadata: Mapping[str, Any], run: RunDirectory, config: Config) -> None:
        """Raise OptimusError if the checkpoint has another model or tokenizer."""
        _check_model(metadata, config)
        if (digest := _of_data(metadata, "tokenizer")) not in (None, self.tokenizer):
            raise DataError(
                explain(
                    "the tokenizer is not that of the run whose parameters are to be used: its"
                    " token ids mean other text",
                    given=f"digest {self.tokenizer}; {self.named.run} has {digest}",
                    do=f"give --tokenizer {run.tokenizer or 'bytes'}",
                )
            )


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
    return RunWeights(
        named=RunCheckpoint.parse(used_before or config.init_from, what=INIT_FROM),
        tokenizer=identity["tokenizer"],
        eos=identity["eos"],
    )


def model_of_run(init_from: str) -> ModelConfig:
    """The model of the run that --init-from names.

    Raises:
      OptimusError: there is no such run.
    """
    run = _open(RunCheckpoint.parse(init_from, what=INIT_FROM), checkpoint="none")
    return Config.from_json(run.config_text()).model


def check_initial_model(config: Config) -> None:
    """Raise OptimusError unless the run that `config.init_from` names exists and has the model of
    `config`; touches no device."""
    if config.init_from is None:
        return
    run = _open(RunCheckpoint.parse(config.init_from, what=INIT_FROM), checkpoint="none")
    _check_model({"config": run.config_text()}, config)


def _check_model(metadata: Mapping[str, Any], config: Config) -> None:
    check_stored_config(
        metadata,
        config,
        sections=("model.",),
        may_differ=NOT_IN_WEIGHTS,
        do=f"leave --model out, so that the new run has the model of the run in {INIT_FROM}",
    )


def _of_data(metadata: Mapping[str, Any], name: str) -> Any:
    """A value of the identity of a checkpoint's data; None: not recorded."""
    return (metadata.get("data") or {}).get(name)


def _open(
    named: RunCheckpoint,
    *,
    checkpoint: int | Literal["none"] | None,
    say: Callable[[str], object] = lambda text: None,
) -> RunDirectory:
    """The directory of a run, or a local copy of it, to be read. Raises OptimusError if it holds no
    run.

    Args:
      checkpoint: as for `run_to_read`.
    """
    path = run_to_read(named.run, what=INIT_FROM, checkpoint=checkpoint, say=say)
    run, wrong = RunDirectory(path, writer=False), None
    try:
        value = parse_json(run.config_text(), finite=False)
        if isinstance(value, dict) and {"model_type", "architectures"} & value.keys():
            wrong = "whose config.json is that of a Hugging Face model"
    except OSError:
        wrong = "which has no config.json" if path.is_dir() else "which is not a directory"
    if wrong is not None:
        raise ConfigError(
            explain(
                f"{INIT_FROM} does not name a run directory",
                given=f"{named.run}, {wrong}",
                do=f"give the directory that was the --run-dir of a run: {INIT_FROM} DIR, or"
                " DIR@STEP for one of its checkpoints",
            )
        )
    return run
