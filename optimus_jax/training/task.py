"""Tasks: what a batch holds, and what is learnt from it.

A task names the arrays of its batches, makes them of the loader's examples, and gives the loss of
some rows. Everything else (microbatches, pipelines, sums over devices, evaluation, costs) is the
same for all tasks.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import jax.numpy as jnp
import numpy as np
from jax import Array

from optimus_jax.data.batch import BATCH_ARRAYS, BatchArray
from optimus_jax.errors import ConfigError, explain, nearest
from optimus_jax.mesh.axes import VOCAB
from optimus_jax.mesh.collectives import Collectives
from optimus_jax.models.transformer import Decoder
from optimus_jax.training.loss import cross_entropy

Batch = dict[str, Array]
"""Arrays on devices, by the names of the task's arrays."""


class Loss(Protocol):
    """The type of `Task.loss`."""

    def __call__(
        self,
        model: Decoder,
        x_BLD: Array,
        rows: Batch,
        *,
        comm: Collectives,
        weight: Array | float,
        chunk_tokens: int,
    ) -> Array:
        """The weighted sum over these rows' terms, a float32 scalar.

        Args:
          x_BLD: the residual stream after the layers.
          weight: weight of every term.
          chunk_tokens: tokens whose logits exist at the same time.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class Task:
    """A task: a row of TASKS."""

    loss: Loss
    count: Callable[[Batch], Array]
    """int32 number of terms in the loss of some rows, by which the loss and its gradient are
    divided, over all devices."""
    arrays: Mapping[str, BatchArray]
    """The arrays of a batch. Those that the model reads (tokens, positions, segments, examples) are
    among them."""
    prepare: Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]] = lambda batch: batch
    """Some rows of `arrays` on the host, made of the same rows as the loader gives them
    (data/batch.py). A row may depend on nothing else."""


def _next_token_loss(
    model: Decoder,
    x_BLD: Array,
    rows: Batch,
    *,
    comm: Collectives,
    weight: Array | float,
    chunk_tokens: int,
) -> Array:
    hidden_BLE = comm.fan_out(model.head_input(x_BLD, comm), VOCAB)
    weights: Any = rows["loss_mask"].astype("float32") * weight
    return cross_entropy(
        hidden_BLE.reshape(-1, hidden_BLE.shape[-1]),
        model.output_head,
        rows["targets"].reshape(-1),
        weights.reshape(-1),
        comm=comm,
        vocab_size=model.config.vocab_size,
        chunk_tokens=chunk_tokens,
    )


TASKS: dict[str, Task] = {
    "next_token": Task(
        loss=_next_token_loss,
        count=lambda rows: rows["loss_mask"].sum(dtype=jnp.int32),
        arrays=BATCH_ARRAYS,
    )
}
"""By the value of the setting `task`."""


def task_named(name: str) -> Task:
    """A row of TASKS. Raises ConfigError, with the nearest name, if there is none."""
    if name not in TASKS:
        raise ConfigError(
            explain(f"unknown task {name!r}", given=f"task={name}", do=nearest(name, TASKS))
        )
    return TASKS[name]
