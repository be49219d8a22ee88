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
