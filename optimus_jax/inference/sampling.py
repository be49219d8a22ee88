"""How the next token is drawn from a model's logits.

Shapes: B samples, V vocab, C candidates for the next token.
"""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array, lax

from optimus_jax.errors import ConfigError, explain


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is drawn from the model's probabilities."""

    temperature: float = 1.0
    """Divides the logits. 0: take the likeliest token (greedy)."""
    top_k: int | None = None
    """Draw from this many likeliest tokens; None: from all."""
    top_p: float = 1.0
    """Draw from the smallest set of likeliest tokens that together have this probability
    (arXiv:1904.09751)."""

    def __post_init__(self) -> None:
        check_range(
            0 <= self.temperature < float("inf"),
            "temperature",
            self.temperature,
            "choose 0 (greedy) or more",
        )
        check_range(self.top_k is None or self.top_k >= 1, "top_k", self.top_k, "choose 1 or more")
        check_range(0 < self.top_p <= 1, "top_p", self.top_p, "choose 0 < top_p <= 1")


def draw(logits_BV: Array, keys_B: Array, positions_B: Array, sampling: Sampling) -> Array:
    """Draw the token at a position of every sample, int32 [B], each with its own key."""
    if sampling.temperature == 0:
        return jnp.argmax(logits_BV, axis=-1)
    logits_BC, ids_BC = candidates(logits_BV / sampling.temperature, sampling)
    keys_B = jax.vmap(jax.random.fold_in)(keys_B, positions_B)
    # The mode is JAX's default, named because jax_high_dynamic_range_gumbel would draw other
    # tokens.
    chosen_B = jax.vmap(functools.partial(jax.random.categorical, mode="low"))(keys_B, logits_BC)
    return jnp.take_along_axis(ids_BC, chosen_B[:, None], axis=1)[:, 0]


def candidates(logits_BV: Array, sampling: Sampling) -> tuple[Array, Array]:
    """Logits and ids, [B, C], of the tokens to draw from: the top k, restricted to the top p of
    them.
    """
    batch, vocab = logits_BV.shape
    if sampling.top_k is None and sampling.top_p == 1:
        return logits_BV, jnp.broadcast_to(jnp.arange(vocab), (batch, vocab))
    logits_BC, ids_BC = lax.top_k(logits_BV, min(sampling.top_k or vocab, vocab))
    if sampling.top_p < 1:
        probability = jax.nn.softmax(logits_BC)
        likelier = jnp.cumsum(probability, axis=-1) - probability
        logits_BC = jnp.where(likelier < sampling.top_p, logits_BC, -jnp.inf)
    return logits_BC, ids_BC


def check_range(good: bool, name: str, value: object, do: str) -> None:
    """Raise ConfigError unless `good`: a number that the user gave is out of range."""
    if not good:
        raise ConfigError(explain(f"{name} is out of range", given=value, do=do))
