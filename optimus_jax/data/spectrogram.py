"""The spectrogram that models of sound read: logarithms of the power in mel bands.

Its numbers are those of Radford et al. 2022 (arXiv:2212.04356, section 2.2): 16,000 samples a
second, windows of 25 ms every 10 ms. Bands are Slaney's (Auditory Toolbox, 1998): linear below
1,000 Hz, and logarithmic above.

Shapes: S samples, C columns, M bands, N frequencies of the Fourier transform.
"""

import math
from functools import lru_cache

import numpy as np

SAMPLE_RATE = 16_000
"""Samples of a second."""
WINDOW, STEP = 400, 160
"""Samples of a window, and from one to the next."""
LINEAR_HZ, LINEAR_MELS = 1000.0, 15.0
"""Below this frequency mels are proportional to it; and its mels."""
GROWTH_PER_MEL = math.log(6.4) / 27
"""Natural logarithm of the frequency's growth for a mel, above."""
RANGE = 8.0
"""Powers of ten that are told apart, below the largest."""


def log_mel(samples_S: np.ndarray, num_bands: int, num_columns: int) -> np.ndarray:
    """float32 [C, M] of the first `num_columns` columns, from about -1 to 1.

    Args:
      samples_S: one channel at SAMPLE_RATE, from -1 to 1; silence follows, where they are too few.
    """
    length = num_columns * STEP
    samples = np.zeros(length, np.float64)
    samples[: min(length, len(samples_S))] = samples_S[:length]
    around = np.pad(samples, WINDOW // 2, mode="reflect")
    windows_CS = np.lib.stride_tricks.sliding_window_view(around, WINDOW)[:-1:STEP]
    power_CN = np.abs(np.fft.rfft(windows_CS * _hann(), axis=-1)) ** 2
    logarithms = np.log10(np.maximum(power_CN @ mel_bands(num_bands), 1e-10))
    logarithms = np.maximum(logarithms, logarithms.max() - RANGE)
    return ((logarithms + 4.0) / 4.0).astype(np.float32)


@lru_cache
def mel_bands(num_bands: int) -> np.ndarray:
    """float64 [N, M]: the share of each frequency's power in a band. Bands are triangles between
    the middles of their neighbours, of equal areas.
    """
    top = SAMPLE_RATE / 2
    edges = _hertz(np.linspace(0.0, _mels(top), num_bands + 2))
    frequencies = np.linspace(0.0, top, WINDOW // 2 + 1)[:, None]
    left, middle, right = edges[:-2], edges[1:-1], edges[2:]
    rising = (frequencies - left) / (middle - left)
    falling = (right - frequencies) / (right - middle)
    return np.maximum(0.0, np.minimum(rising, falling)) * 2.0 / (right - left)


def _mels(hertz: float) -> float:
    if hertz < LINEAR_HZ:
        return hertz * LINEAR_MELS / LINEAR_HZ
    return LINEAR_MELS + math.log(hertz / LINEAR_HZ) / GROWTH_PER_MEL


def _hertz(mels: np.ndarray) -> np.ndarray:
    above = LINEAR_HZ * np.exp(GROWTH_PER_MEL * (mels - LINEAR_MELS))
    return np.where(mels < LINEAR_MELS, mels * LINEAR_HZ / LINEAR_MELS, above)


@lru_cache
def _hann() -> np.ndarray:
    """A raised cosine that begins at 0 and is periodic in WINDOW samples."""
    return 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(WINDOW) / WINDOW)
