"""The checksum depends on every bit and its place, and on nothing else."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from optimus_jax.reshard import checksum as module
from optimus_jax.reshard.checksum import (
    _check_array,
    checksum_of_part,
    checksums,
    named_leaves,
)

SHAPE = (8, 6, 4)
DTYPES = ("float32", "bfloat16", "float16", "int32", "uint32", "bool")
index = st.tuples(*(st.integers(0, size - 1) for size in SHAPE))


def sharded(values, num_devices, spec):
    mesh = jax.make_mesh(
        (num_devices // 2 or 1, min(2, num_devices)),
        ("a", "b"),
        axis_types=(AxisType.Auto,) * 2,
        devices=jax.devices()[:num_devices],
    )
    return jax.device_put(values, NamedSharding(mesh, spec))


def checksum(values):
    return checksums([jnp.asarray(values)])["0"]


def words(dtype, seed=0):
    """Elements with random bits, as the unsigned integers that they are."""
    width = np.dtype(jnp.dtype(dtype)).itemsize
    limit = 2 if dtype == "bool" else 2 ** (8 * width)
    return np.random.default_rng(seed).integers(0, limit, SHAPE, dtype=f"uint{8 * width}")


def as_dtype(bits, dtype):
    return bits.view(jnp.dtype(dtype))


def by_definition(bits):
    """The definition in the module's docstring, in Python and one element at a time."""

    def scramble(x):
        x = ((x ^ (x >> 16)) * 0x85EBCA6B) % 2**32
        x = ((x ^ (x >> 13)) * 0xC2B2AE35) % 2**32
        return x ^ (x >> 16)

    total = 0
    for place, word in np.ndenumerate(bits):
        weight = 0
        for i in place:
            weight = scramble((weight + i) % 2**32)
        total += scramble(int(word) * (weight | 1) % 2**32)
    return total % 2**32


@pytest.mark.parametrize("dtype", DTYPES)
def test_checksum_equals_its_definition(dtype):
    bits = words(dtype)
    assert checksum(as_dtype(bits, dtype)) == by_definition(bits)


def test_checksum_equals_that_of_existing_checkpoints():
    assert checksum(np.arange(24, dtype=np.float32).reshape(2, 3, 4)) == 1692453027


@pytest.mark.parametrize(
    ("num_devices", "spec"),
    [
        (8, P()),
        (8, P("a")),
        (8, P("a", "b")),
        (8, P(("a", "b"))),
        (8, P(None, "b", "a")),
        (4, P("b", None, "a")),
        (4, P("a")),
        (2, P(None, "b")),
        (1, P()),
    ],
)
def test_checksum_is_the_same_for_every_sharding(num_devices, spec):
    values = as_dtype(words("float32"), "float32")
    leaf = sharded(values, num_devices, spec)
    assert len(leaf.sharding.device_set) == num_devices
    assert checksums({"w": leaf}) == {"w": by_definition(words("float32"))}


def test_checksum_gathers_no_shards():
    leaf = sharded(np.ones((64, 32), np.float32), 8, P("a", "b"))
    program = _check_array.lower(leaf).compile().as_text() or ""
    assert "all-reduce" in program
    assert "all-gather" not in program
    assert "all-to-all" not in program


@settings(deadline=None, max_examples=50)
@given(
    dtype=st.sampled_from(DTYPES[:-1]), place=index, bit=st.integers(0, 31), seed=st.integers(0, 9)
)
def test_flipped_bit_changes_the_checksum(dtype, place, bit, seed):
    bits = words(dtype, seed)
    flipped = bits.copy()
    flipped[place] ^= bits.dtype.type(1 << bit % (8 * bits.itemsize))
    assert checksum(as_dtype(bits, dtype)) != checksum(as_dtype(flipped, dtype))


@settings(deadline=None, max_examples=50)
@given(first=index, second=index, seed=st.integers(0, 9), negated=st.booleans())
def test_swapped_elements_change_the_checksum(first, second, seed, negated):
    values = as_dtype(words("int32", seed), "int32").copy()
    # differs in the sign bit alone, which a plain sum of bits times odd weights cannot tell
    if negated:
        values[second] = values[first] ^ np.int32(-(2**31))
    assume(values[first] != values[second])
    swapped = values.copy()
    swapped[first], swapped[second] = values[second], values[first]
    assert checksum(values) != checksum(swapped)


@settings(deadline=None, max_examples=10)
@given(padding=st.tuples(*(st.integers(0, 2) for _ in SHAPE)))
def test_appended_zeros_do_not_change_the_checksum(padding):
    values = as_dtype(words("float32"), "float32")
    padded = np.pad(values, [(0, rows) for rows in padding])
    assert checksum(padded) == checksum(values)


def test_prepended_zeros_change_the_checksum():
    values = as_dtype(words("float32"), "float32")
    assert checksum(np.pad(values, [(1, 0), (0, 0), (0, 0)])) != checksum(values)


def test_leaves_are_named_by_their_path():
    tree = {"params": {"embed": 1}, "moments": (2, [3])}
    assert named_leaves(tree) == {"params/embed": 1, "moments/0": 2, "moments/1/0": 3}
    with pytest.raises(AssertionError, match="same path"):
        named_leaves({"a": {"b": 1}, "a/b": 2})


@pytest.mark.parametrize("block", [1, 7, 1 << 16])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_shares_of_parts_add_up(dtype, block, monkeypatch):
    monkeypatch.setattr(module, "BLOCK_ELEMENTS", block)
    values = as_dtype(words(dtype), dtype)
    parts = [(first, second, third) for first in (0, 3) for second in (0, 1, 5) for third in (0, 2)]
    ends = {0: 3, 3: 8}, {0: 1, 1: 5, 5: 6}, {0: 2, 2: 4}
    total = sum(
        checksum_of_part(
            values[tuple(slice(at, end[at]) for at, end in zip(start, ends, strict=True))], start
        )
        for start in parts
    )
    assert total % 2**32 == checksum(values)
    assert checksum_of_part(values[:3], (1, 0, 0)) != checksum_of_part(values[:3], (0, 0, 0))


@pytest.mark.parametrize("shape", [(), (5,), (2, 3), (0, 3), (3, 0)])
def test_the_share_of_the_whole_is_the_checksum(shape):
    values = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    assert checksum_of_part(np.asarray(values), (0,) * len(shape)) == checksum(values)
