"""Every listed accelerator has a host, whose links are published or unknown."""

import pytest

from optimus_jax.devices.accelerators import ACCELERATORS
from optimus_jax.planning.profiles.hardware_database import HOSTS, NETWORK, UNKNOWN_HOST, host_of

OWN_LINK_BYTES_PER_S = {
    "a100": 300e9,
    "a100-40gb": 300e9,
    "h100": 450e9,
    "h200": 450e9,
    "b200": 900e9,
    "gb200": 900e9,
    "gb300": 900e9,
    "mi300x": 448e9,
    "v100": 150e9,
    "v100-16gb": 150e9,
    "v100-sxm3": 150e9,
    "v100-sxm3-h": 150e9,
}


def test_every_listed_accelerator_has_a_host():
    assert set(HOSTS) == {each.name for each in ACCELERATORS}


@pytest.mark.parametrize("name", HOSTS)
def test_links_have_a_source_or_are_unknown(name):
    for link in (host_of(name).intra_host, host_of(name).inter_host):
        assert (link.bytes_per_s is None) == (link.source == "unknown")
        assert link.latency_s is None, "nobody publishes one"


@pytest.mark.parametrize("name", HOSTS)
def test_link_speeds_are_per_direction(name):
    """Data sheets print both directions together: 600 GB/s for A100, 64 GB/s for PCIe 4."""
    intra_host = host_of(name).intra_host
    if name in OWN_LINK_BYTES_PER_S:
        assert intra_host.name.startswith(("NVLink", "Infinity Fabric"))
        assert intra_host.bytes_per_s == OWN_LINK_BYTES_PER_S[name]
    elif name != "cpu":
        assert intra_host.name.startswith("PCIe")
        assert intra_host.bytes_per_s in (31.5e9, 63e9)


def test_only_nvidia_hosts_have_a_known_network_speed():
    known = {name for name in HOSTS if host_of(name).inter_host is not NETWORK}
    assert known == set(OWN_LINK_BYTES_PER_S) - {"mi300x"}
    assert host_of("a100").inter_host.bytes_per_s * 8 == 200e9
    assert host_of("h100").inter_host.bytes_per_s * 8 == 400e9


def test_an_unlisted_accelerator_has_unknown_links():
    assert host_of("somebody's accelerator") is UNKNOWN_HOST
    assert UNKNOWN_HOST.intra_host.bytes_per_s is None
