"""Continue tokens with a model, token by token, with a cache of keys and values.

Prompts run through the model together in one pass, which fills the cache. Every token after them is
a pass of length 1, in which each row has a position of its own. Lengths are rounded up, so that all
prompts share a few compiled programs. Cache entries that a pass writes past the last token of a row
are masked, since they are after every query, until the token of that position overwrites them.

Shapes: N prompts, S samples of each, B = N S rows, L padded length of prompts.
"""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from optimus_jax.devices.jax_settings import check_jax_settings
from optimus_jax.inference.model_on_mesh import Cache, ModelOnMesh
from optimus_jax.inference.sampling import Sampling, draw
from optimus_jax.models.keys import make_key
from optimus_jax.models.shapes import Params

MIN_LENGTH = 32
"""Length in tokens of the shortest pass over prompts, and of the shortest cache."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Prompt:
    """Tokens that are continued."""

    ids: np.ndarray
    """int [n], at least one."""
    num_new_tokens: int
    """Most tokens after them: n + num_new_tokens - 1 is at most the model's max_length."""
    seed: int = 0
    """Of its samples' draws. Keys also depend on the sample's index and the position, and neither
    on the number of samples nor on the other prompts."""


def generate_ids(
    model: ModelOnMesh,
    params: Params,
    prompts: Sequence[Prompt],
    *,
    eos: int,
    sampling: Sampling,
    num_samples: int = 1,
    ends: Sequence[int] = (),
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Continue prompts, all samples of a prompt side by side.

    Args:
      params: on the model's devices.
      ends: tokens that end a sample, besides `eos`.
    Yields:
      For each new token: that of every row, int [B], eos after the row has ended; and whether it
      has ended by now, bool [B].
    """
    check_jax_settings()
    limit = model.config.max_length
    lengths = np.array([len(prompt.ids) for prompt in prompts], np.int32)
    counts = np.array([prompt.num_new_tokens for prompt in prompts])
    padded = np.zeros((len(prompts), rounded_up(int(lengths.max()), limit)), np.int32)
    for row, prompt in zip(padded, prompts, strict=True):
        row[: len(prompt.ids)] = prompt.ids
    num_keys = rounded_up(int((lengths + counts).max()) - 1, limit)
    keys = _keys(jnp.stack([make_key(prompt.seed) for prompt in prompts]), num_samples)
    tokens, cache = prefill(
        model, params, padded, lengths, keys, sampling=sampling, num_keys=num_keys
    )
    lengths, counts = (np.repeat(each, num_samples) for each in (lengths, counts))
    over = np.zeros(len(counts), bool)
    for number in range(1, counts.max() + 1):
        drawn = tokens
        if number < counts.max():  # dispatched before `drawn` is waited for
            # Rows that have ended may be past the cache.
            places = np.minimum(lengths + number - 1, num_keys - 1)
            tokens, cache = next_tokens(
                model, params, cache, tokens, places, keys, sampling=sampling
            )
        ids = np.where(over | np.isin(drawn, ends), eos, drawn)
        over = (ids == eos) | (number >= counts)
        yield ids, over
        if over.all():
            return


@functools.partial(jax.jit, static_argnames=("model", "sampling", "num_keys"))
def prefill(
    model: ModelOnMesh,
    params: Params,
    prompts_NL: Array,
    lengths_N: Array,
    keys_B: Array,
    *,
    sampling: Sampling,
    num_keys: int,
) -> tuple[Array, Cache]:
    """Run padded prompts: the first new token of every row [B], and the cache of all rows."""
    num_prompts = len(prompts_NL)
    cache = model.empty_cache(params, num_keys, rows=num_prompts)
    starts_N = jnp.zeros_like(lengths_N)
    logits_NV, cache = model.extend(params, cache, prompts_NL, starts_N, lengths_N - 1)
    of_samples = functools.partial(jnp.repeat, repeats=len(keys_B) // num_prompts)
    logits_BV, lengths_B = (of_samples(x, axis=0) for x in (logits_NV, lengths_N))
    return draw(logits_BV, keys_B, lengths_B, sampling), jax.tree.map(
        lambda x: of_samples(x, axis=1), cache
    )


@functools.partial(jax.jit, static_argnames=("model", "sampling"), donate_argnames="cache")
def next_tokens(
    model: ModelOnMesh,
    params: Params,
    cache: Cache,
    tokens_B: Array,
    positions_B: Array,
    keys_B: Array,
    *,
    sampling: Sampling,
) -> tuple[Array, Cache]:
    """Run the token of every row at its position: the tokens after them, and the extended cache."""
    last_B = jnp.zeros_like(positions_B)
    logits_BV, cache = model.extend(params, cache, tokens_B[:, None], positions_B, last_B)
    return draw(logits_BV, keys_B, positions_B + 1, sampling), cache


@functools.partial(jax.jit, static_argnames="num_samples")
def _keys(keys_N: Array, num_samples: int) -> Array:
    """The key of every row [B], of those of the prompts."""
    of_samples = jax.vmap(jax.random.fold_in, (None, 0))
    return jax.vmap(of_samples, (0, None))(keys_N, jnp.arange(num_samples)).reshape(-1)


def rounded_up(length: int, limit: int) -> int:
    """The smallest power of two that is at least `length` and MIN_LENGTH, but at most `limit`."""
    return min(limit, max(MIN_LENGTH, 1 << (length - 1).bit_length()))
