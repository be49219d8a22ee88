"""Parameters are born sharded: no device ever holds a whole copy, and the values do not depend on the mesh."""

import jax.numpy as jnp
import numpy as np
import pytest
from helpers import host_leaves
from plans import build, case, model_for

ONE = case("data=1", zero=0)


@pytest.mark.parametrize("name", ["gpt", "llama"])
@pytest.mark.parametrize("mesh", ["fsdp=8", "fsdp=2,tensor=4"])
def test_initial_values_do_not_depend_on_the_mesh(name, mesh):
    sharded, whole = (build(model_for(each, name), each).program for each in (case(mesh, zero=3), ONE))
    ours, reference = sharded.init(jnp.int32(7)), whole.init(jnp.int32(7))
    table = ours.params["embedding"]["table"]
    assert table.addressable_shards[0].data.size * 8 == table.size
    expected = host_leaves(reference)
    for path, leaf in host_leaves(ours).items():
        np.testing.assert_array_equal(leaf, expected[path], err_msg=path)


def test_no_device_holds_a_whole_copy():
    """The init program's memory per device, for parameters and moments that are 96% matrices split over eight."""
    program = build(model_for(ONE, "gpt"), case("fsdp=8", zero=3), {
        "model.embed_dim": 256, "model.mlp_dim": 1024, "model.num_layers": 8}).program
    memory = program.init.lower(jnp.int32(0)).compile().memory_analysis()
    whole = 3 * 4 * program.shapes.num_params
    assert memory.output_size_in_bytes < 1.2 * whole / 8
    assert memory.output_size_in_bytes + memory.temp_size_in_bytes < 0.5 * whole
