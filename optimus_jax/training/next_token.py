"""The likeliest next token of rows of a batch, under the objective's own plan: any mesh, stages
included.

A forward pass gives one token for each row. There is no KV cache, so a text takes as many passes as
it has tokens. Inference has one (inference/model_on_mesh.py).

Shapes: B rows of a microbatch, L length, E embed, R rows of the batch over all devices.
"""

from dataclasses import replace
from functools import partial

import jax.numpy as jnp
from jax import lax

from optimus_jax.mesh.axes import BATCH, VOCAB
from optimus_jax.mesh.zero import varying_axes
from optimus_jax.models.encoder_decoder import text_of
from optimus_jax.training.loss import likeliest_tokens
from optimus_jax.training.task import LossInputs, Task, TaskSums

LIKELIEST = "likeliest"
"""The metric of `next_token_task`: the tokens [R], each a sum with one term."""


def next_token_task(task: Task, num_rows: int) -> Task:
    """A task on the same rows that has no loss, and the metric LIKELIEST: the likeliest token after
    the one position of each row that counts.

    Args:
      num_rows: R. `examples` are numbers of the batch's rows.
    """
    return replace(task, loss=partial(_next_tokens, num_rows=num_rows))


def _next_tokens(inputs: LossInputs, *, num_rows: int) -> TaskSums:
    model, comm, rows = inputs.model, inputs.comm, inputs.rows
    hidden_BLE = comm.fan_out(model.head_input(inputs.value, comm), VOCAB)
    places_B = text_of(rows["loss_mask"], model.config).argmax(1)
    hidden_BE = jnp.take_along_axis(hidden_BLE, places_B[:, None, None], 1)[:, 0]
    token_B = likeliest_tokens(
        hidden_BE, model.output_head, comm=comm, vocab_size=model.config.vocab_size
    )
    # All devices that share these rows have found the same.
    shared = sorted(varying_axes(token_B) - set(comm.rules.get(BATCH, ())))
    token_B = lax.pmax(token_B, tuple(shared)) if shared else token_B
    is_row_BR = rows["examples"][:, None] == jnp.arange(num_rows, dtype=jnp.int32)[None]
    found_R = jnp.where(is_row_BR, token_B[:, None], 0).sum(0)
    return TaskSums(jnp.zeros((), jnp.float32), {LIKELIEST: found_R})
