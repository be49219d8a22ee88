"""Clusters read from text, and which hosts a mesh axis crosses on them."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from optimus_jax.config.axes import DATA, FSDP, MESH_AXES, PIPE, TENSOR, AxisSizes
from optimus_jax.errors import ConfigError, PlanError
from optimus_jax.mesh.topology import Topology
from optimus_jax.planning.profiles.cluster import Cluster

H100S = Cluster.parse("h100:8x8")
SIZES = st.sampled_from((1, 2, 3, 4, 6, 8))
GROUPS = st.sets(st.sampled_from(MESH_AXES), min_size=1).map(
    lambda names: tuple(name for name in MESH_AXES if name in names)
)


@st.composite
def meshes_on_hosts(draw):
    """Axis sizes, and devices per host: dividing the mesh or not."""
    axes = AxisSizes(pipe=draw(SIZES), data=draw(SIZES), fsdp=draw(SIZES), tensor=draw(SIZES))
    assume(axes.num_devices <= 1024)
    devices_per_host = draw(
        st.one_of(st.sampled_from((1, 2, 3, 4, 6, 8, 16)), st.integers(1, axes.num_devices))
    )
    return axes, replace(
        H100S, num_hosts=-(-axes.num_devices // devices_per_host), devices_per_host=devices_per_host
    )


def hosts_of_groups(axes, names, devices_per_host):
    """The host of every member of every group, by counting devices one after the other."""
    groups = {}
    places = itertools.product(*(range(axes[name]) for name in MESH_AXES))
    for device, place in enumerate(places):
        others = tuple(at for at, name in zip(place, MESH_AXES, strict=True) if name not in names)
        groups.setdefault(others, []).append(device // devices_per_host)
    return list(groups.values())


@given(meshes_on_hosts(), GROUPS)
def test_hosts_crossed_is_the_maximum_over_groups(mesh, names):
    axes, cluster = mesh
    groups = hosts_of_groups(axes, names, cluster.devices_per_host)
    assert cluster.hosts_crossed(axes, names) == max(len(set(hosts)) for hosts in groups)


@given(meshes_on_hosts(), st.sampled_from(MESH_AXES))
def test_link_of_an_axis_is_the_slowest_that_its_groups_use(mesh, axis):
    axes, cluster = mesh
    groups = hosts_of_groups(axes, (axis,), cluster.devices_per_host)
    leaves, stays = (
        any(len(set(hosts)) > 1 for hosts in groups),
        any(len(set(hosts)) < len(hosts) for hosts in groups),
    )
    slow_intra_host = replace(cluster, intra_host=replace(cluster.intra_host, bytes_per_s=1.0))
    assert cluster.link_of(axes, axis) is (cluster.inter_host if leaves else cluster.intra_host)
    assert slow_intra_host.link_of(axes, axis) is (
        slow_intra_host.intra_host if stays or not leaves else slow_intra_host.inter_host
    )


@given(meshes_on_hosts(), st.sampled_from(MESH_AXES))
def test_axis_whose_span_divides_the_host_stays_inside_it(mesh, axis):
    """An axis stays on a host exactly if stride times size divides the host's devices, if there is
    only one host, or if the axis has one device.
    """
    axes, cluster = mesh
    span = axes[axis]
    for faster in MESH_AXES[MESH_AXES.index(axis) + 1 :]:
        span *= axes[faster]
    intra_host = (
        axes[axis] == 1
        or axes.num_devices <= cluster.devices_per_host
        or cluster.devices_per_host % span == 0
    )
    assert (cluster.hosts_crossed(axes, (axis,)) == 1) == intra_host


def test_tensor_is_intra_host_and_data_inter_host_on_8x8():
    axes = AxisSizes(data=2, fsdp=4, tensor=8)
    assert H100S.link_of(axes, TENSOR).name == H100S.link_of(axes, PIPE).name == "NVLink 4"
    assert H100S.link_of(axes, FSDP).name == H100S.link_of(axes, DATA).name == "InfiniBand NDR 400"
    assert [
        H100S.hosts_crossed(axes, names)
        for names in ((TENSOR,), (FSDP,), (DATA,), (DATA, FSDP), MESH_AXES)
    ] == [1, 4, 2, 8, 8]


def test_a_link_of_unknown_speed_counts_as_the_slowest():
    cluster = Cluster.parse("l40s:2x8")
    assert cluster.link_of(AxisSizes(data=16), DATA) is cluster.inter_host
    assert cluster.inter_host.bytes_per_s is None
    assert (
        cluster.with_links(["between=400Gb/s"]).link_of(AxisSizes(data=16), DATA).name
        == "PCIe 4 x16"
    )


def test_a_mesh_larger_than_the_cluster_is_refused():
    with pytest.raises(PlanError, match="128 devices, the cluster 64"):
        H100S.hosts_crossed(AxisSizes(data=128), (DATA,))


@pytest.mark.parametrize(
    ("text", "num_hosts", "devices_per_host"),
    [("h100:8x8", 8, 8), ("h100:8", 1, 8), (" H100 : 128x4 ", 128, 4), ("cpu:1x8", 1, 8)],
)
def test_cluster_text_is_hosts_times_devices(text, num_hosts, devices_per_host):
    cluster = Cluster.parse(text)
    assert (cluster.num_hosts, cluster.devices_per_host, cluster.num_devices) == (
        num_hosts,
        devices_per_host,
        num_hosts * devices_per_host,
    )
    assert (cluster.inter_host is None) == (num_hosts == 1)


@pytest.mark.parametrize(
    "text", ["h100", "h100:", "h100:0x8", "h100:8x", "h100:8x8x8", "h100:-8", "h100:8 x 8"]
)
def test_malformed_shape_is_refused_with_an_example(text):
    with pytest.raises(ConfigError, match="h100:2x8"):
        Cluster.parse(text)


@pytest.mark.parametrize("text", ["h10:8", ":8", ""])
def test_unknown_accelerator_is_refused_with_a_suggestion(text):
    with pytest.raises(ConfigError, match=r"did you mean|choose one of"):
        Cluster.parse(text)


def test_link_speeds_can_be_given():
    cluster = Cluster.parse("h100:8x8", ["inter_host=100Gb/s,5us", "intra-host=3us"])
    assert (cluster.inter_host.bytes_per_s, cluster.inter_host.latency_s) == (12.5e9, 5e-6)
    assert (cluster.intra_host.bytes_per_s, cluster.intra_host.latency_s) == (450e9, 3e-6)
    assert (
        str(cluster)
        == "64 x h100, NVLink 4 (450 GB/s, 3 us); 8 hosts, given link (12.5 GB/s, 5 us)"
    )


def test_old_names_of_links_are_still_read():
    links = ["between=100Gb/s,5us", "inside=3us"]
    new = [link.replace("between", "inter_host").replace("inside", "intra_host") for link in links]
    assert H100S.with_links(links) == H100S.with_links(new) != H100S


@pytest.mark.parametrize(
    ("shape", "link", "says"),
    [
        ("8x8", "inter_hst=50GB/s", "did you mean 'inter_host'"),
        ("8x8", "50GB/s", "choose one of: intra_host, inter_host"),
        ("8", "between=50GB/s", "more hosts"),
        ("8x8", "between=fast", "400Gb/s"),
    ],
)
def test_malformed_link_is_refused(shape, link, says):
    with pytest.raises(ConfigError, match=says):
        Cluster.parse(f"h100:{shape}", [link])


def test_link_given_twice_is_refused():
    with pytest.raises(ConfigError, match="'intra_host' once"):
        H100S.with_links(["inside=50GB/s", "intra_host=5us"])


def test_cluster_survives_conversion_to_a_topology():
    topology = H100S.topology()
    assert (topology.num_devices, topology.num_hosts, topology.device_kind) == (
        64,
        8,
        "NVIDIA H100 80GB HBM3",
    )
    assert Cluster.of(topology) == H100S


def test_cluster_of_a_topology_has_the_memory_that_jax_may_use():
    topology = Topology(
        num_devices=16,
        num_processes=16,
        num_hosts=2,
        platform="gpu",
        device_kind="NVIDIA H100 80GB HBM3",
        bytes_per_device=60 * 10**9,
    )
    cluster = Cluster.of(topology)
    assert (cluster.num_hosts, cluster.devices_per_host, cluster.accelerator.memory_bytes) == (
        2,
        8,
        60 * 10**9,
    )
    assert cluster.accelerator.dense_peak_flops == H100S.accelerator.dense_peak_flops
    assert Cluster.of(replace(topology, num_hosts=None)).num_hosts == 16


def test_unlisted_device_has_a_name_and_no_known_speeds():
    topology = Topology(
        num_devices=4,
        num_processes=1,
        platform="gpu",
        device_kind="A New One",
        bytes_per_device=None,
        compute_capability=(11, 0),
    )
    cluster = Cluster.of(topology)
    assert (
        cluster.accelerator.dense_peak_flops
        is cluster.accelerator.memory_bytes
        is cluster.intra_host.bytes_per_s
        is cluster.inter_host
        is None
    )
    assert cluster.accelerator.name == "A New One"
    assert cluster.topology().compute_capability == (11, 0), "but for what it can do"


def test_hosts_with_different_numbers_of_devices_are_refused():
    with pytest.raises(ConfigError, match="6 devices on 4 hosts"):
        Cluster.of(
            Topology(
                num_devices=6,
                num_processes=4,
                platform="cpu",
                device_kind="cpu",
                bytes_per_device=None,
            )
        )
