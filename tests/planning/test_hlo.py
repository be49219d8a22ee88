"""Parsing compiled HLO: small programs compiled here, whose work is known, and lines as in programs
for GPUs.
"""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from optimus_jax.planning.ahead_of_time.hlo import HloProgram, dot_flops, shape_bytes

SIZES = {"pipe": 2, "data": 1, "fsdp": 2, "tensor": 2}


def compiled(function, *arrays) -> str:
    return jax.jit(function).lower(*arrays).compile().as_text()


def on_mesh(function, *arrays) -> HloProgram:
    """`function` of replicated arrays, with every mesh axis manual."""
    mesh = jax.make_mesh(tuple(SIZES.values()), tuple(SIZES), axis_types=(AxisType.Auto,) * 4)
    whole = PartitionSpec()
    mapped = jax.shard_map(function, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False)
    arrays = [jax.device_put(array, NamedSharding(mesh, whole)) for array in arrays]
    return HloProgram(jax.jit(mapped).lower(*arrays).compile().as_text())


def test_matmul_flops_count_every_iteration_of_every_loop():
    x, w = jnp.ones((4, 5, 32)), jnp.ones((32, 32))

    def nested(x, w):
        def row(x):
            return lax.fori_loop(0, 7, lambda _, y: jnp.tanh(y @ w), x)

        return lax.map(row, x)

    assert dot_flops(compiled(nested, x, w)) == 4 * 7 * 2 * 5 * 32 * 32
    assert (
        dot_flops(compiled(lambda x, w: jnp.einsum("bij,jk->bik", x, w), x, w))
        == 2 * 4 * 5 * 32 * 32
    )


def test_loop_of_unknown_length_counts_once_and_is_listed():
    def until(x, w):
        return lax.while_loop(lambda x: x.sum() < 100, lambda x: x @ w + 1, x)

    program = HloProgram(compiled(until, jnp.ones((8, 8)), jnp.ones((8, 8))))
    assert len(program.unknown_loops) == 1
    assert program.dot_flops() == 2 * 8**3
    assert (
        HloProgram(compiled(lambda x, w: x @ w, jnp.ones((8, 8)), jnp.ones((8, 8)))).unknown_loops
        == ()
    )


def test_branches_count_as_if_always_taken():
    x = jnp.ones((16, 16))
    program = HloProgram(
        compiled(
            lambda x, p: lax.cond(p, lambda x: x @ x @ x, lambda x: x, x), x, jnp.asarray(True)
        )
    )
    assert program.dot_flops() == 2 * 2 * 16**3


@pytest.mark.parametrize(
    ("axes", "kind", "payload", "wire"),
    [
        (("tensor",), "all-reduce", 8 * 4 * 4, 8 * 4 * 4),
        (("pipe", "tensor"), "all-reduce", 8 * 4 * 4, 1.5 * 8 * 4 * 4),
        (("fsdp",), "all-gather", 2 * 8 * 4 * 4, 8 * 4 * 4),
        (("pipe",), "collective-permute", 8 * 4 * 4, 8 * 4 * 4),
    ],
)
def test_collectives_have_mesh_axes_bytes_and_iterations(axes, kind, payload, wire):
    operation = {
        "all-reduce": lambda x: lax.psum(x, axes),
        "all-gather": lambda x: lax.all_gather(x, axes, axis=0, tiled=True)[:8],
        "collective-permute": lambda x: lax.ppermute(x, axes[0], [(0, 1), (1, 0)]),
    }[kind]
    program = on_mesh(
        lambda x: lax.fori_loop(0, 5, lambda _, y: jnp.sin(operation(y)), x), jnp.ones((8, 4))
    )
    (found,) = program.collectives()
    assert (found.kind, found.axes(SIZES), found.payload_bytes, found.wire_bytes, found.times) == (
        kind,
        axes,
        payload,
        wire,
        5,
    )


def test_collectives_over_two_axes_are_told_apart():
    program = on_mesh(lambda x: lax.psum(jnp.sin(lax.psum(x, "fsdp")), "tensor"), jnp.ones((8, 4)))
    assert [each.axes(SIZES) for each in program.collectives()] == [("fsdp",), ("tensor",)]


@pytest.mark.parametrize(
    ("shape", "num_bytes"),
    [
        ("f32[8,4]{1,0}", 128),
        ("bf16[3]{0:T(8)}", 6),
        ("pred[]", 1),
        ("f8e4m3fn[16]{0}", 16),
        ("s4[6]{0}", 3),
        ("(f32[2]{0}, /*index=1*/(u8[5]{0}, token[]))", 13),
    ],
)
def test_shape_bytes_of_every_notation(shape, num_bytes):
    assert shape_bytes(shape) == num_bytes


GPU = """HloModule jit_step, is_scheduled=true, num_partitions=8

%async_computation (param_0.1: f32[16,4]) -> f32[4,4] {
  %param_0.1 = f32[16,4]{1,0} parameter(0)
  ROOT %reduce_scatter.1 = f32[4,4]{1,0} reduce-scatter(%param_0.1), channel_id=1, \
replica_groups=[2,4]<=[8], dimensions={0}, to_apply=%add
}

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

ENTRY %main (x: f32[4,4]) -> f32[4,4] {
  %x = f32[4,4]{1,0} parameter(0)
  %send.1 = (f32[4,4]{1,0}, f32[4,4]{1,0}) collective-permute-start(%x), \
source_target_pairs={{0,4},{4,0}}, metadata={op_name="step/ppermute"}
  %near = f32[4,4]{1,0} fusion(%x), kind=kLoop, calls=%add
  %gather.1 = (f32[4,4]{1,0}, f32[16,4]{1,0}) all-gather-start(%near), \
replica_groups={{0,1,2,3},{4,5,6,7}}, dimensions={0}
  %gather.2 = f32[16,4]{1,0} all-gather-done(%gather.1)
  %between = f32[4,4]{1,0} fusion(%near), kind=kLoop, calls=%add
  %arrived = f32[4,4]{1,0} collective-permute-done(%send.1)
  %scatter.1 = ((f32[16,4]{1,0}), f32[4,4]{1,0}) async-start(%gather.2), calls=%async_computation
  %far = f32[4,4]{1,0} fusion(%arrived), kind=kLoop, calls=%add
  %more = f32[4,4]{1,0} fusion(%far), kind=kLoop, calls=%add
  %scatter.2 = f32[4,4]{1,0} async-done(%scatter.1)
  ROOT %total = f32[4,4]{1,0} all-reduce(%scatter.2), replica_groups={}, to_apply=%add
}
"""


def test_work_that_overlaps_each_collective_is_counted():
    found = {each.kind: each for each in HloProgram(GPU).collectives()}
    assert {kind: each.work_under for kind, each in found.items()} == {
        "collective-permute": 2,
        "all-gather": 0,
        "reduce-scatter": 2,
        "all-reduce": 0,
    }
    assert found["collective-permute"].source == "step/ppermute"
    assert found["collective-permute"].groups == ((0, 4), (4, 0))
    assert found["all-gather"].payload_bytes == found["reduce-scatter"].payload_bytes == 256
    assert found["reduce-scatter"].groups == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert found["all-reduce"].groups == (tuple(range(8)),), "none given: all devices"


def test_psum_scatter_on_a_cpu_counts_as_an_all_reduce_of_the_whole():
    program = on_mesh(partial(lax.psum_scatter, axis_name="tensor", tiled=True), jnp.ones((8, 4)))
    # A CPU has no reduce-scatter: XLA writes it as an all-reduce of the whole.
    assert sum(each.payload_bytes for each in program.collectives()) == 8 * 4 * 4
