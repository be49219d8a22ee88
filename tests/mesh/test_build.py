"""Finding devices and making meshes of them."""

import os

import pytest

from optimus_jax.errors import PlanError
from optimus_jax.mesh.axes import AxisSizes
from optimus_jax.mesh.build import GPU_MEMORY_SHARE, discover
from optimus_jax.plan import check_devices

FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"


def test_the_devices_of_the_tests():
    found = discover()
    assert (found.num_devices, found.num_processes, found.num_hosts, found.platform) == (8, 1, 1, "cpu")


def test_gpus_may_be_used_almost_whole_unless_the_user_says_otherwise(monkeypatch):
    monkeypatch.delenv(FRACTION, raising=False)
    discover()
    assert os.environ[FRACTION] == GPU_MEMORY_SHARE
    monkeypatch.setenv(FRACTION, "0.5")
    discover()
    assert os.environ[FRACTION] == "0.5"


def test_a_mesh_uses_all_devices():
    check_devices(AxisSizes(data=8), 8)
    with pytest.raises(PlanError, match="needs 4 devices; this run has 8"):
        check_devices(AxisSizes(data=4), 8)
