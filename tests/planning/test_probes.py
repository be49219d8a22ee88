"""Probes run what they claim to measure: the right work, in the right groups, as often as the time
is divided by.
"""

import dataclasses
import re

import hlo
import jax
import numpy as np
import pytest

from optimus_jax.planning.profiles import probe_programs, probes
from optimus_jax.planning.profiles.measurements import (
    ALL_GATHER,
    ALL_REDUCE,
    REDUCE_SCATTER,
    WIRE_SHARE,
)
from optimus_jax.planning.profiles.probe_programs import (
    KINDS,
    Timing,
    time_collective,
    time_host_copy,
    time_launch,
    time_matmul,
    time_overlap,
    time_pass,
)
from optimus_jax.planning.profiles.probes import ProbeSizes, probe

QUICK = Timing(guessed_flops_per_s=1e10, guessed_bytes_per_s=1e10, program_s=1e-9, runs=1)
TINY = ProbeSizes(
    matmuls=((8, 4, 16), (8, 8, 8)),
    dtypes=("f32", "bf16"),
    pass_bytes=(64,),
    message_bytes=(64, 256, 128),
    timing=QUICK,
    host_bytes=(32, 64),
)
REPEATS = 2
"""How often an operation is run under QUICK."""


@pytest.fixture
def programs(monkeypatch):
    """Compiled text and mesh of every program that is timed, and the program."""
    seen = []
    make = probe_programs._program

    def spy(mesh, on_device, donate=()):
        program = make(mesh, on_device, donate)

        def run(*operands):
            if not any(each is program for *_, each in seen):
                seen.append((program.lower(*operands).compile().as_text(), mesh, program))
            return program(*operands)

        return run

    monkeypatch.setattr(probe_programs, "_program", spy)
    return seen


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_matmul_runs_as_often_as_its_time_is_divided(programs, dtype):
    time = time_matmul(jax.devices(), QUICK, 8, 4, 16, dtype)
    ((text, _, _),) = programs
    (dot,) = hlo.matmuls(text)
    assert (dot.flops, dot.loops) == (2 * 8 * 4 * 16, (REPEATS,))
    assert (time.m, time.k, time.n, time.dtype) == (8, 4, 16, dtype)
    assert time.time_s > 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("axis_size", "stride"), [(2, 1), (2, 4), (4, 1), (4, 2), (8, 1)])
def test_a_collective_runs_in_its_groups(programs, kind, axis_size, stride):
    time = time_collective(jax.devices(), QUICK, kind, axis_size, stride, 256, "f32")
    ((text, mesh, _),) = programs
    (moved,) = {(each.kind, each.axes, each.loops) for each in hlo.collectives(text, mesh)}
    # XLA's CPU compiler has no reduce-scatter of its own.
    assert moved[0] in ({kind, ALL_REDUCE} if kind == REDUCE_SCATTER else {kind})
    assert moved[1:] == (("group",), (REPEATS,))
    # The all-to-all of one array is, on a CPU, one of its parts, which are cut out and put
    # together.
    assert kind == "all-to-all" or not re.search(r"= f32\[(?!\])[\d,]+\]\S* copy\(", text), (
        "what is copied is measured too"
    )
    ids = np.array([device.id for device in mesh.devices.flat]).reshape(mesh.devices.shape)
    assert (np.diff(ids, axis=1) == stride).all()
    assert ids.shape[1] == axis_size
    assert (time.kind, time.axis_size, time.stride, time.num_bytes) == (
        kind,
        axis_size,
        stride,
        256,
    )


