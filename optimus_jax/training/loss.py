"""Next-token cross-entropy over a vocabulary that may be split, a chunk of tokens at a time.

No device holds the logits of all its tokens at once, nor those of other devices' parts of the
vocabulary: it computes a chunk's logits, turns them into the loss and into their own gradient, and
drops them. Forward and backward are therefore one pass with three matmuls, as many as plain
autodiff needs.

Shapes: N tokens of a device, C tokens of a chunk, D embed, V vocab (the device's part).
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from optimus_jax.mesh.axes import VOCAB
from optimus_jax.mesh.collectives import Collectives
from optimus_jax.mesh.zero import vary, varying_axes
from optimus_jax.models.head import Head


def cross_entropy(
    hidden_ND: Array,
    head: Head,
    targets_N: Array,
    weights_N: Array,
    *,
    comm: Collectives,
    vocab_size: int,
    chunk_tokens: int,
) -> Array:
    """Weighted sum of -log p(target), a float32 scalar; gradients flow to hidden and head.

    Args:
      hidden_ND: final hidden states, fanned out over the vocabulary. They and the head are rounded
        to `comm.dtype`; a gradient has its argument's format.
      head: its matrix's rows at or past `vocab_size` are padding.
      targets_N: int32, global token ids.
      weights_N: float32 weight of each token's term; 0 leaves it out.
      chunk_tokens: tokens whose float32 logits exist at the same time.
    """
    head_VD, bias_V = head.matrix_VE, head.bias_V
    axes = sorted(varying_axes(hidden_ND) | varying_axes(head_VD))
    hidden_ND, head_VD = vary(hidden_ND, axes), vary(head_VD, axes)
    bias_V = None if bias_V is None else vary(bias_V, axes)
    how = _How(comm, vocab_size, chunk_tokens, head.softcap)
    return _cross_entropy(how, hidden_ND, head_VD, bias_V, targets_N, weights_N)


def token_losses(
    hidden_ND: Array,
    head: Head,
    targets_N: Array,
    *,
    comm: Collectives,
    vocab_size: int,
    chunk_tokens: int,
) -> Array:
    """-log p(target) of every token, float32 [N]. Not differentiable; arguments are those of
    `cross_entropy`.
    """
    how = _How(comm, vocab_size, chunk_tokens, head.softcap)
    hidden_ND, head_VD = map(lax.stop_gradient, _rounded(how, hidden_ND, head.matrix_VE))
    bias_V = None if head.bias_V is None else lax.stop_gradient(head.bias_V)

    def chunk(_: None, chunk: tuple) -> tuple[None, Array]:
        hidden_CD, targets_C = chunk
        ones_C = jnp.ones_like(targets_C, jnp.float32)
        return None, _chunk(how, hidden_CD, head_VD, bias_V, targets_C, ones_C)[2]

    chunks = _chunks(chunk_tokens, hidden_ND, targets_N)
    return lax.scan(chunk, None, chunks)[1].reshape(-1)[: len(targets_N)]


class _How(NamedTuple):
    comm: Collectives
    vocab_size: int
    chunk_tokens: int
    softcap: float


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _cross_entropy(
    how: _How,
    hidden_ND: Array,
    head_VD: Array,
    bias_V: Array | None,
    targets_N: Array,
    weights_N: Array,
) -> Array:
    hidden_ND, head_VD = _rounded(how, hidden_ND, head_VD)

    def add_chunk(total: Array, chunk: tuple) -> tuple[Array, None]:
        hidden_CD, targets_C, weights_C = chunk
        return total + _chunk(how, hidden_CD, head_VD, bias_V, targets_C, weights_C)[0], None

    chunks = _chunks(how.chunk_tokens, hidden_ND, targets_N, weights_N)
    return lax.scan(add_chunk, _zero_loss(weights_N), chunks)[0]


def _forward(
    how: _How,
    hidden_ND: Array,
    head_VD: Array,
    bias_V: Array | None,
    targets_N: Array,
    weights_N: Array,
) -> tuple[Array, tuple]:
    """The loss, and the gradients for a cotangent of 1."""
    hidden_dtype, head_dtype = hidden_ND.dtype, head_VD.dtype
    hidden_ND, head_VD = _rounded(how, hidden_ND, head_VD)

    def add_chunk(carry: tuple, chunk: tuple) -> tuple[tuple, Array]:
        total, d_head_DV, d_bias_V = carry
        hidden_CD, targets_C, weights_C = chunk
        loss, d_logits_CV, _ = _chunk(how, hidden_CD, head_VD, bias_V, targets_C, weights_C)
        if d_bias_V is not None:
            d_bias_V = d_bias_V + d_logits_CV.sum(0)
        d_logits_CV = d_logits_CV.astype(hidden_CD.dtype)
        d_hidden_CD = jnp.dot(d_logits_CV, head_VD, preferred_element_type=hidden_dtype)
        d_head_DV = d_head_DV + jnp.dot(
            hidden_CD.T, d_logits_CV, preferred_element_type=jnp.float32
        )
        return (total + loss, d_head_DV, d_bias_V), d_hidden_CD

    chunks = _chunks(how.chunk_tokens, hidden_ND, targets_N, weights_N)
    # Summed transposed: a CPU's matmul is 1.6 times as fast with the longer dimension last
    # (docs/decisions/0003).
    start = (
        _zero_loss(weights_N),
        jnp.zeros_like(head_VD.T, jnp.float32),
        None if bias_V is None else jnp.zeros_like(bias_V, jnp.float32),
    )
    (loss, d_head_DV, d_bias_V), d_hidden = lax.scan(add_chunk, start, chunks)
    d_hidden_ND = d_hidden.reshape(-1, hidden_ND.shape[1])[: hidden_ND.shape[0]]
    return loss, (d_hidden_ND, d_head_DV.T.astype(head_dtype), d_bias_V)


def _backward(how: _How, gradients: tuple[Array, Array, Array | None], cotangent: Array) -> tuple:
    del how
    d_hidden_ND, d_head_VD, d_bias_V = jax.tree.map(
        lambda gradient: gradient * cotangent.astype(gradient.dtype), gradients
    )
    return d_hidden_ND, d_head_VD, d_bias_V, None, None


_cross_entropy.defvjp(_forward, _backward)


def _rounded(how: _How, *arrays: Array) -> list[Array]:
    """Arrays in the dtype of the matmuls."""
    return [array.astype(how.comm.dtype) for array in arrays]


def _chunk(
    how: _How,
    hidden_CD: Array,
    head_VD: Array,
    bias_V: Array | None,
    targets_C: Array,
    weights_C: Array,
) -> tuple[Array, Array, Array]:
    """A chunk's weighted loss, the gradient of its products with the head's matrix, float32 [C, V],
    and each token's loss without its weight, float32 [C]."""
    comm, vocab_size = how.comm, how.vocab_size
    num_rows = head_VD.shape[0]
    first = comm.offset(num_rows, VOCAB)
    products_CV = jnp.dot(hidden_CD, head_VD.T, preferred_element_type=jnp.float32)
    logits_CV = Head(head_VD, bias_V, how.softcap).finished(products_CV)
    capped_CV = logits_CV
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
    losses_C = jnp.log(sum_C) + largest_C - target_logit_C
    loss = (losses_C * weights_C).sum()
    is_target_CV = jnp.arange(num_rows)[None, :] == row_C[:, None]
    d_logits_CV = exp_CV * (weights_C / sum_C)[:, None] - jnp.where(
        is_target_CV, weights_C[:, None], 0
    )
    if how.softcap:
        d_logits_CV = d_logits_CV * (1 - (capped_CV / how.softcap) ** 2)
    return loss, d_logits_CV, losses_C


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
