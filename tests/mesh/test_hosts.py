"""Machines are told apart by what all their containers share (several processes: tests/planning/test_hardware.py)."""

from optimus_jax.mesh import hosts
from optimus_jax.mesh.hosts import count_hosts


def test_one_process_is_on_one_host():
    assert count_hosts() == 1


def test_a_machine_has_a_name_of_its_own_without_linux(monkeypatch, tmp_path):
    monkeypatch.setattr(hosts, "_BOOT_ID", tmp_path / "not there")
    assert hosts._machine() == hosts._machine() != ""
    (tmp_path / "not there").write_text("4e2a")
    assert hosts._machine() == "4e2a"
