"""Creates random keys with a fixed generator.

All random numbers of a run (weights, dropout, samples) come from keys that name their generator,
threefry2x32: its numbers do not depend on how an array is sharded. JAX's default may be another
generator (JAX_DEFAULT_PRNG_IMPL=rbg) that draws differently on every mesh, and `jax.random.key`
adds jax_random_seed_offset to the seed; neither setting has an effect here.
"""

import jax
import jax.numpy as jnp
from jax import Array

GENERATOR = "threefry2x32"


def make_key(seed: int | Array) -> Array:
    """The key of an integer seed, of which only the lowest 32 bits are used.

    Equal to `jax.random.key(seed)` under JAX's default settings.
    """
    low = (
        jnp.uint32(seed & 0xFFFFFFFF)
        if isinstance(seed, int)
        else jnp.asarray(seed).astype(jnp.uint32)
    )
    return jax.random.wrap_key_data(jnp.stack((jnp.zeros_like(low), low)), impl=GENERATOR)
