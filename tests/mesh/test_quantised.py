"""Codes of quantised matrices: each is the nearest, and a shard's are those of the whole."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from optimus_jax.mesh.leaf import Leaf
from optimus_jax.mesh.quantised import (
    GROUP,
    LARGEST,
    NF4,
    SHARES,
    STEPS,
    code_leaves,
    decoded,
    encoded,
)

HEADS = Leaf(("embed", "heads", "head_dim"), "matrix", "attention")
UP = Leaf(("embed", "pair", "mlp"), "matrix", "mlp")
DOWN = Leaf(("embed", "mlp"), "matrix_back", "mlp")
STACK = Leaf(("layers", "embed", "mlp"), "matrix_back", "mlp")
SHAPES = {HEADS: (64, 3, 64), UP: (32, 2, 1024), DOWN: (96, 88), STACK: (2, 32, 64)}


def matrix(leaf: Leaf, seed: int = 0) -> np.ndarray:
    values = np.random.default_rng(seed).standard_normal(SHAPES[leaf]).astype(np.float32)
    return values * np.float32(0.02)


def in_blocks(values: np.ndarray, codes: dict) -> np.ndarray:
    """[..., N] -> [..., blocks, block]."""
    return values.reshape(*codes["scales"].shape, -1)


@pytest.mark.parametrize("leaf", SHAPES)
def test_every_nf4_code_is_the_nearest_value(leaf: Leaf):
    values = matrix(leaf)
    codes = encoded(jnp.asarray(values), leaf, "nf4")
    found = in_blocks(np.asarray(decoded(codes, leaf, jnp.float32)), codes)
    scales = np.abs(found).max(-1, keepdims=True)
    choices = scales[..., None] * NF4
    nearest = np.abs(in_blocks(values, codes)[..., None] - choices).min(-1)
    np.testing.assert_allclose(
        np.abs(in_blocks(values, codes) - found), nearest, atol=1e-7 * scales.max()
    )
    # A scale is within half a step of the block's largest magnitude.
    largest = np.abs(in_blocks(values, codes)).max(-1, keepdims=True)
    assert (np.abs(scales - largest) <= 0.501 * largest.max() / STEPS).all()


@pytest.mark.parametrize("leaf", SHAPES)
def test_every_int8_code_is_the_nearest_multiple(leaf: Leaf):
    values = matrix(leaf)
    codes = encoded(jnp.asarray(values), leaf, "int8")
    found = np.asarray(decoded(codes, leaf, jnp.float32))
    stacked = int(leaf.is_in_layers)
    channel = (stacked,) if leaf.role == "matrix" else tuple(range(stacked + 1, len(leaf.dims)))
    step = np.abs(values).max(channel, keepdims=True) / LARGEST
    assert (np.abs(found - values) <= 0.5001 * step).all()


@pytest.mark.parametrize("kind", ["nf4", "int8"])
@pytest.mark.parametrize("leaf", SHAPES)
def test_zeros_stay_zero_and_rows_say_what_there_is(leaf: Leaf, kind: str):
    codes = encoded(jnp.zeros(SHAPES[leaf]), leaf, kind)
    assert not np.asarray(decoded(codes, leaf, jnp.float32)).any()
    rows = code_leaves(leaf, kind)
    assert rows.keys() == codes.keys()
    assert {name: len(row.dims) for name, row in rows.items()} == {
        name: part.ndim for name, part in codes.items()
    }
    assert sum(rows[name].values * part.size for name, part in codes.items()) == np.prod(
        SHAPES[leaf]
    )


def test_bits_of_an_element():
    codes = encoded(jnp.asarray(matrix(UP)), UP, "nf4")
    bits = sum(8 * part.nbytes for part in codes.values()) / matrix(UP).size
    assert bits == 4 + 8 / 64 + 32 / (64 * GROUP)


@given(ways=st.sampled_from([1, 2, 4, SHARES]), seed=st.integers(0, 9))
def test_codes_of_a_part_are_those_of_the_whole(ways: int, seed: int):
    """tensor splits the feed-forward; layers are encoded one by one."""
    values = matrix(UP, seed)
    whole = encoded(jnp.asarray(values), UP, "nf4")
    for part in range(ways):
        here = {name: np.split(np.asarray(each), ways, -1)[part] for name, each in whole.items()}
        np.testing.assert_array_equal(
            decoded(here, UP, np.float32),
            np.split(np.asarray(decoded(whole, UP, jnp.float32)), ways, -1)[part],
        )
    stack = matrix(STACK, seed)
    of_stack = encoded(jnp.asarray(stack), STACK, "nf4")
    for layer, each in enumerate(stack):
        for name, part in encoded(jnp.asarray(each), STACK.last(2), "nf4").items():
            np.testing.assert_array_equal(of_stack[name][layer], part)


@pytest.mark.parametrize("leaf", [HEADS, UP])
def test_bitsandbytes_reads_the_codes(leaf: Leaf):
    """Its dequantisation of these codes gives these values; its own codes are no nearer."""
    functional = pytest.importorskip("bitsandbytes.functional")
    torch = pytest.importorskip("torch")
    values = matrix(leaf)
    codes = encoded(jnp.asarray(values), leaf, "nf4")
    ours = np.asarray(decoded(codes, leaf, jnp.float32))
    theirs, state = functional.quantize_4bit(
        torch.from_numpy(values.reshape(-1)), blocksize=64, quant_type="nf4"
    )
    plain = functional.dequantize_4bit(theirs, state).numpy().reshape(values.shape)
    assert np.linalg.norm(ours - values) <= 1.001 * np.linalg.norm(plain - values)
    _, state = functional.quantize_4bit(
        torch.from_numpy(values.reshape(-1)),
        blocksize=64,
        quant_type="nf4",
        compress_statistics=False,
    )
    steps = np.repeat(np.asarray(codes["steps"]), GROUP, 0)
    state.absmax = torch.from_numpy((np.asarray(codes["scales"]) * steps).reshape(-1))
    bytes_ = torch.from_numpy(np.asarray(codes["codes"]).reshape(-1, 1).copy())
    found = functional.dequantize_4bit(bytes_, state).numpy().reshape(values.shape)
    np.testing.assert_allclose(found, ours, rtol=1e-6)
