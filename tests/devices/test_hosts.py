"""Hosts are told apart by machine and network (several processes:
tests/planning/test_hardware.py)."""

from optimus_jax.devices import hosts
from optimus_jax.devices.hosts import count_hosts


def test_one_process_is_on_one_host():
    assert count_hosts() == 1


def test_host_is_identified_by_boot_id_and_network(monkeypatch, tmp_path):
    boot_id, network = tmp_path / "boot_id", tmp_path / "net"
    monkeypatch.setattr(hosts, "_BOOT_ID", boot_id)
    monkeypatch.setattr(hosts, "_NETWORK", network)
    assert hosts._host() == hosts._host() != ""  # not Linux: neither is there
    boot_id.write_text("4e2a\n")
    network.symlink_to("net:[1]")
    assert hosts._host() == "4e2a net:[1]"
    network.unlink()
    network.symlink_to("net:[2]")
    assert hosts._host() == "4e2a net:[2]"
