"""Where the time of traced operations goes: by hand, and of the instructions of a compiled step."""

from collections import Counter

import plans
import pytest
from plans import build, case, compiled_step

from optimus_jax.config.axes import MESH_AXES
from optimus_jax.planning.ahead_of_time.hlo import HloProgram
from optimus_jax.planning.ahead_of_time.live_arrays import arrays_at_peak
from optimus_jax.planning.cost.cost import TERMS
from optimus_jax.planning.traces.step_parts import MeasuredPart, step_parts
from optimus_jax.planning.traces.step_profile import IDLE, StepProfile
from optimus_jax.planning.traces.trace_events import OperationRun

TEXT = """HloModule jit_train, num_partitions=4

%body (p: (f32[8])) -> (f32[8]) {
  %p = (f32[8]) parameter(0)
  %x = f32[8] get-tuple-element(%p), index=0
  %dot.1 = f32[8] dot(%x, %x), metadata={op_name="jit(train)/jvp()/layer/attention/dot_general"}
  %reduce.2 = f32[8] all-reduce(%dot.1), replica_groups={{0,1},{2,3}}, to_apply=%add
  ROOT %out = (f32[8]) tuple(%reduce.2)
}

ENTRY %main (a: f32[8]) -> f32[8] {
  %a = f32[8] parameter(0)
  %t = (f32[8]) tuple(%a)
  %while.3 = (f32[8]) while(%t), condition=%c, body=%body, metadata={op_name="jit(train)/while"}
  %y = f32[8] get-tuple-element(%while.3), index=0
  ROOT %new.4 = f32[8] add(%y, %y), metadata={op_name="jit(train)/optimizer/add"}
}

%add (a.1: f32[], b.1: f32[]) -> f32[] {
  %a.1 = f32[] parameter(0)
  %b.1 = f32[] parameter(1)
  ROOT %sum = f32[] add(%a.1, %b.1)
}

%c (p.1: (f32[8])) -> pred[] {
  %p.1 = (f32[8]) parameter(0)
  ROOT %yes = pred[] constant(true)
}
"""
SIZES = {"data": 2, "fsdp": 1, "pipe": 1, "tensor": 2}


def profile(*devices, terms=None):
    """A profile of two steps, of operations (name, begin, end in milliseconds) by device."""
    traced = {
        device: [OperationRun(name, begin * 1e6, end * 1e6) for name, begin, end in runs]
        for device, runs in enumerate(devices)
    }
    return StepProfile.of(
        traced,
        HloProgram(TEXT),
        SIZES,
        remat="none",
        first_step=4,
        last_step=5,
        plan="abc",
        layout="data=2,tensor=2",
        terms=terms,
    )


def times(found):
    return {part.name: (part.time_s, part.beside_s) for part in found.parts}


def test_each_moment_belongs_to_one_part_and_exchanges_beside_compute_are_counted_apart():
    found = profile(
        [
            ("while.3", 0, 40),  # contains the next three
            ("dot.1", 0, 10),
            ("reduce.2", 6, 20),  # 4 beside the product, 10 alone
            ("dot.1", 30, 40),  # 10 idle before
            ("new.4", 36, 50),  # begins while the product still runs
            ("no.such", 50, 60),
        ]
    )
    ms = 1e-3 / 2  # of two steps
    assert times(found) == {
        "attention": (pytest.approx(20 * ms), 0),
        "tensor": (pytest.approx(10 * ms), pytest.approx(4 * ms)),
        "optimizer": (pytest.approx(10 * ms), 0),
        "other": (pytest.approx(10 * ms), 0),
        IDLE: (pytest.approx(10 * ms), 0),
    }
    assert found.step_time_s == pytest.approx(60 * ms)
    longest = found.operations[0]
    assert (longest.name, longest.part, longest.runs) == ("dot.1", "attention", 1)
    assert longest.time_s == pytest.approx(20 * ms)
    assert longest.source.endswith("layer/attention/dot_general")


def test_times_are_means_of_the_devices_over_the_time_of_all():
    found = profile([("dot.1", 0, 10)], [("dot.1", 10, 40)])
    assert times(found)["attention"][0] == pytest.approx(40e-3 / 2 / 2)
    assert times(found)[IDLE][0] == pytest.approx(40e-3 / 2 / 2)
    assert found.num_devices == 2
    assert "mean of 2 devices" in found.title


def test_predicted_terms_stand_beside_measured_parts():
    terms = {"attention": 0.008, "bubble": 0.002, "overhead": 0.001, "data": 0.004, "head": 0.0}
    found = profile([("dot.1", 0, 20)], terms=terms)
    assert found.predicted_s == {"attention": 0.008, "data": 0.004, IDLE: 0.003}
    rows = {row[0]: row[1:] for row in found.table()}
    assert rows["attention"] == ["10 ms", "100.0%", "-", "8 ms"]
    assert rows["data"] == ["-", "-", "-", "4 ms"], "predicted, and nothing was measured"
    assert rows["step"] == ["10 ms", "100.0%", "-", "15 ms"]
    assert StepProfile.from_json(found.to_json()) == found


@pytest.mark.parametrize(
    "mesh",
    [
        case("data=2,fsdp=2,tensor=2", remat="selective"),
        case("pipe=2,fsdp=2,tensor=2", microbatches=4, remat="selective"),
    ],
    ids=["no stages", "stages"],
)
def test_parts_of_a_compiled_step_are_terms_of_the_planner(mesh):
    built = build(plans.GPT, mesh)
    compiled = compiled_step(built)
    hlo = HloProgram(compiled.as_text())
    analysis = compiled.memory_analysis()
    held = arrays_at_peak(hlo)
    arguments = sum(array.num_bytes for array in held if array.is_argument)
    assert arguments == analysis.argument_size_in_bytes
    made = sum(array.num_bytes for array in held) - arguments
    # XLA packs arrays of different lives into the same memory, with gaps and in the others' places.
    assert made == pytest.approx(analysis.temp_size_in_bytes, rel=0.05)
    assert hlo.name == "jit_train"
    sizes = {axis: built.plan.axes[axis] for axis in MESH_AXES}
    parts = step_parts(hlo, sizes, remat=built.plan.remat)
    assert {part.name for part in parts.values() if part is not None} <= {*TERMS, "other"}
    used = Counter(
        part
        for _, instruction, _ in hlo.instructions()
        if instruction.opcode == "dot" and (part := parts[instruction.name]) is not None
    )
    products = {"attention", "feed-forward", "recompute", "head"}
    assert {part.name for part in used} == products, "of every product it is known what it is for"
    exchanges = {part.name for part in parts.values() if part is not None and part.is_exchange}
    stages = {"pipe"} if built.plan.axes.pipe > 1 else {"data"}
    assert exchanges == {"fsdp", "tensor", "vocabulary", *stages}
    assert {MeasuredPart("optimizer", False), MeasuredPart("memory", False)} <= {*parts.values()}
    assert parts[next(i.name for _, i, _ in hlo.instructions() if i.opcode == "while")] is None
