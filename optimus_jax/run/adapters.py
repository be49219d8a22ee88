"""Saves the adapters of a run alone, in PEFT's format."""

from collections.abc import Callable
from os import PathLike
from pathlib import Path

import jax
import numpy as np

from optimus_jax.checkpoint.checkpoints import Checkpoints
from optimus_jax.devices.backend import start_backend
from optimus_jax.devices.jax_settings import check_jax_settings
from optimus_jax.mesh.leaf import Leaf
from optimus_jax.models.peft_format import to_peft
from optimus_jax.models.shapes import Params, model_shapes
from optimus_jax.run.stored_config import check_stored_config
from optimus_jax.run.stored_run import config_of_run, run_to_read
from optimus_jax.run_directory.directory import RunDirectory
from optimus_jax.weights.peft_directory import write_peft


def save_adapters(
    run_dir: str,
    to: str | PathLike[str],
    *,
    step: int | None = None,
    base: str | None = None,
    warn: Callable[[str], object] = lambda text: None,
) -> int:
    """Write the adapters of a run into a directory that PEFT loads. Only they are read.

    Args:
      run_dir: the run's directory, or its URL.
      step: that of a checkpoint; None: the newest good one.
      base: name or directory of the model without adapters, which PEFT looks for; None: where the
        run's parameters came from.
      warn: called with messages about damaged checkpoints.
    Returns:
      The step.
    Raises:
      OptimusError: there is no such run or checkpoint, or it has no adapters.
    """
    check_jax_settings()
    run = RunDirectory(run_to_read(run_dir, what="--run", checkpoint=step, say=warn), writer=False)
    config = config_of_run(run, run_dir, purpose="whose adapters could be saved")
    model = config.model
    start_backend()
    device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    shapes = model_shapes(model, model.vocab_size)

    def wanted(leaf: Leaf, like: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct | None:
        if leaf.group != "adapter":
            return None
        return jax.ShapeDtypeStruct(like.shape, like.dtype, sharding=device)

    target: Params = jax.tree.map(wanted, shapes.leaves, shapes.params)
    if not jax.tree.leaves(target):
        to_peft(target, model)  # raises: the model has no adapters
    restored = Checkpoints(run.checkpoints, config.checkpoint, warn=warn).restore(
        {"params": target},
        step,
        paddable=shapes.may_be_padded,
        partial=True,
        check=lambda metadata: check_stored_config(metadata, config, sections=("model.",)),
    )
    params = jax.tree.map(np.asarray, restored.state["params"])
    write_peft(Path(to), *to_peft(params, model, base or config.init_from))
    return restored.step
