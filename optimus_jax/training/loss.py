"""Cross-entropy of tokens, and draws from what a model predicts, over a vocabulary that may be
split, a chunk of tokens at a time.

No device holds the logits of all its tokens at once, nor those of other devices' parts of the
vocabulary: it computes a chunk's logits, turns them into the loss and into their own gradient, and
drops them. Forward and backward are therefore one pass with three matmuls, as many as plain
autodiff needs.

Shapes: N tokens of a device, C tokens of a chunk, D embed, V vocab (the device's part).
"""

from functools import partial
from typing import Any, NamedTuple

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
    return cross_entropy_and_draws(
        hidden_ND,
        head,
        targets_N,
        weights_N,
        None,
        comm=comm,
        vocab_size=vocab_size,
        chunk_tokens=chunk_tokens,
    )[0]


def cross_entropy_and_draws(
    hidden_ND: Array,
    head: Head,
    targets_N: Array,
    weights_N: Array,
    uniform_N: Array | None,
    *,
    comm: Collectives,
    vocab_size: int,
    chunk_tokens: int,
) -> tuple[Array, Array | None]:
    """`cross_entropy`, and a token drawn from each p, int32 [N], by the same logits.

    Args:
      uniform_N: float32 from 0 to below 1 for every draw, which is of the first token at which the
        sum of p exceeds it. So a draw does not depend on how devices share the vocabulary, but for
        the rounding of sums. None: nothing is drawn.
    """
    head_VD, bias_V = head.matrix_VE, head.bias_V
    axes = sorted(varying_axes(hidden_ND) | varying_axes(head_VD))
    hidden_ND, head_VD = vary(hidden_ND, axes), vary(head_VD, axes)
    bias_V = None if bias_V is None else vary(bias_V, axes)
    how = _How(comm, vocab_size, chunk_tokens, head.softcap)
    return _cross_entropy(how, hidden_ND, head_VD, bias_V, targets_N, weights_N, uniform_N)


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
        return None, _chunk(how, hidden_CD, head_VD, bias_V, targets_C, ones_C).losses_C

    chunks = _chunks(chunk_tokens, hidden_ND, targets_N)
    return lax.scan(chunk, None, chunks)[1].reshape(-1)[: len(targets_N)]


def likeliest_tokens(hidden_ND: Array, head: Head, *, comm: Collectives, vocab_size: int) -> Array:
    """The token with the largest logit after each hidden state, int32 [N]; of equal ones the first,
    and `vocab_size` if logits are NaN. Arguments are those of `cross_entropy`.
    """
    how = _How(comm, vocab_size, len(hidden_ND), head.softcap)
    hidden_ND, head_VD = _rounded(how, hidden_ND, head.matrix_VE)
    logits_NV = _logits(how, hidden_ND, head_VD, head.bias_V).masked_CV
    largest_N = logits_NV.max(-1)
    token_N = logits_NV.argmax(-1).astype(jnp.int32) + comm.offset(len(head_VD), VOCAB)
    is_largest_N = largest_N == comm.max(largest_N, VOCAB)
    return -comm.max(jnp.where(is_largest_N, -token_N, -vocab_size), VOCAB)


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
    uniform_N: Array | None,
) -> tuple[Array, Array | None]:
    hidden_ND, head_VD = _rounded(how, hidden_ND, head_VD)

    def add_chunk(total: Array, chunk: tuple) -> tuple[Array, Array | None]:
        found = _chunk(how, chunk[0], head_VD, bias_V, *chunk[1:])
        return total + found.loss, found.drawn_C

    chunks = _chunks(how.chunk_tokens, hidden_ND, targets_N, weights_N, uniform_N)
    loss, drawn = lax.scan(add_chunk, _zero_loss(weights_N), chunks)
    return loss, _joined(drawn, len(targets_N))


def _forward(
    how: _How,
    hidden_ND: Array,
    head_VD: Array,
    bias_V: Array | None,
    targets_N: Array,
    weights_N: Array,
    uniform_N: Array | None,
) -> tuple[tuple[Array, Array | None], tuple]:
    """The results, and the loss's gradients for a cotangent of 1."""
    hidden_dtype, head_dtype = hidden_ND.dtype, head_VD.dtype
    hidden_ND, head_VD = _rounded(how, hidden_ND, head_VD)

    def add_chunk(carry: tuple, chunk: tuple) -> tuple[tuple, tuple[Array, Array | None]]:
        total, d_head_DV, d_bias_V = carry
        hidden_CD = chunk[0]
        loss, d_logits_CV, _, drawn_C = _chunk(how, hidden_CD, head_VD, bias_V, *chunk[1:])
        if d_bias_V is not None:
            d_bias_V = d_bias_V + d_logits_CV.sum(0)
        d_logits_CV = d_logits_CV.astype(hidden_CD.dtype)
        d_hidden_CD = jnp.dot(d_logits_CV, head_VD, preferred_element_type=hidden_dtype)
        d_head_DV = d_head_DV + jnp.dot(
            hidden_CD.T, d_logits_CV, preferred_element_type=jnp.float32
        )
        return (total + loss, d_head_DV, d_bias_V), (d_hidden_CD, drawn_C)

    chunks = _chunks(how.chunk_tokens, hidden_ND, targets_N, weights_N, uniform_N)
    # Summed transposed: a CPU's matmul is 1.6 times as fast with the longer dimension last
    # (docs/decisions/0003).
    start = (
        _zero_loss(weights_N),
        jnp.zeros_like(head_VD.T, jnp.float32),
        None if bias_V is None else jnp.zeros_like(bias_V, jnp.float32),
    )
    (loss, d_head_DV, d_bias_V), (d_hidden, drawn) = lax.scan(add_chunk, start, chunks)
    d_hidden_ND = d_hidden.reshape(-1, hidden_ND.shape[1])[: hidden_ND.shape[0]]
    gradients = d_hidden_ND, d_head_DV.T.astype(head_dtype), d_bias_V
    return (loss, _joined(drawn, len(targets_N))), gradients