@pytest.mark.parametrize("kind", KINDS)
def test_message_size_is_that_of_the_whole_array(programs, kind):
    """It is a device's result of an all-gather, or its operand of an all-reduce, rounded to equal
    shares of the devices.
    """
    time = time_collective(jax.devices()[:3], QUICK, kind, 3, 1, 100, "f32")
    assert time.num_bytes == 96, "24 float32 for three devices"
    ((text, mesh, _),) = programs
    sizes = sum(each.num_bytes for each in hlo.collectives(text, mesh))
    reduce_scatter = 96 // 3 if "reduce-scatter(" in text else 96
    assert sizes == (reduce_scatter if kind == REDUCE_SCATTER else 96)


@pytest.mark.parametrize("kind", KINDS)
def test_probe_collectives_compute_what_their_names_say(kind):
    """Against plain arithmetic on what each of four devices holds."""
    mesh = probe_programs._mesh(jax.devices()[:4], 4)
    local = np.arange(32.0, dtype=np.float32).reshape(4, 8)
    operand = jax.device_put(
        local, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(mesh.axis_names))
    )
    result = np.asarray(
        probe_programs._program(mesh, lambda x: probe_programs._COLLECTIVES[kind](x, 4))(operand)
    )
    expected = {
        "all-reduce": np.tile(local.sum(0), (4, 1)),
        "all-gather": np.tile(local.ravel(), (4, 1)),
        "reduce-scatter": local.sum(0).reshape(4, 2),
        "all-to-all": local.reshape(4, 4, 2).swapaxes(0, 1).reshape(4, 8),
        "collective-permute": np.roll(local, 1, axis=0),
    }
    np.testing.assert_array_equal(result, expected[kind])


def test_memory_pass_reads_and_writes_an_array(programs):
    time = time_pass(jax.devices(), QUICK, 4096)
    ((text, _, _),) = programs
    assert time.num_bytes == 2 * 4096
    assert "f32[1024]" in text
    assert "input_output_alias={ {0}: (0, {}, may-alias), {1}: (1, {}, may-alias) }" in text


def test_host_copies_run_both_ways_on_all_devices_at_once(monkeypatch):
    moved, put = [], jax.device_put

    def spy(arrays, targets, **options):
        moved.append(
            [
                (array.nbytes, getattr(array, "sharding", None), target)
                for array, target in zip(arrays, targets, strict=True)
            ]
        )
        return put(arrays, targets, **options)

    monkeypatch.setattr(jax, "device_put", spy)
    time = time_host_copy(jax.devices()[:2], QUICK, 4096)
    _, warm_up, timed = moved
    assert warm_up == timed
    assert sorted(
        (size, before.memory_kind, after.memory_kind, after.device_set.pop().id)
        for size, before, after in timed
    ) == [
        (4096, "device", "pinned_host", 0),
        (4096, "device", "pinned_host", 1),
        (4096, "pinned_host", "device", 0),
        (4096, "pinned_host", "device", 1),
    ]
    assert all(before.device_set == after.device_set for _, before, after in timed)
    assert (time.num_bytes, time.time_s > 0) == (4096, True)
    assert time.bytes_per_s == 4096 / time.time_s


def test_overlap_probe_runs_independent_matmuls_and_all_reduce(programs):
    matmul, all_reduce = (
        time_matmul(jax.devices(), QUICK, 8, 8, 8, "f32"),
        time_collective(jax.devices(), QUICK, ALL_REDUCE, 8, 1, 256, "f32"),
    )
    programs.clear()
    time_overlap(
        jax.devices(),
        QUICK,
        dataclasses.replace(matmul, time_s=1.0),
        dataclasses.replace(all_reduce, time_s=3.0),
    )
    counts = [
        (len(hlo.matmuls(text)), [each.num_bytes for each in hlo.collectives(text, mesh)])
        for text, mesh, _ in programs
    ]
    assert counts == [(3, []), (0, [256]), (3, [256])]


def test_repeats_fill_the_time_of_a_program():
    timing = Timing(guessed_flops_per_s=1e9, guessed_bytes_per_s=1e9, program_s=0.01, runs=1)
    assert timing.repeats(flops=1e6) == timing.repeats(num_bytes=1e6) == 10
    assert timing.repeats(flops=5e5, num_bytes=5e5) == 10
    assert timing.repeats(flops=1e12) == 2, (
        "with one repeat there is no loop, and XLA copies operands"
    )
    assert timing.repeats(flops=1.0) == 64


