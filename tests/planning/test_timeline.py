"""The clocks of device and network, on programs as XLA's GPU compiler writes them."""

import pytest

from optimus_jax.planning.ahead_of_time.hlo import HloProgram
from optimus_jax.planning.ahead_of_time.timeline import timed_collectives

GROUPS = "replica_groups={{0,1}}"


def entry(*lines: str, loops: str = "") -> HloProgram:
    """A program whose entry runs these instructions in order."""
    lines = ("%x = f32[4]{0} parameter(0)", *lines)
    body = "\n".join(f"  {line}" for line in lines)
    return HloProgram(f"{loops}\nENTRY %main (x: f32[4]) -> f32[4] {{\n{body}\n}}\n")


def exposed(program: HloProgram, exchange_s: float = 3.0) -> list[float]:
    timed = timed_collectives(program, lambda each: exchange_s, lambda work: work.num_bytes / 32)
    assert all(each.time_s == exchange_s for each in timed)
    return [each.exposed_s for each in timed]


def copies(number: int) -> list[str]:
    """Kernels of 32 bytes, read and written: a second each in these tests."""
    return [f"%copy.{i} = f32[4]{{0}} copy(%x)" for i in range(number)]


def gather(name: str = "g") -> tuple[str, str]:
    start = f"%{name} = (f32[4]{{0}}, f32[8]{{0}}) all-gather-start(%x), {GROUPS}, dimensions={{0}}"
    return start, f"%{name}.done = f32[8]{{0}} all-gather-done(%{name})"


@pytest.mark.parametrize(("kernels", "waits"), [(0, 3.0), (2, 1.0), (5, 0.0)])
def test_a_collective_is_exposed_for_what_compute_does_not_cover(kernels, waits):
    start, done = gather()
    assert exposed(entry(start, *copies(kernels), done)) == [waits]


def test_a_collective_without_a_start_is_exposed_as_a_whole():
    assert exposed(entry(*copies(5), f"%r = f32[4]{{0}} all-reduce(%x), {GROUPS}")) == [3.0]


def test_collectives_follow_one_another_on_the_network():
    (one, one_done), (two, two_done) = gather("g"), gather("h")
    assert exposed(entry(one, two, *copies(4), one_done, two_done)) == [0.0, 2.0]


def test_loops_and_branches_count_what_they_run():
    body = """
%body (p: f32[4]) -> f32[4] {
  %p = f32[4]{0} parameter(0)
  ROOT %c = f32[4]{0} copy(%p)
}
%condition (p: f32[4]) -> pred[] {
  %p = f32[4]{0} parameter(0)
  ROOT %true = pred[] constant(true)
}
"""
    start, done = gather()
    loop = (
        "%w = f32[4]{0} while(%x), condition=%condition, body=%body,"
        ' backend_config={"known_trip_count":{"n":"2"}}'
    )
    assert exposed(entry(start, loop, done, loops=body)) == [1.0]


def test_a_fusion_passes_over_what_it_slices_not_over_the_whole():
    fused = """
%fused (stack: f32[100,4], i: s32[]) -> f32[4] {
  %stack = f32[100,4]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %zero = s32[] constant(0)
  %slice = f32[1,4]{1,0} dynamic-slice(%stack, %i, %zero), dynamic_slice_sizes={1,4}
  ROOT %b = f32[4]{0} bitcast(%slice)
}
"""
    start, done = gather()
    lines = (
        "%stack = f32[100,4]{1,0} parameter(1)",
        "%i = s32[] parameter(2)",
        start,
        "%f = f32[4]{0} fusion(%stack, %i), kind=kLoop, calls=%fused",
        done,
    )
    [waits] = exposed(entry(*lines, loops=fused))
    assert waits == pytest.approx(3 - (16 + 4 + 16) / 32)


def test_products_and_attention_count_in_flops():
    found = []
    lines = (
        "%a = bf16[8,16]{1,0} parameter(1)",
        "%b = bf16[16,32]{1,0} parameter(2)",
        "%q = bf16[1,64,2,8]{3,2,1,0} parameter(3)",
        "%d = bf16[8,32]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}",
        "%s = (bf16[1,2,64,8]{3,1,2,0}, u8[0]{0}) custom-call(%q, %q, %q),"
        ' custom_call_target="__cudnn$fmhaSoftmax"',
    )
    program = entry(*lines)

    def compute_s(work):
        found.append(work)
        return 0.0

    timed_collectives(program, lambda each: 0.0, compute_s)
    assert [work.flops for work in found] == [2 * 8 * 16 * 32, 0]
    assert [work.fused_flops for work in found] == [0, 2 * 64 * 2 * 8 * 64]
