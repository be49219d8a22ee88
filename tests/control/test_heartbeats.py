"""The age of the oldest heartbeat."""

import pytest
from signal_fakes import FakeClock

from optimus_jax.control.heartbeats import HeartbeatAges
from optimus_jax.faults.heartbeat import Heartbeats
from optimus_jax.faults.progress import Progress


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def three(tmp_path, clock):
    return [Heartbeats(tmp_path, process, 3, Progress(clock), clock=clock) for process in range(3)]


def beat(*processes):
    for process in processes:
        process._directory.mkdir(exist_ok=True)
        process.beat()


def test_the_age_is_that_of_the_oldest_other_process(three, clock):
    source = HeartbeatAges(three[0])
    beat(three[1], three[2], three[0])
    beat(three[1], three[2], three[0])
    assert source.poll(1, 0.0) == {"heartbeat_age_s": 0.0}
    for _ in range(30):
        clock.now_s += 1.0
        beat(three[2], three[0])
    assert source.poll(2, 0.0) == {"heartbeat_age_s": 30.0}
    clock.now_s += 2.0
    beat(three[1], three[0])
    assert source.poll(3, 0.0) == {"heartbeat_age_s": 2.0}


def test_processes_never_seen_or_finished_have_no_age(three, clock):
    source = HeartbeatAges(three[0])
    beat(three[0])
    clock.now_s += 30.0
    beat(three[0])
    assert source.poll(1, 0.0) == {}
    beat(three[1], three[0])
    beat(three[1], three[0])
    three[1].end("done")
    clock.now_s += 30.0
    beat(three[0])
    assert source.poll(2, 0.0) == {}


def test_a_single_process_has_no_heartbeat_age():
    assert HeartbeatAges(None).poll(1, 0.0) == {}
