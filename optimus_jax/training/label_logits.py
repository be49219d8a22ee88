"""Logits of the labels of rows of a batch, under the objective's own plan: any mesh, stages
included.

Shapes: B rows of a microbatch, L length (this device's tokens), W length (all tokens), N labels, R
rows of the batch over all devices.
"""

from dataclasses import replace
from functools import partial

import jax.numpy as jnp
from jax import lax

from optimus_jax.mesh.axes import BATCH
from optimus_jax.mesh.zero import varying_axes
from optimus_jax.models.block import ForwardContext
from optimus_jax.training.task import PATCHES, LossInputs, Task, TaskSums

LOGITS = "label_logits"
"""The metric of `logits_task`: float32 [R, W, N], or of images [R, 1, N], of which one token has a
label. Each is a sum with one term."""


def logits_task(task: Task, num_rows: int) -> Task:
    """A task on the same rows that has no loss, and the metric LOGITS.

    Args:
      num_rows: R. `examples` are numbers of the batch's rows.
    """
    return replace(task, loss=partial(_logits, num_rows=num_rows))


def _logits(inputs: LossInputs, *, num_rows: int) -> TaskSums:
    model, comm, rows = inputs.model, inputs.comm, inputs.rows
    hidden_BLE = model.head_input(inputs.value, comm)
    logits_BWN = comm.all_tokens(model.logits(hidden_BLE, ForwardContext(comm=comm)))
    if PATCHES in rows:
        logits_BWN = logits_BWN[:, :1]
    # All devices that share these rows have found the same.
    shared = sorted(varying_axes(logits_BWN) - set(comm.rules.get(BATCH, ())))
    logits_BWN = lax.pmax(logits_BWN, tuple(shared)) if shared else logits_BWN
    # A gather and a mask, and no product with a mask, which some devices would round.
    is_row_RB = jnp.arange(num_rows, dtype=jnp.int32)[:, None] == rows["examples"][None]
    found_RWN = logits_BWN[is_row_RB.argmax(1)]
    found_RWN = jnp.where(is_row_RB.any(1)[:, None, None], found_RWN, 0)
    return TaskSums(jnp.zeros((), jnp.float32), {LOGITS: found_RWN})
