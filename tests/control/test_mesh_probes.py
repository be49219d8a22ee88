"""Probe programs run along their mesh axis on all devices, and the compute probe has no
collective.
"""

import hlo
import jax
import numpy as np
import pytest

from optimus_jax.config import ControlConfig
from optimus_jax.config.axes import MESH_AXES
from optimus_jax.control import mesh_probes
from optimus_jax.control.live import Probes, live_signals
from optimus_jax.control.mesh_probes import MeshProbes
from optimus_jax.mesh.topology import Topology
from optimus_jax.planning.profiles.cluster import Cluster

TWO_HOSTS = Cluster.of(
    Topology(
        num_devices=8,
        num_processes=2,
        num_hosts=2,
        platform="cpu",
        device_kind="cpu",
        bytes_per_device=None,
    )
)


def mesh_of(*sizes):
    return jax.make_mesh(
        sizes, MESH_AXES, devices=jax.devices(), axis_types=(jax.sharding.AxisType.Auto,) * 4
    )


@pytest.fixture
def programs(monkeypatch):
    """Compiled text and mesh of every program, in order."""
    seen = []
    compiled = mesh_probes._compiled

    def spy(mesh, operation, repeats, *each):
        lowered = []
        jit = jax.jit

        def watched(*args, **settings):
            lowered.append(jit(*args, **settings))
            return lowered[-1]

        with monkeypatch.context() as patched:
            patched.setattr(jax, "jit", watched)
            program = compiled(mesh, operation, repeats, *each)
        shapes = [jax.ShapeDtypeStruct((mesh.size, *one.shape), one.dtype) for one in each]
        seen.append((lowered[0].lower(*shapes).compile().as_text(), mesh))
        return program

    monkeypatch.setattr(mesh_probes, "_compiled", spy)
    return seen


@pytest.mark.parametrize(
    ("sizes", "axis"),
    [
        ((1, 8, 1, 1), "data"),
        ((2, 2, 1, 2), "pipe"),
        ((2, 2, 1, 2), "data"),
        ((2, 2, 1, 2), "tensor"),
        ((1, 1, 4, 2), "fsdp"),
    ],
)
def test_an_all_reduce_probe_has_its_axis_and_message_size(programs, sizes, axis):
    probes = MeshProbes(mesh_of(*sizes))
    for num_bytes in probes.messages:
        assert probes.time_s(axis, num_bytes) > 0
        ((text, mesh),) = programs
        (moved,) = hlo.collectives(text, mesh)
        assert (moved.kind, moved.axes, moved.num_bytes) == ("all-reduce", (axis,), num_bytes)
        programs.clear()
    work = probes.work(axis, probes.messages[1])
    ids = np.moveaxis(np.arange(8).reshape(sizes), MESH_AXES.index(axis), -1)
    assert (work.axis_size, work.stride) == (ids.shape[-1], ids.flat[1] - ids.flat[0])


def test_only_axes_of_several_devices_are_probed():
    assert MeshProbes(mesh_of(2, 1, 4, 1)).axes == ["pipe", "fsdp"]


def test_the_compute_probe_is_a_matmul_on_each_device(programs):
    probes = MeshProbes(mesh_of(1, 8, 1, 1))
    assert probes.compute_time_s() > 0
    ((text, mesh),) = programs
    (dot,) = hlo.matmuls(text)
    work = probes.compute
    assert dot.flops == 2 * work.m * work.k * work.k
    assert mesh.size == 8
    assert not hlo.collectives(text, mesh)


def test_each_probe_is_compiled_once(programs):
    probes = MeshProbes(mesh_of(1, 4, 1, 2))
    probes.compile()
    assert len(programs) == 2 * len(probes.messages) + 1
    for axis in ("data", "tensor"):
        probes.time_s(axis, probes.messages[0])
    probes.compute_time_s()
    assert len(programs) == 2 * len(probes.messages) + 1


