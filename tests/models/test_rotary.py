"""Rotary positions: scores depend on distances alone, norms are kept, and Llama 3 scales long
wavelengths.
"""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from helpers import F32_RELATIVE, relative_error
from hypothesis import given, settings
from hypothesis import strategies as st

from optimus_jax.config import Features, ModelConfig, RopeScaling
from optimus_jax.models.rotary import angles, frequencies, rotate

MODEL = ModelConfig(family="llama", head_dim=8, rope_theta=100.0)


def rotated(x, position):
    """[K] at a position."""
    return np.asarray(
        rotate(
            jnp.asarray(x)[None, None, None], angles(MODEL, jnp.full((1, 1), position, jnp.int32))
        )
    )[0, 0, 0]


def test_rotation_by_its_definition():
    x = np.random.default_rng(0).standard_normal((2, 5, 3, 8)).astype(np.float32)
    positions = np.array([[0, 1, 2, 3, 4], [0, 1, 0, 1, 2]], np.int32)
    found = rotate(jnp.asarray(x), angles(MODEL, jnp.asarray(positions)))
    pairs = x[..., :4].astype(np.float64) + 1j * x[..., 4:]
    turned = pairs * np.exp(1j * positions[:, :, None, None] * 100.0 ** -(np.arange(4) / 4))
    assert (
        relative_error(np.asarray(found), np.concatenate([turned.real, turned.imag], axis=-1))
        <= F32_RELATIVE
    )
    np.testing.assert_array_equal(found[:, 0], x[:, 0])


def test_interleaved_pairs_of_a_part_of_the_dimensions():
    model = replace(MODEL, head_dim=10, features=Features(rope_dims=4, rope_pairs="interleaved"))
    x = np.random.default_rng(0).standard_normal((1, 3, 2, 10)).astype(np.float32)
    found = rotate(
        jnp.asarray(x), angles(model, jnp.arange(3, dtype=jnp.int32)[None]), interleaved=True
    )
    pairs = x[..., 0:4:2].astype(np.float64) + 1j * x[..., 1:4:2]
    turned = pairs * np.exp(1j * np.arange(3)[None, :, None, None] * 100.0 ** -(np.arange(2) / 2))
    expected = x.copy()
    expected[..., 0:4:2], expected[..., 1:4:2] = turned.real, turned.imag
    assert relative_error(np.asarray(found), expected) <= F32_RELATIVE


def test_layers_with_a_window_have_their_own_base_and_no_scaling():
    model = replace(
        MODEL,
        rope_scaling=RopeScaling(kind="linear", factor=8.0),
        features=Features(window=4, window_rope_theta=10.0),
    )
    np.testing.assert_allclose(frequencies(model), frequencies(MODEL) / 8, rtol=F32_RELATIVE)
    windowed = replace(MODEL, rope_theta=10.0)
    np.testing.assert_array_equal(frequencies(model, is_windowed=True), frequencies(windowed))


@settings(max_examples=20)
@given(
    first=st.integers(0, 500),
    second=st.integers(0, 500),
    shift=st.integers(0, 500),
    seed=st.integers(0, 99),
)
def test_dot_products_depend_on_the_distance_alone(first, second, shift, seed):
    q, k = np.random.default_rng(seed).standard_normal((2, 8)).astype(np.float32)
    unshifted, shifted = (rotated(q, first + by) @ rotated(k, second + by) for by in (0, shift))
    size = np.linalg.norm(q) * np.linalg.norm(k)
    # Angles are float32, so at position 1000 they are known to 1000 * 2^-24.
    assert abs(unshifted - shifted) <= 10 * F32_RELATIVE * size
    assert np.linalg.norm(rotated(q, first)) == pytest.approx(np.linalg.norm(q), rel=F32_RELATIVE)


def test_dot_products_do_depend_on_the_distance():
    q = np.ones(8, np.float32)
    assert abs(rotated(q, 3) @ rotated(q, 3) - rotated(q, 3) @ rotated(q, 4)) > 0.1


def test_16_bit_vectors_are_rotated_in_float32():
    x = jnp.asarray(np.random.default_rng(1).standard_normal((1, 1, 1, 8)), jnp.bfloat16)
    cos_sin = angles(MODEL, jnp.full((1, 1), 777, jnp.int32))
    assert rotate(x, cos_sin).dtype == jnp.bfloat16
    np.testing.assert_array_equal(
        rotate(x, cos_sin), rotate(x.astype(jnp.float32), cos_sin).astype(jnp.bfloat16)
    )


def test_frequencies_fall_from_one_to_nearly_the_base():
    found = frequencies(ModelConfig(family="llama", head_dim=128, rope_theta=10_000.0))
    assert found.dtype == np.float32
    assert found.shape == (64,)
    np.testing.assert_allclose(found, 10_000.0 ** -(np.arange(64) / 64), rtol=F32_RELATIVE)


def test_llama_3_scales_long_wavelengths_and_leaves_short_ones():
    model = ModelConfig(family="llama", head_dim=128, rope_theta=500_000.0)
    scaled = ModelConfig(
        family="llama", head_dim=128, rope_theta=500_000.0, rope_scaling=RopeScaling(factor=32.0)
    )
    plain, found = frequencies(model), frequencies(scaled)
    wavelength = 2 * np.pi / plain
    short, long = wavelength < 8192 / 4, wavelength > 8192
    between = ~short & ~long
    assert short.any()
    assert long.any()
    assert between.any()
    np.testing.assert_array_equal(found[short], plain[short])
    np.testing.assert_allclose(found[long], plain[long] / 32, rtol=F32_RELATIVE)
    assert (np.diff(found) < 0).all()
    assert ((plain[between] / 32 < found[between]) & (found[between] < plain[between])).all()
    # By hand, for the first wave between the two: arXiv:2407.21783's smooth factor.
    first = int(np.argmax(between))
    smooth = (8192 / wavelength[first] - 1) / 3
    assert found[first] == pytest.approx(
        (1 - smooth) * plain[first] / 32 + smooth * plain[first], rel=F32_RELATIVE
    )
