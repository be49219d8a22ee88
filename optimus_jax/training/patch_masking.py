"""Masked images: which patches of an image are hidden, and the loss of those that a model restores.

Xie et al. 2022 (SimMIM, arXiv:2111.09886): a share of the squares of an image is hidden, and the
loss is the mean absolute difference of pixels in them.

Shapes: B rows, L length, P values of a patch, S squares.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from optimus_jax.config import Config, ModelConfig
from optimus_jax.config.model import HIDDEN_PATCH
from optimus_jax.models.block import ForwardContext
from optimus_jax.training.task import PATCHES, Batch, LossInputs, TaskSums, scaled


def with_hidden_patches(config: Config, rows: Batch, keys_B: Array) -> Batch:
    """Rows in which some patches are hidden, which are those that count, if the class does.

    Args:
      keys_B: a key for every row; the choice depends on nothing else.
    """
    squares_L = squares_of(config.model, config.patch_masking.square)
    num_squares = int(squares_L.max()) + 1
    num_hidden = max(1, round(config.patch_masking.share * num_squares))

    def drawn(key: Array) -> Array:
        order_S = jax.random.permutation(key, num_squares)
        return (order_S < num_hidden)[squares_L[1:]]

    is_hidden_BL = jnp.pad(jax.vmap(drawn)(keys_B), ((0, 0), (1, 0))) & rows["loss_mask"][:, :1]
    tokens_BL = jnp.where(is_hidden_BL, HIDDEN_PATCH, rows["tokens"])
    return rows | {"tokens": tokens_BL, "loss_mask": is_hidden_BL}


def squares_of(model: ModelConfig, square: int) -> np.ndarray:
    """Number of the square that each token is in, int [L]; -1 for the class.

    Args:
      square: patches of a side of a square; those at the edges may be smaller.
    """
    side = model.image_size // model.patch_size
    places = np.arange(side) // square
    squares = places[:, None] * (places[-1] + 1) + places[None]
    return np.concatenate([[-1], squares.ravel()])


def patch_loss(inputs: LossInputs) -> TaskSums:
    """Mean absolute difference of the values of each patch that counts."""
    model, comm, rows = inputs.model, inputs.comm, inputs.rows
    hidden_BLE = model.head_input(inputs.value, comm)
    found_BLP = model.logits(hidden_BLE, ForwardContext(comm=comm))
    counts_BL = comm.local_tokens(rows["loss_mask"])
    wanted_BLP = scaled(comm.local_tokens(rows[PATCHES]), model.config)
    losses_BL = jnp.abs(found_BLP - wanted_BLP).mean(-1)
    return TaskSums(jnp.where(counts_BL, losses_BL, 0).sum() * inputs.weight, {})
