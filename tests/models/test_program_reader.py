"""What the reader cannot price is an error."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from optimus_jax.models.program_reader import ProgramReader


def test_a_collective_without_a_kind_is_an_error():
    mesh = AbstractMesh((2,), ("x",), axis_types=(AxisType.Auto,))
    swapped = jax.shard_map(
        lambda x: jax.lax.ppermute(x, "x", [(0, 1), (1, 0)]),
        mesh=mesh,
        in_specs=PartitionSpec("x"),
        out_specs=PartitionSpec("x"),
    )
    traced = jax.make_jaxpr(swapped)(jnp.zeros(4))
    with pytest.raises(NotImplementedError, match="cannot price ppermute; use one of psum"):
        ProgramReader().part(traced.jaxpr)


def test_sides_of_a_condition_count_as_often_as_they_run():
    def either(condition, x):
        return jax.lax.cond(condition, lambda x: x @ x, lambda x: x, x)

    traced = jax.make_jaxpr(lambda c, x: jax.lax.scan(lambda x, c: (either(c, x), c), x, c))(
        jnp.zeros(6, bool), jnp.zeros((10, 10))
    )

    def flops(share=None):
        part = ProgramReader(share=share).part(traced.jaxpr)
        return sum(product.flops(()) for product in part.products)

    once = 2 * 10**3
    assert (flops(), flops(0.0), flops(1.0), flops(0.5)) == (6 * once, 0, 6 * once, 3 * once)


def test_a_collective_that_seldom_runs_is_an_error():
    mesh = AbstractMesh((2,), ("x",), axis_types=(AxisType.Auto,))

    def seldom(x):
        return jax.lax.cond(x[0] > 0, lambda x: jax.lax.psum(x, "x"), lambda x: x, x)

    summed = jax.shard_map(
        seldom,
        mesh=mesh,
        in_specs=PartitionSpec("x"),
        out_specs=PartitionSpec("x"),
        check_vma=False,
    )
    traced = jax.make_jaxpr(summed)(jnp.zeros(4))
    assert len(ProgramReader().part(traced.jaxpr).collectives) == 1
    with pytest.raises(NotImplementedError, match="cannot price psum inside a condition"):
        ProgramReader(share=0.5).part(traced.jaxpr)
