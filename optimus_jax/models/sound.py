"""The input of an encoder of sound: a spectrogram, by two convolutions, to frames.

Source: Radford et al. 2022, arXiv:2212.04356, section 2.2.

Shapes: B batch, F frames, P values of a frame, D embed, M frequencies of the spectrogram.
"""

import jax.numpy as jnp
from flax import nnx
from jax import Array

from optimus_jax.config import ModelConfig
from optimus_jax.config.model import COLUMNS_PER_FRAME
from optimus_jax.mesh.axes import EMBED, NORM, PATCH
from optimus_jax.models.layers import add_bias, constant, normal
from optimus_jax.models.mlp import exact_gelu
from optimus_jax.models.products import project_back

TAPS = 3
"""Columns that a convolution reads for one of its results, the middle one in its place."""


class SoundInput(nnx.Module):
    """Two convolutions along time, each with a bias and a GELU; the second one skips every other
    column. They are products of matrices [D, values of TAPS columns]."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        embed, self.mel_bins = config.embed_dim, config.mel_bins

        def matrix(width: int) -> nnx.Param:
            shape, dims = (embed, width * TAPS), (EMBED, PATCH)
            return normal(rngs, shape, dims, config.init_std, "matrix_back", "embedding")

        def bias() -> nnx.Param:
            return constant(0.0, (embed,), (NORM,), "bias", "embedding")

        self.first, self.first_bias = matrix(config.mel_bins), bias()
        self.second, self.second_bias = matrix(embed), bias()

    def __call__(self, values_BFP: Array, dtype: jnp.dtype) -> Array:
        """[B, F, P] -> [B, F, D] in `dtype`; a frame's values are its columns, one after the
        other."""
        rows, frames, _ = values_BFP.shape
        columns_BCM = values_BFP.reshape(rows, frames * COLUMNS_PER_FRAME, self.mel_bins)
        x = columns_BCM.astype(dtype)
        for kernel, bias, stride in (
            (self.first, self.first_bias, 1),
            (self.second, self.second_bias, COLUMNS_PER_FRAME),
        ):
            x = exact_gelu(add_bias(project_back(_seen(x, stride), kernel[...], dtype), bias))
        return x


def _seen(x_BCM: Array, stride: int) -> Array:
    """What each result of a convolution reads, [B, results, M TAPS]: the taps of a value beside one
    another. Beyond the ends are zeros."""
    results = x_BCM.shape[1] // stride
    padded = jnp.pad(x_BCM, ((0, 0), (TAPS // 2, TAPS // 2), (0, 0)))
    end = stride * (results - 1) + 1
    taps = [padded[:, tap : tap + end : stride] for tap in range(TAPS)]
    return jnp.stack(taps, -1).reshape(len(x_BCM), results, -1)
