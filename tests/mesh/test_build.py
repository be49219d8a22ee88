"""Finding devices and making meshes of them."""

import os

import pytest

from optimus_jax.config.axes import AxisSizes, check_devices
from optimus_jax.devices.backend import GPU_MEMORY_SHARE, HOST_MEMORY_SHARE, gpu_memory_share
from optimus_jax.errors import PlanError
from optimus_jax.mesh.build import discover

NEWER_FRACTION, FRACTION, HOST_LIMIT_GIB = (
    "XLA_CLIENT_MEM_FRACTION",
    "XLA_PYTHON_CLIENT_MEM_FRACTION",
    "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB",
)


def test_discover_finds_the_eight_cpu_devices():
    found = discover()
    assert (found.num_devices, found.num_processes, found.num_hosts, found.platform) == (
        8,
        1,
        1,
        "cpu",
    )


def test_gpu_memory_fraction_is_raised_unless_the_user_set_it(monkeypatch):
    monkeypatch.delenv(NEWER_FRACTION, raising=False)
    monkeypatch.delenv(FRACTION, raising=False)
    discover()
    assert os.environ[FRACTION] == GPU_MEMORY_SHARE
    monkeypatch.setenv(FRACTION, "0.5")
    discover()
    assert os.environ[FRACTION] == "0.5"


def test_initialized_gpu_keeps_its_memory_limits_with_a_warning(monkeypatch):
    for name in (NEWER_FRACTION, FRACTION, HOST_LIMIT_GIB):
        monkeypatch.setenv(name, "")  # so that what is set here is undone
        monkeypatch.delenv(name)
    monkeypatch.setattr("jax.default_backend", lambda: "gpu")
    monkeypatch.setattr("optimus_jax.devices.backend.backends_are_initialized", lambda: True)
    with pytest.warns(UserWarning, match=f"75% of a GPU instead of 92%: set {NEWER_FRACTION}=0.92"):
        discover()
    assert (gpu_memory_share(), os.environ[HOST_LIMIT_GIB]) == (0.75, "64")
    discover()  # a second run in this process: warned of once


def test_older_fraction_variable_is_not_set_beside_the_newer_one(monkeypatch):
    monkeypatch.delenv(FRACTION, raising=False)
    monkeypatch.setenv(NEWER_FRACTION, "0.5")
    discover()
    assert FRACTION not in os.environ


def test_host_memory_limit_is_raised_unless_the_user_set_it(monkeypatch):
    monkeypatch.delenv(HOST_LIMIT_GIB, raising=False)
    host_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    share = discover().host_bytes_per_device
    assert share == int(os.environ[HOST_LIMIT_GIB]) * 2**30 // 8
    assert 0.7 * host_bytes < 8 * share <= HOST_MEMORY_SHARE * host_bytes
    monkeypatch.setenv(HOST_LIMIT_GIB, "1")
    assert discover().host_bytes_per_device == 2**30 // 8
    monkeypatch.setenv(HOST_LIMIT_GIB, "1000000")
    assert discover().host_bytes_per_device == int(HOST_MEMORY_SHARE * host_bytes / 8)


@pytest.mark.parametrize(
    ("reported", "capability"), [("9.0", (9, 0)), ("10.3", (10, 3)), ("gfx942", None), (None, None)]
)
def test_compute_capability_is_read_from_the_driver(reported, capability, monkeypatch):
    class Device:
        process_index, platform, device_kind = 0, "gpu", "some GPU"

    if reported is not None:
        monkeypatch.setattr(Device, "compute_capability", reported, raising=False)
    monkeypatch.setattr("optimus_jax.mesh.build.devices_by_host", lambda: [Device()])
    assert discover().compute_capability == capability


def test_mesh_has_to_use_all_devices():
    check_devices(AxisSizes(data=8), 8)
    with pytest.raises(PlanError, match="needs 4 devices; this run has 8"):
        check_devices(AxisSizes(data=4), 8)
