"""The spectrogram equals that of the published models' feature extractor."""

import numpy as np
import pytest
from published_models import libraries

from optimus_jax.data.spectrogram import SAMPLE_RATE, STEP, WINDOW, log_mel, mel_bands

APART = SAMPLE_RATE / WINDOW
"""Hertz between two frequencies of the transform."""


def noise(seconds: float) -> np.ndarray:
    rng = np.random.default_rng(0)
    time = np.arange(int(seconds * SAMPLE_RATE)) / SAMPLE_RATE
    tone = np.sin(2 * np.pi * 440 * time) * np.exp(-time)
    return (0.3 * tone + 0.01 * rng.standard_normal(len(time))).astype(np.float32)


@pytest.mark.parametrize("bands", [80, 128])
@pytest.mark.parametrize("seconds", [0.4, 2.0, 3.5])
def test_it_equals_that_of_transformers(bands, seconds):
    """Of two seconds: shorter recordings are filled up with silence, longer ones cut."""
    _, transformers = libraries()
    theirs = transformers.WhisperFeatureExtractor(feature_size=bands, chunk_length=2)
    expected = theirs(noise(seconds), sampling_rate=SAMPLE_RATE, return_tensors="np")
    found = log_mel(noise(seconds), bands, 200)
    assert found.shape == (200, bands)
    assert found.dtype == np.float32
    # Theirs is computed in float32: of a power near silence the logarithm is less exact.
    np.testing.assert_allclose(found.T, expected["input_features"][0], atol=1e-4)


def test_a_tone_is_in_the_band_of_its_frequency():
    bands = mel_bands(80)
    frequencies = np.linspace(0, SAMPLE_RATE / 2, len(bands))
    for hertz in (500.0, 2000.0, 6000.0):
        time = np.arange(SAMPLE_RATE) / SAMPLE_RATE
        loudest = log_mel(np.sin(2 * np.pi * hertz * time), 80, 100)[50].argmax()
        seen = frequencies[bands[:, loudest] > 0]
        assert seen.min() - APART <= hertz <= seen.max() + APART


def test_every_band_has_the_same_area():
    """But for the lowest ones, which are narrower than a frequency of the transform."""
    areas = mel_bands(80).sum(0) * APART
    np.testing.assert_allclose(areas[48:], 1.0, rtol=0.05)


def test_silence_is_one_value():
    assert set(log_mel(np.zeros(5 * STEP, np.float32), 80, 5).ravel().tolist()) == {-1.5}
