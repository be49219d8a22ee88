"""Saves the adapters of a run alone, in PEFT's format."""

import warnings
from collections.abc import Callable
from dataclasses import replace

import jax
import numpy as np

from optimus_jax.checkpoint.checkpoints import Checkpoints
from optimus_jax.config import Config, ModelConfig
from optimus_jax.data.published_tokenizer import published_files
from optimus_jax.devices.backend import start_backend
from optimus_jax.devices.jax_settings import check_jax_settings
from optimus_jax.errors import CheckpointError, ConfigError, OptimusError, explain, first_line
from optimus_jax.mesh.leaf import Leaf
from optimus_jax.models.merging import same_adapters
from optimus_jax.models.peft_format import to_peft
from optimus_jax.models.shapes import Params, model_shapes
from optimus_jax.run.export import TO, not_written
from optimus_jax.run.named_run import RUN
from optimus_jax.run.parameter_source import RunSource, parameter_source
from optimus_jax.run.stored_config import check_stored_config, differing_models
from optimus_jax.run.stored_run import config_of_run, run_to_read
from optimus_jax.run_directory.directory import RunDirectory
from optimus_jax.run_directory.run_data import check_tokenizer, tokenizer_of_run
from optimus_jax.store.hub import hub_directory
from optimus_jax.system.hub_model import HubModel
from optimus_jax.system.new_directory import check_free, new_directory
from optimus_jax.system.paths import UserPath, local_path
from optimus_jax.weights.directory import CONFIG_FILES, read_config
from optimus_jax.weights.peft_directory import REVISION, write_peft


def save_adapters(
    run_dir: UserPath,
    to: UserPath,
    *,
    step: int | None = None,
    base: str | None = None,
    warn: Callable[[str], object] = warnings.warn,
) -> int:
    """Write the adapters of a run, and its tokenizer, into a directory that PEFT loads.

    Of the checkpoint, only adapters are read. Nothing is overwritten.

    Args:
      run_dir: the run's directory, or its URL.
      to: the directory to make.
      step: that of a checkpoint; None: the newest good one.
      base: name or directory of the model without adapters, which PEFT looks for; None: where the
        run's parameters came from.
      warn: called with messages about damaged checkpoints and a missing base.
    Returns:
      The step.
    Raises:
      OptimusError: there is no such run or checkpoint, it has no adapters, it trained more than
        these, it added tokens to its model, or `base` is another model; or the directory exists or
        cannot be written.
    """
    check_jax_settings()
    target = local_path(to, what=TO, do="write a directory here, and copy it").absolute()
    check_free(target, what=TO)
    run = RunDirectory(run_to_read(run_dir, what=RUN, checkpoint=step, say=warn), writer=False)
    config = config_of_run(run, run_dir, purpose="whose adapters could be saved")
    model, tokenizer = config.model, tokenizer_of_run(run, config.data)
    start_backend()
    device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    shapes = model_shapes(model, model.vocab_size)

    def wanted(leaf: Leaf, like: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct | None:
        if leaf.group != "adapter":
            return None
        return jax.ShapeDtypeStruct(like.shape, like.dtype, sharding=device)

    abstract: Params = jax.tree.map(wanted, shapes.leaves, shapes.params)
    if not jax.tree.leaves(abstract):
        to_peft(abstract, model)  # raises: the model has no adapters
    _check_nothing_else_is_trained(shapes.leaves)
    named = base or base_of(config)
    if named is None:
        warn("the adapters name no model: the run began with a seed; name one with --base")
    else:
        _check_base(model, named, warn)
    restored = Checkpoints(run.checkpoints, config.checkpoint, warn=warn).restore(
        {"params": abstract},
        step,
        paddable=shapes.may_be_padded,
        partial=True,
        check=lambda metadata: check_stored_config(metadata, config, sections=("model.",)),
    )
    check_tokenizer(tokenizer, run, restored.metadata)
    params = jax.tree.map(np.asarray, restored.state["params"])
    hub = None if named is None else HubModel.parse(named)
    theirs, tensors = to_peft(params, model, named if hub is None else hub.repository)
    theirs |= {} if hub is None else {REVISION: hub.revision}
    with new_directory(target, what=TO) as directory:
        try:
            for name, content in published_files(tokenizer, run.path, model.max_length).items():
                (directory / name).write_bytes(content)
            write_peft(directory, theirs, tensors)
        except OSError as error:
            raise not_written(target, error) from error
    return restored.step


def base_of(config: Config) -> str | None:
    """What a run's adapters stand beside: where its parameters came from, or those of the run whose
    adapters it went on with. None: they were drawn from a seed.
    """
    if config.init_from is None or config.adapters_from is not None:
        return config.init_from
    try:
        source = parameter_source(config.init_from)
        if isinstance(source, RunSource):
            other = source.settings()
            if same_adapters(other.model, config.model):
                return base_of(other)
    except OptimusError:  # it is gone by now
        pass
    return config.init_from


def _check_base(model: ModelConfig, base: str, warn: Callable[[str], object]) -> None:
    """Raise OptimusError unless a run's adapters can stand beside a model.

    A run that added tokens to it cannot: their rows of the embedding and the head are in no file of
    adapters, and PEFT would draw others.
    """
    try:
        hub = HubModel.parse(base, bare=True)
        theirs = (
            parameter_source(base).config()
            if hub is None
            else read_config(hub_directory(hub, CONFIG_FILES, cached=True))
        )
    except OptimusError as error:
        warn(f"whether the adapters are for {base} is not known: {first_line(error)}")
        return
    same_tokens = replace(theirs, vocab_size=max(model.vocab_size, theirs.vocab_size))
    if differing := differing_models(same_tokens, model):
        raise CheckpointError(
            explain(
                "the adapters are not for this model",
                given=f"{base} has "
                + "; ".join(
                    f"{name}={value}, the run {ours}" for name, (value, ours) in differing.items()
                ),
                do="give --base the model that the run began with, or leave it out",
            )
        )
    if model.vocab_size > theirs.vocab_size:
        raise ConfigError(
            explain(
                "the run added tokens to its model, and a directory of adapters has none of them",
                given=f"model.vocab_size={model.vocab_size}; {base} has {theirs.vocab_size}",
                do="export the whole model instead, without --adapters",
            )
        )


def _check_nothing_else_is_trained(leaves: Params) -> None:
    """Raise ConfigError if the run trained more than adapters, which PEFT's directory lacks."""
    if trained := sorted(
        {leaf.group for leaf in jax.tree.leaves(leaves) if leaf.trained} - {"adapter"}
    ):
        raise ConfigError(
            explain(
                "the run trained more than its adapters, which alone compute something else",
                given=f"parameters that were trained too: {', '.join(trained)}",
                do="export the whole model",
            )
        )