def test_every_probe_runs_once_for_every_axis_size():
    reported = []
    probed = probe(
        jax.devices()[:6],
        TINY,
        several_hosts=False,
        progress=lambda what, share: reported.append((what, share)),
    )
    assert [(each.m, each.k, each.n, each.dtype) for each in probed.matmuls] == [
        (8, 4, 16, "f32"),
        (8, 8, 8, "f32"),
        (8, 4, 16, "bf16"),
        (8, 8, 8, "bf16"),
    ]
    assert [each.num_bytes for each in probed.passes] == [128]
    assert [each.num_bytes for each in probed.host_copies] == [32, 64]
    axes = [(each.kind, each.axis_size, each.stride) for each in probed.collectives]
    assert sorted(axes) == sorted(
        (kind, size, 1) for kind in WIRE_SHARE for size in (2, 3, 6) for _ in TINY.message_bytes
    )
    assert probed.overlap is not None
    assert (probed.num_left_out, probed.launch_s > 0, probed.took_s > 0) == (0, True, True)
    shares = [share for _, share in reported]
    assert shares == sorted(shares)
    assert len(reported) == 1 + 4 + 1 + 2 + len(axes) + 1
    assert reported[0] == ("launch", 0.0)
    assert [what for what, _ in reported[1:5]] == [
        "pass over memory 64",
        "copies from and to the host 32",
        "copies from and to the host 64",
        "matmul 8 4 16 f32",
    ]


def test_host_copies_are_probed_only_on_gpus():
    assert ProbeSizes.of("gpu").host_bytes
    assert not ProbeSizes.of("cpu").host_bytes


def test_several_hosts_are_probed_along_strided_axes_too():
    found = list(probes._collectives(8, TINY, several_hosts=True))
    assert {(size, stride) for _, size, stride, _ in found} == {
        (2, 1),
        (2, 4),
        (4, 1),
        (4, 2),
        (8, 1),
    }
    assert len(found) == len(set(found))
    assert [kind for kind, *_ in found[:10]] == [ALL_REDUCE] * 10, (
        "first what says how fast each link is"
    )
    assert sorted(message for *_, message in found[:10]) == [64] * 5 + [256] * 5
    assert {message for *_, message in found[-25:]} == {128}, "smallest and largest first"


def test_one_device_has_no_collectives_to_probe():
    probed = probe(
        jax.devices()[:1], dataclasses.replace(TINY, dtypes=("f32",)), several_hosts=False
    )
    assert (probed.collectives, probed.overlap) == ((), None)
    assert len(probed.matmuls) == 2


def test_probes_left_out_over_budget_are_counted():
    probed = probe(jax.devices()[:2], dataclasses.replace(TINY, budget_s=-1.0), several_hosts=False)
    assert probed.num_left_out == 1 + 4 + 1 + 2 + 3 * len(KINDS) + 1
    assert (probed.launch_s, probed.matmuls, probed.overlap) == (None, (), None)


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_probe_sizes_suit_their_platform(platform):
    sizes = ProbeSizes.of(platform)
    assert sizes.dtypes[0] == ("f32" if platform == "cpu" else "bf16")
    assert any(k == n for _, k, n in sizes.matmuls)
    assert len(sizes.message_bytes) > 1
    assert sizes.budget_s < 120
    assert max(ProbeSizes.of("cpu", 2).message_bytes) < max(ProbeSizes.of("cpu").message_bytes), (
        "sockets are slow"
    )


def test_launch_time_is_measured_on_any_devices():
    assert time_launch(jax.devices()[2:4], QUICK) > 0
    assert ALL_GATHER in KINDS
