"""The table of tasks (training/task.py), and what a run must have for one."""

from collections.abc import Collection
from typing import Any

import jax.numpy as jnp

from optimus_jax.config import Config
from optimus_jax.config.tuning import BASE_GROUPS
from optimus_jax.data.batch import BATCH_ARRAYS
from optimus_jax.errors import ConfigError, explain, nearest
from optimus_jax.mesh.axes import VOCAB
from optimus_jax.training.loss import cross_entropy
from optimus_jax.training.preference import count_pairs, preference_loss
from optimus_jax.training.task import LossInputs, Task, TaskSums

READ_BY_THE_MODEL = ("tokens", "positions", "segments", "examples")
"""Arrays that every task needs."""


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
    ),
    "dpo": Task(
        loss=preference_loss,
        count=count_pairs,
        arrays=BATCH_ARRAYS,
        learns_from_pairs=True,
        has_reference=True,
    ),
}
"""By the value of the setting `task`."""
PREFERENCE = "preference."
"""Section of the settings of preference pairs."""


def task_named(name: str) -> Task:
    """A row of TASKS. Raises ConfigError, with the nearest name, if there is none."""
    if name not in TASKS:
        raise ConfigError(
            explain(f"unknown task {name!r}", given=f"task={name}", do=nearest(name, TASKS))
        )
    return TASKS[name]


def check_task(config: Config, named: Collection[str] = ()) -> None:
    """Raise ConfigError if the task is unknown, lacks an array that the model reads, or the model
    does not have what the task needs.

    Args:
      named: dotted names of the settings that the user gave. Those of pairs need a task that learns
        from pairs.
    """
    tuning, task = config.model.tuning, task_named(config.task)
    if missing := [name for name in READ_BY_THE_MODEL if name not in task.arrays]:
        raise ConfigError(
            explain(
                f"task {config.task} lacks arrays that the model reads",
                given=f"no {', '.join(missing)} among {', '.join(task.arrays)}",
                do="add them to Task.arrays",
            )
        )
    unused = sorted(name for name in named if name.startswith(PREFERENCE))
    if unused and not task.learns_from_pairs:
        tasks = [name for name, each in TASKS.items() if each.learns_from_pairs]
        raise ConfigError(
            explain(
                "settings of preference pairs have no use in a task that does not learn from pairs",
                given=f"{', '.join(unused)}; task={config.task}",
                do=f"add --set task={' or '.join(tasks)}, or leave them out",
            )
        )
    if task.has_reference and not (tuning.has_adapters and set(tuning.frozen) == set(BASE_GROUPS)):
        raise ConfigError(
            explain(
                f"task {config.task} compares the model with what it was before, which must still"
                " be there: only adapters may be trained",
                given=f"model.tuning.method={tuning.method},"
                f" frozen: {', '.join(tuning.frozen) or 'nothing'}",
                do="set model.tuning.method=lora, and leave model.tuning.freeze out",
            )
        )
