"""The core of attention, softmax(scale q k) v, in blocks of queries, for XLA.

A block skips all keys that none of its queries sees: if attention is causal, those after its last
query and, with a window, those before the window of its first. Forward saves the attention weights
for backward, which needs no mask.

Shapes: B batch, L length of queries, T length of keys, H query heads, G key/value heads, K
head_dim, R rows of a key/value head's queries (its query heads one after the other).
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from optimus_jax.models.fused_attention import MASKED
from optimus_jax.models.layers import keep_mask

MAX_BLOCKS, MIN_BLOCK = 8, 64
"""More blocks skip more of the masked half, but smaller blocks make matmuls inefficient."""


def block_size(length: int) -> int:
    return next(
        (
            length // n
            for n in range(MAX_BLOCKS, 1, -1)
            if length % n == 0 and length // n >= MIN_BLOCK
        ),
        length,
    )


class QueryBlock(NamedTuple):
    """Queries that are computed at once, and the keys of which some may be visible to them."""

    first_query: int
    end_query: int
    first_key: int
    end_key: int

    @property
    def num_pairs(self) -> int:
        """Pairs of a query and a key of the block."""
        return (self.end_query - self.first_query) * (self.end_key - self.first_key)

    @property
    def queries(self) -> slice:
        """Positions of the queries."""
        return slice(self.first_query, self.end_query)

    @property
    def keys(self) -> slice:
        """Positions of the keys."""
        return slice(self.first_key, self.end_key)


def blocks_of(
    length: int, num_keys: int, window: int | None = None, *, causal: bool = True
) -> tuple[QueryBlock, ...]:
    """The blocks of `length` queries over `num_keys` keys.

    Queries that are fewer than the keys are one block that reads all keys, since the position of
    the first among them is not known.

    Args:
      window: keys that a query sees, its own included; None: all.
    """
    if length != num_keys:
        return (QueryBlock(0, length, 0, num_keys),)
    size = block_size(length)

    def first_key(first_query: int) -> int:
        if window is None:
            return 0
        return max(0, first_query - window + 1) // MIN_BLOCK * MIN_BLOCK

    return tuple(
        QueryBlock(start, start + size, first_key(start), start + size if causal else num_keys)
        for start in range(0, length, size)
    )


class BlockwiseSettings(NamedTuple):
    """Numbers of the core that are the same in all blocks."""

    dropout: float
    kv_dtype: Any
    """Format of keys, values and their gradients."""
    scale: float
    softcap: float
    saves_all: bool = False
    """Whether zeros are saved as weights of keys that no query of a block sees because of its
    window: the saved arrays are then those of a core without a window."""

    def capped(self, products: Array) -> Array:
        """Scores, float32, of the products of queries and keys."""
        scores = products * self.scale
        return jnp.tanh(scores / self.softcap) * self.softcap if self.softcap else scores


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def attend_in_blocks(
    how: BlockwiseSettings,
    blocks: tuple[QueryBlock, ...],
    q_BHLK: Array,
    k_BGTK: Array,
    v_BGTK: Array,
    masks: list[Array],
    keys: list[Array | None],
) -> Array:
    """[B, H, L, K]: attention of every query to the keys that it sees.

    Args:
      masks: which of its keys the queries of each block see, bool [B, 1, R, T].
      keys: dropout key of every example and head, [B, H], for each block; None: no dropout.
    """
    return _forward(how, blocks, q_BHLK, k_BGTK, v_BGTK, masks, keys)[0]


def _forward(
    how: BlockwiseSettings,
    blocks: tuple[QueryBlock, ...],
    q_BHLK: Array,
    k_BGTK: Array,
    v_BGTK: Array,
    masks: list[Array],
    keys: list[Array | None],
) -> tuple:
    """Each mask [B, 1, R, T] is that of a block of R rows of queries and T keys."""
    k_BGTK, v_BGTK = k_BGTK.astype(q_BHLK.dtype), v_BGTK.astype(q_BHLK.dtype)
    outs, weights = [], []
    rows = _rows(q_BHLK, k_BGTK, len(blocks))
    for block, q_BGRK, mask, keys_BH in zip(blocks, rows, masks, keys, strict=True):
        scores = jnp.einsum(
            "bgrk,bgtk->bgrt", q_BGRK, k_BGTK[:, :, block.keys], preferred_element_type=jnp.float32
        )
        scores = jnp.where(mask, how.capped(scores), MASKED)
        seen = jax.nn.softmax(scores, axis=-1).astype(q_BGRK.dtype)
        outs.append(
            jnp.einsum(
                "bgrt,bgtk->bgrk", _dropped(seen, how.dropout, keys_BH), v_BGTK[:, :, block.keys]
            )
        )
        hidden = block.first_key if how.saves_all else 0
        weights.append(jnp.pad(seen, (*[(0, 0)] * 3, (hidden, 0))) if hidden else seen)
    out_BHLK = _heads(outs, q_BHLK)
    return out_BHLK, (q_BHLK, k_BGTK, v_BGTK, weights, out_BHLK, keys)


def _backward(
    how: BlockwiseSettings, blocks: tuple[QueryBlock, ...], saved: tuple, d_out_BHLK: Array
) -> tuple:
    """No mask is needed: masked weights are zero, so their gradients are too. The row sum in the
    softmax's gradient equals d_out . out."""
    dropout, kv_dtype = how.dropout, how.kv_dtype
    q_BHLK, k_BGTK, v_BGTK, weights, out_BHLK, keys = saved
    d_k, d_v, d_qs = jnp.zeros_like(k_BGTK, kv_dtype), jnp.zeros_like(v_BGTK, kv_dtype), []
    rows = [_rows(x, k_BGTK, len(blocks)) for x in (q_BHLK, out_BHLK, d_out_BHLK)]
    for block, q, out, d_out, w, keys_BH in zip(blocks, *rows, weights, keys, strict=True):
        if how.saves_all and block.first_key:
            w = w[..., block.first_key :]
        k, v = k_BGTK[:, :, block.keys], v_BGTK[:, :, block.keys]
        d_v = d_v.at[:, :, block.keys].add(
            jnp.einsum(
                "bgrt,bgrk->bgtk",
                _dropped(w, dropout, keys_BH),
                d_out,
                preferred_element_type=kv_dtype,
            )
        )
        d_w = _dropped(
            jnp.einsum("bgrk,bgtk->bgrt", d_out, v, preferred_element_type=jnp.float32),
            dropout,
            keys_BH,
        )
        own = (d_out.astype(jnp.float32) * out.astype(jnp.float32)).sum(-1, keepdims=True)
        d_scores = w.astype(jnp.float32) * (d_w - own) * how.scale
        if how.softcap:
            products = jnp.einsum("bgrk,bgtk->bgrt", q, k, preferred_element_type=jnp.float32)
            d_scores = d_scores * (1 - (how.capped(products) / how.softcap) ** 2)
        d_scores = d_scores.astype(q.dtype)
        d_qs.append(jnp.einsum("bgrt,bgtk->bgrk", d_scores, k))
        d_k = d_k.at[:, :, block.keys].add(
            jnp.einsum("bgrt,bgrk->bgtk", d_scores, q, preferred_element_type=kv_dtype)
        )
    return _heads(d_qs, q_BHLK), d_k, d_v, None, None


