"""Silence of other processes is measured on the reader's clock, between reads; a process whose file
never changes is unknown.
"""

from dataclasses import replace

import pytest

from optimus_jax.errors import RunDirectoryError
from optimus_jax.faults.heartbeat import HEARTBEAT_S, MAX_GAP_S, MAX_WATCHED, Heartbeats, Peer
from optimus_jax.faults.progress import Progress


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def pair(tmp_path):
    (tmp_path / "progress").mkdir()
    clock = Clock()
    return clock, [
        Heartbeats(tmp_path, number, 2, Progress(clock), clock=clock) for number in range(2)
    ]


def other(heartbeats):
    (peer,) = heartbeats.peers
    return peer


def test_silence_is_the_age_of_the_newest_heartbeat(pair):
    clock, (first, second) = pair
    first.beat()
    assert other(first) == Peer(process=1, is_known=False, silent_s=0.0)
    second._progress.begin("step")
    second._progress.enter(7)
    second.beat()
    clock.now += 3
    first.beat()
    seen = other(first)
    assert (seen.is_known, seen.silent_s, seen.doing, seen.entered, seen.state) == (
        True,
        0.0,
        "step",
        7,
        "running",
    )
    clock.now += HEARTBEAT_S
    assert other(first).silent_s == 0.0, "nobody has looked since"
    for _ in range(39):
        first.beat()
        clock.now += HEARTBEAT_S
    first.beat()
    assert other(first) == replace(seen, silent_s=40.0)


def test_a_heartbeat_file_of_an_earlier_start_is_ignored(pair):
    clock, (first, second) = pair
    second.end("failed", "long ago")
    for _ in range(3):
        clock.now += 100
        first.beat()
    assert not other(first).is_known
    assert other(first).state == "running"


def test_the_first_end_state_is_kept(pair):
    _, (first, second) = pair
    first.beat()
    second.end("failed", "the disk is full")
    second.end("done")
    second.beat()
    first.beat()
    assert (other(first).state, other(first).why) == ("failed", "the disk is full")


def test_silence_does_not_grow_while_files_cannot_be_read(pair, monkeypatch):
    clock, (first, second) = pair
    first.beat()
    second.beat()
    first.beat()
    file = first._path(1)
    second_text = file.read_text()
    file.unlink()
    file.mkdir()  # reading is now an OSError other than a missing file
    clock.now += 1000
    first.beat()
    assert other(first).silent_s == 0.0
    file.rmdir()
    file.write_text(second_text)
    first.beat()
    assert other(first).silent_s <= MAX_GAP_S, (
        "it could not be written either, and is looked at before the other has"
    )


def test_silence_does_not_grow_while_reading_hangs(pair):
    """As with a hard NFS mount while its server is unreachable."""
    clock, (first, second) = pair
    first.beat()
    second.beat()
    first.beat()
    clock.now += 1000  # in the middle of a read
    first.beat()
    assert other(first).silent_s <= MAX_GAP_S
    for _ in range(20):
        clock.now += HEARTBEAT_S
        first.beat()
    assert other(first).silent_s == pytest.approx(20 * HEARTBEAT_S, abs=MAX_GAP_S), (
        "from then on it does"
    )


def test_a_process_that_cannot_write_its_first_heartbeat_does_not_start(pair, tmp_path):
    _, (first, _) = pair
    (tmp_path / "progress" / "0.json").mkdir()
    with pytest.raises(
        RunDirectoryError,
        match=r"0\.json of the run is a folder, where a file should be(.|\n)*do: ",
    ):
        first.start()
    assert not first._thread.is_alive()


def test_only_the_first_of_consecutive_write_failures_is_reported(tmp_path, capfd):
    heartbeats, place = Heartbeats(tmp_path, 0, 2, Progress()), tmp_path / "progress"
    heartbeats.start()
    heartbeats.close()
    (file,) = place.iterdir()
    for _ in range(2):
        file.unlink()
        file.mkdir()
        heartbeats.beat()
        heartbeats.end("failed", "why")
        printed = capfd.readouterr().err
        assert (
            printed.count("warning: "),
            f"no heartbeat can be written to {file}: Is a directory" in printed,
        ) == (1, True)
        file.rmdir()
        heartbeats.beat()
        assert capfd.readouterr().err == ""


def test_in_large_runs_each_process_watches_the_next_ones_and_the_first(tmp_path):
    heartbeats = Heartbeats(tmp_path, 990, 1000, Progress())
    heartbeats.beat()
    assert [peer.process for peer in heartbeats.peers] == sorted(
        [*range(991, 1000), *range(MAX_WATCHED - 9)]
    )