def test_devices_outside_the_mesh_are_timed_alone_and_without_collectives(programs):
    *used, spare, lost = jax.devices()[:6]
    mesh = jax.make_mesh(
        (1, 4, 1, 1), MESH_AXES, devices=used, axis_types=(jax.sharding.AxisType.Auto,) * 4
    )
    probes = MeshProbes(mesh, [spare, lost])
    probes.compile()
    num_programs = len(programs)
    ratios = probes.outside_ratios({lost.id})
    assert ratios.keys() == {spare.id}
    assert ratios[spare.id] > 0
    assert len(programs) == num_programs, "all were compiled before"
    alone = [(text, mesh) for text, mesh in programs if mesh.size == 1]
    assert {mesh.devices.flat[0] for _, mesh in alone} == {spare, lost, *used[:3]}
    assert not any(hlo.collectives(text, mesh) for text, mesh in alone)
    assert MeshProbes(mesh).outside_ratios(set()) == {}


def test_a_device_that_takes_twice_as_long_has_a_ratio_of_two(monkeypatch):
    *used, spare = jax.devices()[:5]
    mesh = jax.make_mesh(
        (1, 4, 1, 1), MESH_AXES, devices=used, axis_types=(jax.sharding.AxisType.Auto,) * 4
    )
    probes = MeshProbes(mesh, [spare])
    monkeypatch.setattr(probes, "_chain", lambda devices: devices[0])
    seconds = {spare: 2.0, used[0]: 1.0, used[1]: 7.0, used[2]: 1.0}
    monkeypatch.setattr(probes, "_seconds", seconds.__getitem__)
    assert probes.outside_ratios(set()) == {spare.id: 2.0}


def test_the_probes_of_a_smaller_mesh_measure_the_devices_outside_it():
    probes = Probes(
        0.01,
        TWO_HOSTS,
        None,
        num_meshes=2,
        devices=jax.devices(),
        lost=lambda: frozenset({jax.devices()[7].id}),
        warn=print,
    )
    assert "process_time/6" not in probes.on(mesh_of(1, 2, 1, 4)).run(5, step_time_s=0.1)
    smaller = jax.make_mesh(
        (1, 6, 1, 1),
        MESH_AXES,
        devices=jax.devices()[:6],
        axis_types=(jax.sharding.AxisType.Auto,) * 4,
    )
    samples = probes.on(smaller).run(9, step_time_s=0.1)
    outside = {name for name in samples if name.startswith("process_time/")}
    assert outside == {f"process_time/{jax.devices()[6].id}"}


def test_probe_time_is_the_shortest_repeat():
    times = iter([0.0, 9.0, 10.0, 12.0, 20.0, 25.0, 30.0, 33.0, 40.0, 44.0])
    probes = MeshProbes(mesh_of(1, 8, 1, 1), clock=lambda: next(times))
    assert probes.time_s("data", probes.messages[0]) == 2.0


def test_probe_rounds_map_axes_to_links_and_reuse_compiled_probes(programs):
    probes = Probes(0.01, TWO_HOSTS, None, num_meshes=2, warn=print)
    samples = probes.on(mesh_of(1, 2, 1, 4)).run(5, step_time_s=0.1)
    assert samples["link_slowdown/inter_host"] == samples["link_slowdown/data"] > 0
    assert samples["link_slowdown/intra_host"] == samples["link_slowdown/tensor"] > 0
    assert samples["compute_slowdown"] > 0
    num_programs = len(programs)
    probes.on(mesh_of(1, 2, 1, 4))
    assert len(programs) == num_programs
    assert probes.on(mesh_of(1, 1, 1, 8)).run(9, step_time_s=0.1).keys() >= {
        "link_slowdown/inter_host",
        "link_slowdown/tensor",
    }


def test_a_probe_share_of_zero_compiles_nothing(programs):
    probes = Probes(0.0, TWO_HOSTS, None, num_meshes=2, warn=print)
    probes.prepare(mesh_of(1, 8, 1, 1))
    assert probes.on(mesh_of(1, 8, 1, 1)) is None
    assert not programs


def test_on_cpus_the_missing_device_memory_signal_is_reported(tmp_path):
    warnings = []
    signals = live_signals(
        ControlConfig(),
        global_batch=8,
        seq_len=16,
        rounds=None,
        heartbeats=None,
        warn=warnings.append,
    )
    signals.observe(1)
    signals.close()
    assert signals.missing == {"device memory": "the devices do not say how much memory is in use"}
    assert not warnings
