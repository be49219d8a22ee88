"""Tasks: what a batch holds, and what is learnt from it.

A task names the arrays of its batches, makes them of the loader's examples, and gives the loss and
the metrics of some rows. Everything else (microbatches, pipelines, sums over devices, evaluation,
costs) is the same for all tasks.
"""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from optimus_jax.data.batch import BATCH_ARRAYS, BatchArray, HostBatch
from optimus_jax.errors import ConfigError, explain, nearest
from optimus_jax.mesh.axes import VOCAB
from optimus_jax.mesh.collectives import Collectives
from optimus_jax.mesh.sums import Sums
from optimus_jax.models.transformer import Decoder
from optimus_jax.run_directory.contents import COMMON, EVENTS
from optimus_jax.run_directory.step_record import StepRecord
from optimus_jax.training.loss import cross_entropy

Batch = dict[str, Array]
"""Arrays on devices, by the names of the task's arrays."""


@dataclass(frozen=True, kw_only=True)
class LossInputs:
    """What the loss of some rows is computed from, inside the step's `shard_map`."""

    model: Decoder
    value: Any
    """The stage value after the last layer: of a decoder, its residual stream [B, L, D]."""
    rows: Batch
    comm: Collectives
    weight: Array | float
    """Weight of every term."""
    chunk_tokens: int
    """Tokens whose logits exist at the same time."""


class TaskSums(NamedTuple):
    """This device's shares (mesh/sums.py) of sums over the terms of some rows."""

    loss: Array
    """The weighted sum, a float32 scalar; differentiated."""
    metrics: Sums
    """By name, without the weight; not differentiated. A metric of an operation that has no
    derivative reads `jax.lax.stop_gradient` of its arguments."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """A task: a row of TASKS."""

    loss: Callable[[LossInputs], TaskSums]
    count: Callable[[Batch], Array]
    """int32 number of terms in the loss of some rows. The loss, its gradient, metrics and auxiliary
    sums are divided by it, over all devices."""
    arrays: Mapping[str, BatchArray]
    """The arrays of a batch. Those that the model reads (tokens, positions, segments, examples) are
    among them."""
    prepare: Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]] = lambda batch: batch
    """Some rows of `arrays` on the host, made of the same rows as the loader gives them
    (data/batch.py). A row may depend on nothing else."""
    auxiliary_weights: Mapping[str, float] = field(default_factory=dict)
    """What training adds to the loss for each auxiliary sum of the layers (`LayersOutput`): this
    times the sum. Names that a model does not give add nothing."""

    def batch_of(self, loaded: HostBatch) -> HostBatch:
        """What `prepare` makes of rows of the loader. Raises ConfigError if these are not the
        `arrays`.
        """
        prepared = self.prepare(loaded)
        rows, seq_len = loaded["tokens"].shape
        expected = {
            name: f"{np.dtype(array.dtype)} {array.shape(rows, seq_len)}"
            for name, array in self.arrays.items()
        }
        found = {name: f"{array.dtype} {array.shape}" for name, array in prepared.items()}
        if found != expected:
            names = [
                name for name in {**expected, **found} if expected.get(name) != found.get(name)
            ]
            raise ConfigError(
                explain(
                    "a task prepares other arrays than it names",
                    given="; ".join(
                        f"{name}: {expected.get(name, 'none')} by Task.arrays,"
                        f" {found.get(name, 'none')} by Task.prepare"
                        for name in names
                    ),
                    do="let both have the same names, dtypes and shapes",
                )
            )
        return prepared


def _next_token_loss(inputs: LossInputs) -> TaskSums:
    model, comm, rows = inputs.model, inputs.comm, inputs.rows
    hidden_BLE = comm.fan_out(model.head_input(inputs.value, comm), VOCAB)
    weights: Any = rows["loss_mask"].astype("float32") * inputs.weight
    loss = cross_entropy(
        hidden_BLE.reshape(-1, hidden_BLE.shape[-1]),
        model.output_head,
        rows["targets"].reshape(-1),
        weights.reshape(-1),
        comm=comm,
        vocab_size=model.config.vocab_size,
        chunk_tokens=inputs.chunk_tokens,
    )
    return TaskSums(loss, {})


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


RESERVED_NAMES = frozenset(
    {*(one.name for one in dataclasses.fields(StepRecord)), *COMMON, *EVENTS["eval"].fields}
)
"""Names that a step or an evaluation records already."""


def reported(loss: Array, metrics: Sums, auxiliary: Sums) -> TaskSums:
    """The sums of some rows that a run reports: auxiliary sums are metrics too.

    Raises ConfigError if a name is another value's.
    """
    both, all_names = metrics.keys() & auxiliary, metrics.keys() | auxiliary
    if taken := sorted(both | all_names & RESERVED_NAMES):
        raise ConfigError(
            explain(
                "a metric has the name of another value",
                given=f"{', '.join(taken)}, among metrics {sorted(metrics)} of the task and"
                f" auxiliary sums {sorted(auxiliary)} of the layers",
                do="call it something else",
            )
        )
    return TaskSums(loss, metrics | auxiliary)