def _backward(
    how: _How, gradients: tuple[Array, Array, Array | None], cotangents: tuple[Array, Any]
) -> tuple:
    del how
    cotangent, _ = cotangents
    d_hidden_ND, d_head_VD, d_bias_V = jax.tree.map(
        lambda gradient: gradient * cotangent.astype(gradient.dtype), gradients
    )
    return d_hidden_ND, d_head_VD, d_bias_V, None, None, None


_cross_entropy.defvjp(_forward, _backward)


def _joined(drawn: Array | None, num_tokens: int) -> Array | None:
    """What chunks have drawn, [chunks, C] -> [N]."""
    return None if drawn is None else drawn.reshape(-1)[:num_tokens]


def _rounded(how: _How, *arrays: Array) -> list[Array]:
    """Arrays in the dtype of the matmuls."""
    return [array.astype(how.comm.dtype) for array in arrays]


class _OfChunk(NamedTuple):
    loss: Array
    """Weighted sum."""
    d_logits_CV: Array
    """float32 gradient of the loss with respect to the products with the head's matrix."""
    losses_C: Array
    """float32 loss of each token, without its weight."""
    drawn_C: Array | None
    """int32 token drawn for each."""


def _chunk(
    how: _How,
    hidden_CD: Array,
    head_VD: Array,
    bias_V: Array | None,
    targets_C: Array,
    weights_C: Array,
    uniform_C: Array | None = None,
) -> _OfChunk:
    comm, num_rows = how.comm, head_VD.shape[0]
    first = comm.offset(num_rows, VOCAB)
    logits_CV, capped_CV = _logits(how, hidden_CD, head_VD, bias_V)
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
    drawn_C = None if uniform_C is None else _drawn(how, exp_CV, uniform_C)
    return _OfChunk(loss, d_logits_CV, losses_C, drawn_C)


class _Logits(NamedTuple):
    masked_CV: Array
    """float32 logits of this device's part of the vocabulary; -inf for padding."""
    capped_CV: Array
    """Those of padding too."""


def _logits(how: _How, hidden_CD: Array, head_VD: Array, bias_V: Array | None) -> _Logits:
    comm, num_rows = how.comm, head_VD.shape[0]
    products_CV = jnp.dot(hidden_CD, head_VD.T, preferred_element_type=jnp.float32)
    capped_CV = Head(head_VD, bias_V, how.softcap).finished(products_CV)
    if comm.size(num_rows, VOCAB) <= how.vocab_size:
        return _Logits(capped_CV, capped_CV)
    ids_V = comm.offset(num_rows, VOCAB) + jnp.arange(num_rows)
    return _Logits(jnp.where(ids_V[None] < how.vocab_size, capped_CV, -jnp.inf), capped_CV)


def _drawn(how: _How, exp_CV: Array, uniform_C: Array) -> Array:
    """The tokens at which sums of p first exceed these numbers: as many as the tokens at which they
    do not.

    Args:
      exp_CV: p of this device's part of the vocabulary, times a factor.
    """
    sums_CV = jnp.cumsum(exp_CV, 1)
    parts_CW = how.comm.gathered(sums_CV[:, -1:], VOCAB)
    is_before_W = jnp.arange(parts_CW.shape[1]) < how.comm.offset(1, VOCAB)
    before_C = jnp.where(is_before_W[None], parts_CW, 0).sum(1)
    wanted_C = uniform_C * parts_CW.sum(1)
    num_C = (before_C[:, None] + sums_CV <= wanted_C[:, None]).sum(1, dtype=jnp.int32)
    return jnp.minimum(how.comm.sum(num_C, VOCAB), how.vocab_size - 1)


def _zero_loss(weights_N: Array) -> Array:
    return vary(jnp.zeros((), jnp.float32), sorted(varying_axes(weights_N)))


def _chunks(chunk_tokens: int, *given: Array | None) -> tuple[Array, ...]:
    """[N, ...] -> [number of chunks, C, ...], padded with zeros, whose weight is zero too; of the
    arrays that there are.
    """
    arrays = [array for array in given if array is not None]
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
