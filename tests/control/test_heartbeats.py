"""Processes that share a directory see one another's age by the file system's clock."""

import json
import os

import pytest
from signal_fakes import at_once

from optimus_jax.control.heartbeats import DIRECTORY, Heartbeats


class Host:
    """One process and what its host takes the time to be; files get the time that the test's file server has."""

    def __init__(self, directory, process, num_processes, *, ahead_s=0.0):
        self.server_s = 5000.0
        self.heartbeats = Heartbeats(directory, process, num_processes, wall_clock=lambda: self.server_s + ahead_s, start=at_once)

    def poll(self, step, server_s):
        self.server_s = server_s
        return self.heartbeats.poll(step, 0.0)


@pytest.fixture
def server(monkeypatch):
    """Sets the time that the file server gives to what is written from now on."""
    now = [5000.0]
    replace = os.replace

    def stamped(source, target):
        os.utime(source, (now[0], now[0]))
        replace(source, target)

    monkeypatch.setattr(os, "replace", stamped)
    return now


def poll(server, host, step, at_s):
    server[0] = at_s
    return host.poll(step, at_s)


def test_the_oldest_of_the_others_counts(tmp_path, server):
    hosts = [Host(tmp_path, process, 3) for process in range(3)]
    poll(server, hosts[1], 7, 5000.0)
    poll(server, hosts[2], 9, 5020.0)
    assert poll(server, hosts[0], 9, 5030.0) == {"heartbeat_age_s": 30.0}
    assert [(each.process, each.age_s, each.step) for each in hosts[0].heartbeats.others] == [(1, 30.0, 7), (2, 10.0, 9)]
    poll(server, hosts[1], 10, 5031.0)
    assert poll(server, hosts[0], 10, 5032.0) == {"heartbeat_age_s": 12.0}


def test_a_clock_that_is_ahead_makes_nobody_old_and_is_noted(tmp_path, server):
    fast, right = Host(tmp_path, 1, 2, ahead_s=3600.0), Host(tmp_path, 0, 2)
    poll(server, fast, 1, 5000.0)
    assert poll(server, right, 1, 5001.0) == {"heartbeat_age_s": 1.0}
    assert right.heartbeats.others[0].clock_skew_s == pytest.approx(3600.0)
    assert poll(server, fast, 2, 5002.0) == {"heartbeat_age_s": 1.0}
    assert fast.heartbeats.others[0].clock_skew_s == pytest.approx(-3600.0)


def test_who_never_writes_ages_from_when_we_began_to_look(tmp_path, server):
    host = Host(tmp_path, 0, 2)
    assert poll(server, host, 1, 5000.0) == {"heartbeat_age_s": 0.0}
    assert poll(server, host, 2, 5040.0) == {"heartbeat_age_s": 40.0}
    assert host.heartbeats.others[0].step is None


def test_a_single_process_beats_for_those_who_watch_from_outside(tmp_path):
    host = Host(tmp_path, 0, 1)
    assert [host.poll(step, 5000.0) for step in (12, 13)] == [{}, {}]
    assert json.loads((tmp_path / DIRECTORY / "0.json").read_text())["step"] == 13


def test_a_directory_that_cannot_be_written_is_an_error_for_the_guard(tmp_path):
    with pytest.raises(FileNotFoundError):
        Heartbeats(tmp_path / "gone", 0, 2, start=at_once).poll(1, 0.0)
