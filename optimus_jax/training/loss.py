"""Next-token cross-entropy over a vocabulary that may be split, a chunk of tokens at a time.

No device holds the logits of all its tokens at once, nor those of other devices' parts of the
vocabulary: it computes a chunk's logits, turns them into the loss and into their own gradient, and
drops them. Forward and backward are therefore one pass with three matmuls, as many as plain
autodiff needs.

Shapes: N tokens of a device, C tokens of a chunk, D embed, V vocab (the device's part).
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax

from optimus_jax.mesh.axes import VOCAB
from optimus_jax.mesh.collectives import Collectives
from optimus_jax.mesh.zero import vary, varying_axes


def cross_entropy(
    hidden_ND: Array,
    head_VD: Array,
    targets_N: Array,
    weights_N: Array,
    *,
    comm: Collectives,
    vocab_size: int,
    chunk_tokens: int,
) -> Array:
    """Weighted sum of -log p(target), a float32 scalar; gradients flow to hidden and head.

    Args:
      hidden_ND: final hidden states. They and the head are rounded to `comm.dtype`; a gradient has
        its argument's format.
      head_VD: output matrix; rows at or past `vocab_size` are padding.
      targets_N: int32, global token ids.
      weights_N: float32 weight of each token's term; 0 leaves it out.
      chunk_tokens: tokens whose float32 logits exist at the same time.
    """
    hidden_ND = comm.fan_out(hidden_ND, VOCAB)
    axes = varying_axes(hidden_ND) | varying_axes(head_VD)
    hidden_ND, head_VD = vary(hidden_ND, sorted(axes)), vary(head_VD, sorted(axes))
    return _cross_entropy(
        (comm, vocab_size, chunk_tokens), hidden_ND, head_VD, targets_N, weights_N
    )


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _cross_entropy(
    how: tuple, hidden_ND: Array, head_VD: Array, targets_N: Array, weights_N: Array
) -> Array:
    hidden_ND, head_VD = _rounded(how, hidden_ND, head_VD)

    def add_chunk(total: Array, chunk: tuple) -> tuple[Array, None]:
        hidden_CD, targets_C, weights_C = chunk
        return total + _chunk(how, hidden_CD, head_VD, targets_C, weights_C)[0], None

    chunks = _chunks(how[2], hidden_ND, targets_N, weights_N)
    return lax.scan(add_chunk, _zero_loss(weights_N), chunks)[0]


def _forward(
    how: tuple, hidden_ND: Array, head_VD: Array, targets_N: Array, weights_N: Array
) -> tuple[Array, tuple]:
    """The loss, and the gradients for a cotangent of 1."""
    hidden_dtype, head_dtype = hidden_ND.dtype, head_VD.dtype
    hidden_ND, head_VD = _rounded(how, hidden_ND, head_VD)

    def add_chunk(carry: tuple, chunk: tuple) -> tuple[tuple, Array]:
        total, d_head_DV = carry
        hidden_CD, targets_C, weights_C = chunk
        loss, d_logits_CV = _chunk(how, hidden_CD, head_VD, targets_C, weights_C)
        d_hidden_CD = jnp.dot(d_logits_CV, head_VD, preferred_element_type=hidden_dtype)
        d_head_DV = d_head_DV + jnp.dot(
            hidden_CD.T, d_logits_CV, preferred_element_type=jnp.float32
        )
        return (total + loss, d_head_DV), d_hidden_CD

    chunks = _chunks(how[2], hidden_ND, targets_N, weights_N)
    # The head's gradient is summed transposed: a CPU's matmul is 1.6 times as fast with the longer
    # dimension last (docs/decisions/0003).
    start = (_zero_loss(weights_N), jnp.zeros_like(head_VD.T, jnp.float32))
    (loss, d_head_DV), d_hidden = lax.scan(add_chunk, start, chunks)
    d_hidden_ND = d_hidden.reshape(-1, hidden_ND.shape[1])[: hidden_ND.shape[0]]
    return loss, (d_hidden_ND, d_head_DV.T.astype(head_dtype))


def _backward(how: tuple, gradients: tuple[Array, Array], cotangent: Array) -> tuple:
    del how
    d_hidden_ND, d_head_VD = (gradient * cotangent.astype(gradient.dtype) for gradient in gradients)
    return d_hidden_ND, d_head_VD, None, None


_cross_entropy.defvjp(_forward, _backward)


def _rounded(how: tuple, *arrays: Array) -> list[Array]:
    """Arrays in the dtype of the matmuls."""
    return [array.astype(how[0].dtype) for array in arrays]


def _chunk(
    how: tuple, hidden_CD: Array, head_VD: Array, targets_C: Array, weights_C: Array
) -> tuple[Array, Array]:
    """A chunk's weighted loss, and the gradient of its logits [C, V] in the format of the
    matmuls."""
    comm, vocab_size, _ = how
    num_rows = head_VD.shape[0]
    first = comm.offset(num_rows, VOCAB)
    logits_CV = jnp.dot(hidden_CD, head_VD.T, preferred_element_type=jnp.float32)
    if comm.size(num_rows, VOCAB) > vocab_size:
        logits_CV = jnp.where(
            first + jnp.arange(num_rows)[None, :] < vocab_size, logits_CV, -jnp.inf
        )
    largest_C = comm.max(logits_CV.max(-1), VOCAB)
    exp_CV = jnp.exp(logits_CV - largest_C[:, None])
    row_C = targets_C - first
    target_logit_C = jnp.take_along_axis(
        logits_CV, jnp.clip(row_C, 0, num_rows - 1)[:, None], axis=1
    )[:, 0]
    target_logit_C = jnp.where((row_C >= 0) & (row_C < num_rows), target_logit_C, 0)
    sum_C, target_logit_C = comm.sum(jnp.stack((exp_CV.sum(-1), target_logit_C)), VOCAB)
    loss = ((jnp.log(sum_C) + largest_C - target_logit_C) * weights_C).sum()
    is_target_CV = jnp.arange(num_rows)[None, :] == row_C[:, None]
    d_logits_CV = exp_CV * (weights_C / sum_C)[:, None] - jnp.where(
        is_target_CV, weights_C[:, None], 0
    )
    return loss, d_logits_CV.astype(hidden_CD.dtype)


def _zero_loss(weights_N: Array) -> Array:
    return vary(jnp.zeros((), jnp.float32), sorted(varying_axes(weights_N)))


def _chunks(chunk_tokens: int, *arrays: Array) -> tuple[Array, ...]:
    """[N, ...] -> [number of chunks, C, ...], padded with zeros, whose weight is zero too."""
    num_tokens = arrays[0].shape[0]
    num_chunks = -(-num_tokens // chunk_tokens)
    size = -(-num_tokens // num_chunks)
    missing = num_chunks * size - num_tokens
    return tuple(
        jnp.pad(array, ((0, missing),) + ((0, 0),) * (array.ndim - 1)).reshape(
            num_chunks, size, *array.shape[1:]
        )
        for array in arrays
    )
