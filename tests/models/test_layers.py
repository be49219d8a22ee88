"""Parts of a block: sums over tokens are float32 in every dtype, and dropout depends on the example
alone.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import F32_RELATIVE, MATMUL_RELATIVE, relative_error
from jax.sharding import PartitionSpec

from optimus_jax.mesh.collectives import Collectives
from optimus_jax.models.layers import Norm, add_bias, constant, dropout, rows_of
from optimus_jax.models.mlp import ACTIVATIONS, exact_gelu
from optimus_jax.models.products import project, project_back
from optimus_jax.models.program_reader import traced_on_device

TOKENS, EMBED = 4096, 8


def cotangents(dtype):
    """One per token, with a mean: the sum over all tokens is far larger than each."""
    return jnp.asarray(np.random.default_rng(0).standard_normal((1, TOKENS, EMBED)) + 0.5, dtype)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_the_gradient_of_a_bias_is_summed_in_float32(dtype):
    weight = cotangents(dtype)
    loss = lambda bias: (  # noqa: E731
        (add_bias(jnp.zeros_like(weight), nnx.Param(bias)) * weight).astype(jnp.float32).sum()
    )
    gradient = jax.jit(jax.grad(loss))(jnp.zeros(EMBED))
    assert gradient.dtype == jnp.float32
    assert (
        relative_error(np.asarray(gradient), np.asarray(weight, np.float64).sum((0, 1)))
        <= F32_RELATIVE
    )


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_gradient_of_an_often_used_row_is_summed_in_float32(dtype):
    weight, rows = cotangents(dtype), jnp.asarray(np.arange(TOKENS)[None] % 3, jnp.int32)
    loss = lambda table: (  # noqa: E731
        (rows_of(table.astype(dtype), rows, dtype) * weight).astype(jnp.float32).sum()
    )
    gradient = jax.jit(jax.grad(loss))(jnp.zeros((4, EMBED)))
    expected = np.zeros((4, EMBED))
    np.add.at(expected, np.asarray(rows)[0], np.asarray(weight, np.float64)[0])
    assert (
        relative_error(np.asarray(gradient), expected) <= MATMUL_RELATIVE[jnp.dtype(dtype).name]
    ), "rounded once, at the end"


@pytest.mark.parametrize(
    ("kind", "by_definition"),
    [
        (
            "layer",
            lambda x: (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 0.01),
        ),
        ("rms", lambda x: x / np.sqrt((x * x).mean(-1, keepdims=True) + 0.01)),
    ],
)
def test_norms_by_their_definition(kind, by_definition):
    x = np.random.default_rng(1).standard_normal((2, 3, 16)).astype(np.float32) * 3 + 1
    with nnx.use_eager_sharding(False):
        norm = Norm(kind, (16,), 0.01)
        norm.scale = constant(2.0, (16,), ("norm",), "scale", "norm")
        if kind == "layer":
            norm.bias = nnx.data(constant(0.5, (16,), ("norm",), "bias", "norm"))
    expected = 2 * by_definition(x.astype(np.float64)) + (0.5 if kind == "layer" else 0)
    assert relative_error(np.asarray(norm(jnp.asarray(x))), expected) <= F32_RELATIVE
    assert norm(jnp.asarray(x, jnp.bfloat16)).dtype == jnp.bfloat16


def normal_cdf(x):
    return (1 + np.vectorize(math.erf)(x / math.sqrt(2))) / 2


def normal_density(x):
    return np.exp(-x * x / 2) / math.sqrt(2 * math.pi)


def test_exact_gelu_and_its_derivative_by_their_definition():
    x = np.linspace(-8, 8, 257, dtype=np.float32)
    value, pull = jax.vjp(exact_gelu, jnp.asarray(x))
    (slope,) = pull(jnp.ones_like(value))
    wide = x.astype(np.float64)
    assert relative_error(np.asarray(value), wide * normal_cdf(wide)) <= F32_RELATIVE
    by_definition = normal_cdf(wide) + wide * normal_density(wide)
    assert relative_error(np.asarray(slope), by_definition) <= F32_RELATIVE
    assert exact_gelu(jnp.ones(2, jnp.bfloat16)).dtype == jnp.bfloat16


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_every_activation_is_differentiated_inside_shard_map(name):
    activate = ACTIVATIONS[name]

    def slope(x):
        value, pull = jax.vjp(activate, x)
        return pull(value)

    rows = PartitionSpec("data")
    traced = traced_on_device(slope, {"data": 2}, (rows,), jnp.ones((2, 3)))
    assert traced.outvars


@pytest.mark.parametrize("columns", [(5,), (2, 5)])
def test_projections_and_their_gradients_equal_an_einsum(columns):
    random = np.random.default_rng(2)
    x, out, weight = (
        jnp.asarray(random.standard_normal(shape), jnp.float32)
        for shape in ((2, 3, 4), (2, 3, *columns), (4, *columns))
    )
    names = "xy"[: len(columns)]
    for function, einsum, rows in (
        (project, f"bld,d{names}->bl{names}", x),
        (project_back, f"bl{names},d{names}->bld", out),
    ):
        found, found_vjp = jax.vjp(
            lambda a, b, function=function: function(a, b, jnp.dtype(jnp.float32)), rows, weight
        )
        expected, expected_vjp = jax.vjp(
            lambda a, b, einsum=einsum: jnp.einsum(einsum, a, b), rows, weight
        )
        assert found.shape == expected.shape
        for got, wanted in zip(
            (found, *found_vjp(found)), (expected, *expected_vjp(expected)), strict=True
        ):
            assert relative_error(np.asarray(got), np.asarray(wanted)) <= F32_RELATIVE


ONE_DEVICE = Collectives(jnp.dtype(jnp.float32))


def test_dropout_is_drawn_by_example_and_site():
    keys = jax.random.split(jax.random.key(0), 4)
    x = jnp.ones((4, 50, 20))
    found = dropout(x, 0.25, keys, 1, ONE_DEVICE)
    np.testing.assert_array_equal(
        dropout(x[2:], 0.25, keys[2:], 1, ONE_DEVICE),
        found[2:],
        "an example's mask does not depend on its row",
    )
    assert set(np.unique(found).tolist()) == {0.0, float(np.float32(1) / np.float32(0.75))}
    assert 0.72 < (found != 0).mean(dtype=jnp.float32) < 0.78
    assert (found != dropout(x, 0.25, keys, 2, ONE_DEVICE)).any()
    assert (found[0] != found[1]).any()
    assert dropout(x, 0.25, None, 1, ONE_DEVICE) is x
    assert dropout(x, 0.0, keys, 1, ONE_DEVICE) is x
