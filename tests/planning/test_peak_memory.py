"""What is in memory when a program needs most: of programs by hand, with known answers."""

import pytest

from optimus_jax.planning.ahead_of_time.hlo import HloProgram
from optimus_jax.planning.ahead_of_time.live_arrays import arrays_at_peak
from optimus_jax.planning.cost.memory import MemoryEstimate
from optimus_jax.planning.search.explain import mib
from optimus_jax.planning.traces.peak_memory import PeakMemory, held_rows

LOOP = """HloModule jit_train, is_scheduled=true

%update (u: f32[3,8], x.1: f32[8], n.1: s32[]) -> f32[3,8] {
  %u = f32[3,8]{1,0} parameter(0)
  %x.1 = f32[8]{0} parameter(1)
  %n.1 = s32[] parameter(2)
  %b = f32[1,8]{1,0} bitcast(%x.1)
  ROOT %d = f32[3,8]{1,0} dynamic-update-slice(%u, %b, %n.1)
}

%body (p: (s32[], f32[8], f32[3,8])) -> (s32[], f32[8], f32[3,8]) {
  %p = (s32[], f32[8]{0}, f32[3,8]{1,0}) parameter(0)
  %n = s32[] get-tuple-element(%p), index=0
  %x = f32[8]{0} get-tuple-element(%p), index=1
  %kept = f32[3,8]{1,0} get-tuple-element(%p), index=2
  %wide = f32[100]{0} fusion(%x), kind=kLoop, calls=%f
  %new = f32[8]{0} dot(%wide, %x), metadata={op_name="jit(train)/layer/tanh"}
  %saved = f32[3,8]{1,0} fusion(%kept, %new, %n), kind=kLoop, calls=%update
  ROOT %out = (s32[], f32[8]{0}, f32[3,8]{1,0}) tuple(%n, %new, %saved)
}

%f (q: f32[8]) -> f32[100] {
  %q = f32[8]{0} parameter(0)
  ROOT %r = f32[100]{0} broadcast(%q)
}

%cond (p.1: (s32[], f32[8], f32[3,8])) -> pred[] {
  %p.1 = (s32[], f32[8]{0}, f32[3,8]{1,0}) parameter(0)
  ROOT %less = pred[] constant(true)
}

ENTRY %main (state: f32[8], batch: s32[4]) -> f32[8] {
  %state = f32[8]{0} parameter(0), metadata={op_name="state.params[\\'w\\']"}
  %batch = s32[4]{0} parameter(1), metadata={op_name="batch[\\'tokens\\']"}
  %zero = s32[] constant(0)
  %first = f32[8]{0} copy(%state)
  %room = f32[3,8]{1,0} broadcast(%zero), metadata={op_name="jit(train)/broadcast"}
  %begin = (s32[], f32[8]{0}, f32[3,8]{1,0}) tuple(%zero, %first, %room)
  %loop = (s32[], f32[8]{0}, f32[3,8]{1,0}) while(%begin), condition=%cond, body=%body
  %last = f32[8]{0} get-tuple-element(%loop), index=1
  %all = f32[3,8]{1,0} get-tuple-element(%loop), index=2
  %logits = f32[3,4]{1,0} dot(%all, %last), metadata={op_name="jit(train)/jvp(head)/dot"}
  %grad = f32[8]{0} dot(%logits, %all), metadata={op_name="jit(train)/transpose(jvp())/dot"}
  ROOT %result = f32[8]{0} add(%grad, %state)
}
"""
STARTS = """HloModule jit_train, is_scheduled=true

ENTRY %main (x: f32[4]) -> f32[16] {
  %x = f32[4]{0} parameter(0)
  %y = f32[4]{0} add(%x, %x)
  %begin = (f32[4]{0}, f32[16]{0}) all-gather-start(%y), dimensions={0}
  %beside = f32[8]{0} broadcast(%x)
  %end = f32[16]{0} all-gather-done(%begin)
  %sum = f32[16]{0} all-reduce-start(%end)
  %summed = f32[16]{0} all-reduce-done(%sum)
  ROOT %result = f32[16]{0} fusion(%summed, %beside), kind=kLoop, calls=%f
}

%f (a: f32[16], b: f32[8]) -> f32[16] {
  %a = f32[16]{0} parameter(0)
  %b = f32[8]{0} parameter(1)
  ROOT %c = f32[16]{0} add(%a, %a)
}
"""


def held(text):
    return [
        (array.shape, array.source.rpartition("/")[2])
        for array in arrays_at_peak(HloProgram(text))
        if not array.is_argument
    ]


def test_what_a_loop_carries_is_held_once_beside_what_an_iteration_makes():
    assert held(LOOP) == [("f32[8]", ""), ("f32[3,8]", "tanh"), ("f32[100]", "")]
    names = [array.source for array in arrays_at_peak(HloProgram(LOOP)) if array.is_argument]
    assert names == ["state.params['w']", "batch['tokens']"]


def test_a_gathered_array_is_held_beside_its_part_and_summed_in_place():
    assert held(STARTS) == [("f32[4]", ""), ("f32[16]", ""), ("f32[8]", "")]


def test_arrays_are_counted_by_the_parts_of_the_planners_estimate():
    estimate = MemoryEstimate(
        params=32, moments=0, gradients=64, activations=400, logits=48, batch=16
    )
    found = PeakMemory.of(HloProgram(LOOP), allocated_bytes=600, ways=2, estimate=estimate)
    # The carried f32[8] has the shape of the parameter.
    assert found.parts == {"params": 32, "gradients": 32, "activations": 96 + 400, "batch": 16}
    assert found.predicted["logits"] == 48
    assert "moments" not in found.predicted
    largest = found.arrays[0]
    assert (largest.part, largest.shape, largest.num_bytes) == ("activations", "f32[100]", 400)
    assert found.num_bytes == 576
    rows = held_rows(found.parts, found.predicted, lambda size: f"{size:.0f}")
    assert rows[0] == ["params", "32", "5.6%", "32"]
    assert ["logits", "-", "-", "48"] in rows
    assert rows[-1] == ["all", "576", "100.0%", "560"]
    assert mib(3 * 2**19) == "1.5 MiB"


@pytest.mark.parametrize(("ways", "part"), [(1, "activations"), (2, "gradients")])
def test_a_gradient_that_is_whole_over_fsdp_is_one(ways, part):
    text = LOOP.replace("f32[100]", "f32[16]")
    estimate = MemoryEstimate(params=0, moments=0, gradients=0, activations=0, logits=0, batch=0)
    found = PeakMemory.of(HloProgram(text), allocated_bytes=1, ways=ways, estimate=estimate)
    assert next(each.part for each in found.arrays if each.shape == "f32[16]") == part
