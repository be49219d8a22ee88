"""Load the model of a run, or a published one, for generation."""

import json
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from optimus_jax.checkpoint.checkpoints import Checkpoints
from optimus_jax.config import Tuning
from optimus_jax.config.axes import AxisSizes
from optimus_jax.config.phases import phases_of
from optimus_jax.data.tokenizers import Tokenizer, load_tokenizer
from optimus_jax.devices.backend import start_backend, unexpected_cpu_warning
from optimus_jax.devices.jax_settings import check_jax_settings
from optimus_jax.errors import ConfigError, argument, explain
from optimus_jax.inference.model_on_mesh import ONE_DEVICE, ModelOnMesh
from optimus_jax.inference.text_model import TextModel
from optimus_jax.mesh.formats import COMPUTE_DTYPES
from optimus_jax.mesh.leaf import Leaf
from optimus_jax.models.merging import without_adapters
from optimus_jax.run.named_run import RUN
from optimus_jax.run.published_weights import read_params, with_adapters
from optimus_jax.run.stored_config import check_stored_config
from optimus_jax.run.stored_run import config_of_run, run_to_read
from optimus_jax.run_directory.directory import RunDirectory
from optimus_jax.run_directory.run_data import check_tokenizer, tokenizer_of_run
from optimus_jax.system.paths import UserPath
from optimus_jax.weights.directory import open_model
from optimus_jax.weights.published import PublishedSource
from optimus_jax.weights.published_adapters import PublishedAdapters


def load_text_model(
    named: UserPath,
    step: int | None = None,
    *,
    mesh: AxisSizes = ONE_DEVICE,
    eos: str | None = None,
    chat_template: str | None = None,
    warn: Callable[[str], object] = warnings.warn,
) -> TextModel:
    """Load a model onto the first devices of this process.

    Args:
      named: the directory or URL of a run, which may have used any mesh; the directory of a
        published model, or its name on the hub; a directory of adapters in PEFT's format.
      step: step of the run's checkpoint; None: the newest good one.
      mesh: sizes of fsdp and tensor, over which the model is split.
      eos: token that ends a text of a published model; None: the one that its files name.
      chat_template: path or URL of a chat template; None: the tokenizer's own.
    Raises:
      OptimusError: there is no such run, checkpoint, model or tokenizer, or the mesh does not fit.
    """
    check_jax_settings()
    source = PublishedSource.parse(str(named), what=RUN)
    adapters = PublishedAdapters.parse(str(named), what=RUN)
    if adapters is not None:
        source = adapters.published_base()
    if source is not None:
        load = partial(load_tokenizer, eos=eos, chat_template=chat_template)
        model = _published(source, adapters, step, mesh, load, warn)
        generation = dict(source.generation())
        if eos is not None:
            generation.pop("eos_token_id", None)
        return replace(model, generation_config=generation)
    if eos is not None:
        raise ConfigError(
            explain(
                "a run has a token of its own that ends its documents",
                given=f"{RUN} {named}, eos {eos!r}",
                do=f"leave {argument('eos')} out; {argument('stop', 'TEXT')} ends a text too",
            )
        )
    return _of_run(named, step, mesh, chat_template, warn)


def _of_run(
    named: UserPath,
    step: int | None,
    mesh: AxisSizes,
    chat_template: str | None,
    warn: Callable[[str], object],
) -> TextModel:
    """The model of a run. Only parameters are read."""
    run = RunDirectory(run_to_read(named, what=RUN, checkpoint=step, say=warn), writer=False)
    config = config_of_run(run, named, purpose="to sample from", or_else=" or of a published model")
    tokenizer, model = tokenizer_of_run(run, config.data), ModelOnMesh(config.model, mesh)
    _start(warn)
    checkpoints = Checkpoints(run.checkpoints, config.checkpoint, warn=warn)
    restored = checkpoints.restore(
        {"params": model.abstract_params()},
        step,
        paddable=model.shapes.may_be_padded,
        partial=True,
        check=lambda metadata: check_stored_config(metadata, config, sections=("model.",)),
    )
    check_tokenizer(tokenizer, run, restored.metadata)
    if chat_template is not None:
        own = str(run.tokenizer or config.data.tokenizer)
        tokenizer = load_tokenizer(own, config.data.eos, chat_template=chat_template)
    dtype = COMPUTE_DTYPES[json.loads(restored.metadata["plan"])["precision"]]
    trained_length = max(
        phase.seq_len for phase in phases_of(config) if phase.steps_before < max(1, restored.step)
    )
    params, form = jax.tree.flatten(restored.state.pop("params"))
    # One after the other, so that never more than one is there in both formats.
    for place, leaf in enumerate(jax.tree.leaves(model.shapes.leaves)):
        params[place] = _computed_in(dtype, leaf, params[place]).block_until_ready()
    return TextModel(
        model=model,
        params=jax.tree.unflatten(form, params),
        tokenizer=tokenizer,
        step=restored.step,
        trained_length=trained_length,
        data=config.data,
    )


def _published(
    source: PublishedSource,
    adapters: PublishedAdapters | None,
    step: int | None,
    mesh: AxisSizes,
    load: Callable[[str], Tokenizer],
    warn: Callable[[str], object],
) -> TextModel:
    """A published model, in the format of its embedding, perhaps with adapters."""
    if step is not None:
        raise ConfigError(
            explain(
                "a published model has no checkpoints",
                given=f"{RUN} {adapters or source}, step {step}",
                do=f"leave {argument('step')} out",
            )
        )
    named = (adapters and adapters.tokenizer()) or source.tokenizer()
    if named is None:
        raise ConfigError(
            explain(
                "the model comes without a tokenizer.json",
                given=source,
                do="add the file to the model's directory",
            )
        )
    tokenizer, config = load(named), source.config()
    tuning, added = (Tuning(), {}) if adapters is None else adapters.read(config)
    model = ModelOnMesh(replace(config, tuning=tuning), mesh)
    opened = open_model(source.fetched())
    opened.check_tied_head()
    _start(warn)
    is_known = opened.dtype in map(jnp.dtype, COMPUTE_DTYPES.values())
    dtype = jnp.dtype(opened.dtype if is_known else jnp.float32)
    shardings = model.param_shardings
    target = without_adapters(model.abstract_params(dtype))
    params = read_params(opened.tensors, model.shapes.base, target)
    params = with_adapters(params, added, model.shapes, shardings)
    return TextModel(
        model=model,
        params=jax.tree.map(lambda leaf: leaf.astype(dtype), params),
        tokenizer=tokenizer,
        step=None,
    )


def _computed_in(dtype: Any, leaf: Leaf, param: jax.Array) -> jax.Array:
    """A parameter in the format of products; codes of quantised matrices stay."""
    is_code = not leaf.values or not jnp.issubdtype(param.dtype, jnp.floating)
    return param if is_code else param.astype(dtype)


def _start(warn: Callable[[str], object]) -> None:
    start_backend()
    if (warning := unexpected_cpu_warning()) is not None:
        warn(warning)