attend_in_blocks.defvjp(_forward, _backward)


def _rows(x_BHLK: Array, k_BGTK: Array, num_blocks: int) -> list[Array]:
    """[B, H, L, K] -> blocks [B, G, R, K]: a key/value head's query heads one after the other."""
    batch, groups, head_dim = k_BGTK.shape[0], k_BGTK.shape[1], x_BHLK.shape[3]
    return [
        block.reshape(batch, groups, -1, head_dim)
        for block in jnp.split(x_BHLK, num_blocks, axis=2)
    ]


def _heads(blocks: list[Array], like_BHLK: Array) -> Array:
    """The inverse of `_rows`."""
    batch, heads, _, head_dim = like_BHLK.shape
    return jnp.concatenate([block.reshape(batch, heads, -1, head_dim) for block in blocks], axis=2)


def _dropped(weights_BGRT: Array, probability: float, keys_BH: Array | None) -> Array:
    """Apply dropout to attention weights.

    Every head has its own key, so that the result does not depend on which device has the head.
    """
    if keys_BH is None:
        return weights_BGRT
    batch, heads = keys_BH.shape
    by_head = weights_BGRT.reshape(batch * heads, -1, weights_BGRT.shape[-1])
    keep = keep_mask(keys_BH.reshape(-1), by_head.shape[1:], probability)
    return jnp.where(keep, by_head / (1 - probability), jnp.zeros_like(by_head)).reshape(
        weights_BGRT.shape
    )
