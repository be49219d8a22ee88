"""Parameters are initialized sharded: no device ever holds a whole copy, and the values do not
depend on the mesh.
"""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from helpers import fitted, host_leaves
from plans import build, case, in_order, model_for

from optimus_jax.mesh.slots import EMPTY
from optimus_jax.reshard.restack import is_stacked

ONE = case("data=1", zero=0)


@functools.cache
def on_one_device(model):
    """The initial leaves on one device, by path."""
    return host_leaves(build(model, ONE).program.init(jnp.int32(7)))


@pytest.mark.parametrize("name", ["gpt", "llama"])
@pytest.mark.parametrize("mesh", ["fsdp=8", "fsdp=2,tensor=4", "pipe=4,fsdp=2"])
def test_initial_values_do_not_depend_on_the_mesh(name, mesh):
    model = model_for(case(mesh), name)
    sharded = build(model, case(mesh, zero=3)).program
    ours, expected = sharded.init(jnp.int32(7)), on_one_device(model)
    table = ours.params["embedding"]["table"]
    assert table.addressable_shards[0].data.size * 8 == table.size
    leaves, empty = host_leaves(ours), np.array(sharded.shapes.slots) == EMPTY
    assert empty.any() == ("pipe" in mesh)
    for path, leaf in in_order(sharded, leaves).items():
        np.testing.assert_array_equal(leaf, fitted(expected[path], leaf.shape), err_msg=path)
        assert not is_stacked(path) or not leaves[path][empty].any(), path


@pytest.mark.parametrize(
    "of",
    [
        case("fsdp=8", zero=3),
        case("pipe=4,fsdp=2", zero=3),
        case("pipe=4,fsdp=2", zero=3, schedule="interleaved"),
    ],
    ids=str,
)
def test_no_device_holds_a_whole_copy(of):
    """The init program's memory per device, for parameters and moments that are 96% matrices split
    over eight.
    """
    program = build(
        model_for(ONE, "gpt"),
        of,
        {"model.embed_dim": 256, "model.mlp_dim": 1024, "model.num_layers": 10},
    ).program
    memory = program.init.lower(jnp.int32(0)).compile().memory_analysis()
    # empty slots take as much as full ones
    whole = 3 * 4 * program.shapes.num_params * len(program.shapes.slots) / 10
    assert memory.output_size_in_bytes < 1.2 * whole / 8
    assert memory.temp_size_in_bytes < whole / 8
