"""Rotary positions: queries and keys are rotated by angles proportional to the position.

Pairs of dimensions are rotated together: i and i + R/2 of the R that are rotated (halves, as in the
released Llama weights), or 2i and 2i + 1 (interleaved, as in GPT-J's).
Sources: Su et al. 2021, arXiv:2104.09864; Llama 3's stretching, arXiv:2407.21783.
"""

import math

import jax.numpy as jnp
import numpy as np
from jax import Array

from optimus_jax.config import ModelConfig
from optimus_jax.models.families import features_of, rotated_dims


def frequencies(config: ModelConfig, *, is_windowed: bool = False) -> np.ndarray:
    """Angle per position of every rotated pair of dimensions, float32 [R/2].

    Args:
      is_windowed: whether of layers with a window, where a family has another base for these.
    """
    dims, theta, scaling = rotated_dims(config), config.rope_theta, config.rope_scaling
    if is_windowed and (own := features_of(config).window_rope_theta):
        theta, scaling = own, None
    exponent = np.arange(0, dims, 2, dtype=np.float32) / dims
    plain = (1.0 / theta**exponent).astype(np.float32)
    if scaling is None:
        return plain
    if scaling.kind == "linear":
        return (plain / scaling.factor).astype(np.float32)
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


def angles(
    config: ModelConfig, positions_BL: Array, *, is_windowed: bool = False
) -> tuple[Array, Array]:
    """Cosine and sine, float32 [B, L, 1, R/2], of every position's angles."""
    angle = (
        positions_BL[:, :, None, None].astype(jnp.float32)
        * frequencies(config, is_windowed=is_windowed)[None, None, None, :]
    )
    return jnp.cos(angle), jnp.sin(angle)


def rotate(x_BLHK: Array, cos_sin: tuple[Array, Array], *, interleaved: bool = False) -> Array:
    """[B, L, heads, K] with its first R dimensions rotated by `angles`; computed in float32,
    returned in the input's dtype.
    """
    cos, sin = cos_sin
    dims = 2 * cos.shape[-1]
    rotated, rest = x_BLHK[..., :dims].astype(jnp.float32), x_BLHK[..., dims:]
    if interleaved:
        first, second = rotated[..., ::2], rotated[..., 1::2]
    else:
        first, second = jnp.split(rotated, 2, axis=-1)
    pairs = first * cos - second * sin, second * cos + first * sin
    if interleaved:
        rotated = jnp.stack(pairs, -1).reshape(rotated.shape)
    else:
        rotated = jnp.concatenate(pairs, axis=-1)
    rotated = rotated.astype(x_BLHK.dtype)
    return jnp.concatenate((rotated, rest), -1) if rest.shape[-1] else rotated
