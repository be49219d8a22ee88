"""Masked tokens: which of them a model restores, and what it sees in their place.

Devlin et al. 2019 (arXiv:1810.04805), section 3.1: of the chosen tokens most become the mask
token, some a random one, and the rest stay, so that a model cannot rely on a token being right
because it is not masked. Tokens are chosen one by one, or word by word.

Shapes: B rows, L length.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from optimus_jax.config import Config
from optimus_jax.data.batch import BATCH_ARRAYS, BEGINS_WORD, BatchArray, HostBatch
from optimus_jax.training.task import DRAWS, Batch

MASKED_ARRAYS: Mapping[str, BatchArray] = {
    **BATCH_ARRAYS,
    BEGINS_WORD: BatchArray(np.bool_, "whether the token is the first of what is chosen together"),
}
"""Arrays of a batch whose tokens are masked."""


def with_words(batch: HostBatch) -> HostBatch:
    """Rows that say where words begin; where the loader does not, at every token."""
    return {BEGINS_WORD: np.ones_like(batch["loss_mask"])} | batch


def with_masked_tokens(config: Config, rows: Batch, keys_B: Array) -> Batch:
    """Rows whose targets are their own tokens, of which chosen ones count and are hidden.

    Only tokens that count before are chosen: not those that fill up a row, nor the last of a
    document.

    Args:
      keys_B: a key for every row; the choice depends on nothing else.
    """
    masking, tokens_BL = config.masking, rows["tokens"]

    def drawn(key: Array) -> tuple[Array, Array, Array]:
        choice, kind, other = jax.random.split(key, 3)
        shape = tokens_BL.shape[1:]
        return (
            jax.random.uniform(choice, shape),
            jax.random.uniform(kind, shape),
            jax.random.randint(other, shape, 0, config.num_random_tokens, jnp.int32),
        )

    choice_BL, kind_BL, other_BL = jax.vmap(drawn)(keys_B)
    begins_BL = rows[BEGINS_WORD] | (rows["positions"] == 0)
    places_BL = jnp.where(begins_BL, jnp.arange(tokens_BL.shape[1], dtype=jnp.int32), 0)
    choice_BL = jnp.take_along_axis(choice_BL, lax.cummax(places_BL, axis=1), axis=1)
    is_chosen_BL = rows["loss_mask"] & (choice_BL < masking.share)
    is_masked_BL = is_chosen_BL & (kind_BL < masking.masked)
    is_other_BL = is_chosen_BL & ~is_masked_BL & (kind_BL < masking.masked + masking.random)
    seen_BL = jnp.where(is_other_BL, other_BL, tokens_BL)
    seen_BL = jnp.where(is_masked_BL, jnp.int32(config.mask_token), seen_BL)
    return rows | {"tokens": seen_BL, "targets": tokens_BL, "loss_mask": is_chosen_BL}


def with_tokens_to_draw(config: Config, rows: Batch, keys_B: Array) -> Batch:
    """`with_masked_tokens`, and DRAWS with which a generator draws tokens for the chosen ones."""
    keys = jax.vmap(lambda key: jax.random.split(key, 2))(keys_B)
    draws_BL = jax.vmap(lambda key: jax.random.uniform(key, rows["tokens"].shape[1:]))(keys[:, 1])
    return with_masked_tokens(config, rows, keys[:, 0]) | {DRAWS: draws_BL}


def with_drawn_tokens(rows: Batch, masked: Batch, drawn_BL: Array) -> Batch:
    """Rows in which drawn tokens stand for the masked ones. Their targets say which tokens are
    others than before; those that count are those that counted before any was masked.

    Args:
      rows: as they were before `with_tokens_to_draw`.
      masked: as it has made them.
    """
    tokens_BL = jnp.where(masked["loss_mask"], drawn_BL, rows["tokens"])
    is_replaced_BL = (tokens_BL != rows["tokens"]).astype(jnp.int32)
    return rows | {"tokens": tokens_BL, "targets": is_replaced_BL}
