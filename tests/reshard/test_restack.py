"""A stack moved to another order of slots equals indexing bit for bit, and no device holds more
than a few shards on the way.
"""

import math
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hlo import collectives
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from optimus_jax.config.axes import MESH_AXES, PIPE, AxisSizes
from optimus_jax.mesh.slots import EMPTY, canonical_slots, layer_slots
from optimus_jax.reshard.checksum import named_leaves
from optimus_jax.reshard.memory_kinds import HOST_MEMORY, lies_on_host
from optimus_jax.reshard.restack import (
    _moved,
    is_stacked,
    make_rounds,
    restack,
    with_empty_slots_zero,
)

CASES = {
    "uneven": ("pipe=2,fsdp=2,tensor=2", layer_slots((1, 2), 2)),
    "nothing leaves its stage": ("pipe=2,data=2,fsdp=2", (0, 1, EMPTY, 2)),
    "uneven, ten layers": ("pipe=4,tensor=2", layer_slots((2, 2, 3, 3), 4)),
    "uneven, nearly all of a shard goes on": ("pipe=4,fsdp=2", layer_slots((1, 4, 4, 3), 4)),
    "interleaved": ("pipe=2,data=2,fsdp=2", layer_slots((1, 1, 1, 1), 2)),
    "interleaved, uneven": ("pipe=4,fsdp=2", layer_slots((1, 1, 1, 1, 1, 1, 2, 2), 4)),
    "interleaved, alone": ("pipe=4", layer_slots((2,) * 8, 4)),
    "one stage": ("data=2,fsdp=2,tensor=2", (2, EMPTY, 0, 1)),
}


def mesh_of(text):
    sizes = AxisSizes.parse(text)
    return jax.make_mesh(
        tuple(sizes[axis] for axis in MESH_AXES),
        MESH_AXES,
        devices=jax.devices()[: sizes.num_devices],
        axis_types=(AxisType.Auto,) * len(MESH_AXES),
    )


def stages_of(mesh):
    return PIPE if mesh.shape[PIPE] > 1 else None


def in_slots(layers, slots):
    """Rows by layer -> rows by slot."""
    return np.stack(
        [np.zeros_like(layers[0]) if layer == EMPTY else layers[layer] for layer in slots]
    )


def a_state(mesh, slots):
    """Random bits (infinities and NaNs among them), a moment with another sharding, and leaves that
    are not stacked; with their shardings.
    """
    rng = np.random.default_rng(0)
    num_layers = max(slots) + 1

    def rows(shape, dtype):
        return in_slots(rng.integers(0, 2**32, (num_layers, *shape), np.uint32).view(dtype), slots)

    values = {
        "params": {
            "layers": {"w": rows((4, 6), np.float32), "n": rows((), np.int32)},
            "head": np.ones((4, 2), np.float32),
        },
        "mu": {"layers": {"w": rows((4, 6), np.float32)}, "head": np.ones((4, 2), np.float32)},
        "step": np.int32(3),
    }
    first = stages_of(mesh)
    specs = {
        "params": {"layers": {"w": P(first, None, "tensor"), "n": P(first)}, "head": P("fsdp")},
        "mu": {"layers": {"w": P(first, ("fsdp",), "tensor")}, "head": P()},
        "step": P(),
    }
    shardings = jax.tree.map(
        lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda node: isinstance(node, P)
    )
    return jax.device_put(values, shardings), shardings


def bits(tree):
    return {
        path: np.asarray(leaf).view(np.uint32)
        for path, leaf in named_leaves(jax.device_get(tree)).items()
    }


@pytest.mark.parametrize("name", CASES)
def test_restack_equals_indexing_in_both_directions(name):
    text, slots = CASES[name]
    mesh = mesh_of(text)
    target = canonical_slots(max(slots) + 1, mesh.shape[PIPE])
    assert slots != target
    state, shardings = a_state(mesh, slots)
    before = bits(state)
    restacked = restack(state, shardings, source=slots, target=target)
    rows = {layer: slot for slot, layer in enumerate(slots)}
    for path, leaf in bits(restacked).items():
        expected = before[path]
        if is_stacked(path):
            expected = in_slots(
                [before[path][rows[layer]] for layer in range(max(slots) + 1)], target
            )
            assert not expected[max(slots) + 1 :].any()
        np.testing.assert_array_equal(leaf, expected, err_msg=path)
    assert jax.tree.map(lambda leaf: leaf.sharding, restacked) == shardings
    back = restack(restacked, shardings, source=target, target=slots)
    for path, leaf in bits(back).items():
        np.testing.assert_array_equal(leaf, before[path], err_msg=path)


def test_only_stacked_leaves_are_moved_and_optionally_deleted():
    text, slots = CASES["interleaved"]
    state, shardings = a_state(mesh_of(text), slots)
    target = canonical_slots(4, 2)
    assert restack(state, shardings, source=slots, target=slots, keep=False) is state
    for keep in (True, False):
        moved = restack(state, shardings, source=slots, target=target, keep=keep)
        for (path, old), new in zip(
            named_leaves(state).items(), named_leaves(moved).values(), strict=True
        ):
            assert (new is old) == (not is_stacked(path))
            assert old.is_deleted() == (is_stacked(path) and not keep)


