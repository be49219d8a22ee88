"""Rotary positions: queries and keys are rotated by angles proportional to the position.

Halves layout, as in the released Llama weights: dimension i is rotated together with i + K/2.
Sources: Su et al. 2021, arXiv:2104.09864; Llama 3's scaling of frequencies, arXiv:2407.21783.
"""

import math

import jax.numpy as jnp
import numpy as np
from jax import Array

from optimus_jax.config import ModelConfig


def frequencies(config: ModelConfig) -> np.ndarray:
    """Angle per position of every pair of dimensions, float32 [K/2]."""
    exponent = np.arange(0, config.head_dim, 2, dtype=np.float32) / config.head_dim
    plain = (1.0 / config.rope_theta**exponent).astype(np.float32)
    scaling = config.rope_scaling
    if scaling is None:
        return plain
    wavelength = 2 * math.pi / plain
    longest = scaling.original_length / scaling.low_frequency_factor
    shortest = scaling.original_length / scaling.high_frequency_factor
    # Weight of the plain frequency between the two limits: 0 for the longest wavelength, 1 for the
    # shortest.
    blend = (scaling.original_length / wavelength - scaling.low_frequency_factor) / (
        scaling.high_frequency_factor - scaling.low_frequency_factor
    )
    blended = (1 - blend) * plain / scaling.factor + blend * plain
    stretched = np.where(
        wavelength > longest,
        plain / scaling.factor,
        np.where(wavelength < shortest, plain, blended),
    )
    return stretched.astype(np.float32)


def angles(config: ModelConfig, positions_BL: Array) -> tuple[Array, Array]:
    """Cosine and sine, float32 [B, L, 1, K/2], of every position's angles."""
    angle = (
        positions_BL[:, :, None, None].astype(jnp.float32)
        * frequencies(config)[None, None, None, :]
    )
    return jnp.cos(angle), jnp.sin(angle)


def rotate(x_BLHK: Array, cos_sin: tuple[Array, Array]) -> Array:
    """[B, L, heads, K] rotated by `angles`; computed in float32, returned in the input's dtype."""
    cos, sin = cos_sin
    first, second = jnp.split(x_BLHK.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate(
        (first * cos - second * sin, second * cos + first * sin), axis=-1
    ).astype(x_BLHK.dtype)