def test_moments_in_host_memory_stay_there_when_restacked():
    text, slots = CASES["uneven"]
    state, shardings = a_state(mesh_of(text), slots)
    target = canonical_slots(3, 2)
    expected = bits(restack(state, shardings, source=slots, target=target))
    shardings = {
        **shardings,
        "mu": jax.tree.map(
            lambda sharding: sharding.with_memory_kind(HOST_MEMORY), shardings["mu"]
        ),
    }
    moved = restack(
        jax.device_put(state, shardings), shardings, source=slots, target=target, keep=False
    )
    assert [path for path, leaf in named_leaves(moved).items() if lies_on_host(leaf.sharding)] == [
        "mu/head",
        "mu/layers/w",
    ]
    for path, leaf in bits(moved).items():
        np.testing.assert_array_equal(leaf, expected[path], err_msg=path)


@pytest.mark.parametrize("name", [name for name, (mesh, _) in CASES.items() if "pipe" in mesh])
@pytest.mark.parametrize("inverse", [False, True])
def test_restack_needs_memory_and_traffic_of_a_few_shards(name, inverse):
    """In addition to old and new shards. The messages of an all-to-all would take nearly the whole
    leaf, or up to 4 shards, twice.
    """
    text, slots = CASES[name]
    mesh = mesh_of(text)
    orders = slots, canonical_slots(max(slots) + 1, mesh.shape[PIPE])
    source, target = orders[::-1] if inverse else orders
    sharding = NamedSharding(mesh, P(PIPE, "fsdp", "tensor"))
    leaf = jax.ShapeDtypeStruct((len(source), 64, 64), jnp.float32, sharding=sharding)
    compiled = _moved.lower(leaf, sharding=sharding, source=source, target=target).compile()
    memory, shard = compiled.memory_analysis(), max(len(source), len(target)) // mesh.shape[PIPE]
    row_bytes = 4 * 64 * 64 // mesh.shape["fsdp"] // mesh.shape["tensor"]
    assert memory.temp_size_in_bytes <= (2 * shard + 0.1) * row_bytes
    moved = collectives(compiled.as_text(), mesh)
    assert all((each.kind, each.times) == ("collective-permute", 1) for each in moved)
    assert sum(each.num_bytes for each in moved) <= shard * row_bytes
    rounds = [part for part in make_rounds(source, target, mesh.shape[PIPE]) if part.routes]
    assert sorted(each.num_bytes for each in moved) == sorted(
        part.take.shape[1] * row_bytes for part in rounds
    )


@st.composite
def orders(draw: st.DrawFn) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """A number of stages and two orders of the same layers in any slots."""
    num_stages, num_layers = draw(st.integers(1, 6)), draw(st.integers(1, 12))
    least = math.ceil(num_layers / num_stages)

    def order() -> tuple[int, ...]:
        room = draw(st.integers(least, least + 2)) * num_stages
        return tuple(draw(st.permutations([*range(num_layers), *[EMPTY] * (room - num_layers)])))

    return num_stages, order(), order()


@given(orders())
def test_rounds_move_every_layer_once_with_one_peer_per_stage(orders):
    num_stages, source, target = orders
    room = len(target) // num_stages
    old, new = np.array(source).reshape(num_stages, -1), np.full((num_stages, room), EMPTY)
    rounds = make_rounds(source, target, num_stages)
    for part in rounds:
        routes = part.routes or [(stage, stage) for stage in range(num_stages)]
        starts, ends = zip(*routes, strict=True)
        assert len(set(starts)) == len(starts)
        assert len(set(ends)) == len(ends)
        assert not part.routes or all(start != end for start, end in routes)
        for (start, end), row in product(routes, range(part.take.shape[1])):
            if part.put[end, row] < room:
                assert new[end, part.put[end, row]] == EMPTY, "nothing is written twice"
                new[end, part.put[end, row]] = old[start, part.take[start, row]]
    assert tuple(new.ravel()) == target
    stage_of = {layer: slot // (len(source) // num_stages) for slot, layer in enumerate(source)}
    pairs = {(stage_of[layer], slot // room) for slot, layer in enumerate(target) if layer != EMPTY}
    most = max(
        (
            sum(pair[side] == stage and pair[0] != pair[1] for pair in pairs)
            for side, stage in product((0, 1), range(num_stages))
        )
    )
    assert sum(bool(part.routes) for part in rounds) == most


def test_empty_slots_are_zero():
    stack = {"w": jnp.ones((4, 2)), "n": jnp.ones(4, jnp.int32)}
    zeroed = with_empty_slots_zero(stack, (0, EMPTY, 1, EMPTY))
    assert zeroed["w"].tolist() == [[1, 1], [0, 0], [1, 1], [0, 0]]
    assert zeroed["n"].tolist() == [1, 0, 1, 0]
    assert zeroed["n"].dtype == jnp.int32
    assert with_empty_slots_zero(stack, (0, 1, 2, 3)) is stack
