"""What counts as a fault, on a clock that only the test moves; and how a process ends for one."""

import contextlib
import faulthandler
import json
import os
import signal
import threading
from types import SimpleNamespace

import pytest
from test_progress import Clock, record

from optimus_jax.config import FaultConfig
from optimus_jax.config.running import LEAST_SILENCE_S
from optimus_jax.errors import ConfigError, FaultError
from optimus_jax.faults.heartbeat import Heartbeats, Peer
from optimus_jax.faults.progress import Progress
from optimus_jax.faults.stopping import TERMINATING
from optimus_jax.faults.watchdog import (
    FACTOR,
    MIN_DURATIONS,
    PEER_FAILURE_WAIT_S,
    Limits,
    Watchdog,
    late_processes,
)
from optimus_jax.system import resilient_io
from optimus_jax.system.resilient_io import nonblocking_stderr

SETTINGS = FaultConfig(floor_s=10, ceiling_s=100, start_s=1000, silence_s=30, stop_s=5)


@pytest.fixture
def clock():
    return Clock()


def watchdog(clock, tmp_path, peers=None, **more):
    """Of a process that is at step 1 of its first steps, beside others if peers are given."""
    progress = Progress(clock)
    progress.begin("step")
    heartbeats = (
        None if peers is None else SimpleNamespace(peers=peers, process=0, end=lambda *_: None)
    )
    return progress, Watchdog(
        tmp_path, progress, SETTINGS, heartbeats=heartbeats, clock=clock, **more
    )


def passed(watchdog, clock, seconds):
    """What is wrong after so long, looked at every second."""
    for _ in range(round(seconds)):
        clock.now += 1
        if (why := watchdog.trouble(clock.now)) is not None:
            return why
    return None


def steps(progress, clock, times_s):
    for step, step_time_s in enumerate(times_s, progress.at.done + 1):
        progress.enter(step)
        clock.now += step_time_s
        progress.step(record(step, step_time_s))


def test_busy_hosts_are_not_taken_for_lost_ones():
    FaultConfig(silence_s=LEAST_SILENCE_S)
    with pytest.raises(ConfigError, match=r"faults\.silence_s=1\n.*choose 5 or more"):
        FaultConfig(silence_s=1.0)


def test_limits_are_made_from_what_was_usual():
    clock = Clock()
    progress = Progress(clock)
    limits = Limits(SETTINGS, progress)
    steps(progress, clock, [3.0] * (MIN_DURATIONS - 1))
    assert limits.of("step") == SETTINGS.ceiling_s, "too few are known"
    steps(progress, clock, [3.0] * 8 + [500.0])
    assert limits.of("step") == FACTOR * 3.0, "an outlier does not move it"
    progress.forget_steps()
    steps(progress, clock, [0.001] * MIN_DURATIONS)
    assert limits.of("step") == SETTINGS.floor_s
    progress.forget_steps()
    steps(progress, clock, [60.0] * MIN_DURATIONS)
    assert limits.of("step") == SETTINGS.ceiling_s
    assert limits.of("compile") == limits.of("start") == SETTINGS.start_s


def test_after_a_signal_what_was_never_timed_has_the_time_that_engines_give():
    clock = Clock()
    progress = Progress(clock)
    limits = Limits(SETTINGS, progress)
    assert limits.after_signal("step") == limits.after_signal("evaluation") == SETTINGS.grace_s
    steps(progress, clock, [3.0] * 3)
    assert limits.after_signal("step") == SETTINGS.stop_s + 3.0
    progress.forget_steps()
    assert limits.after_signal("step") == SETTINGS.grace_s, "another plan's"


def test_waiting_for_a_save_to_be_written_is_not_held_to_how_long_saves_keep_the_run():
    """It is written while steps go on: mostly nobody waits, and in the end somebody does."""
    clock = Clock()
    progress = Progress(clock)
    limits = Limits(SETTINGS, progress)
    for _ in range(MIN_DURATIONS):
        for activity, time_s in (("write", 0.0), ("save", 0.1)):
            with progress.during(activity):
                clock.now += time_s
    assert limits.of("save") == SETTINGS.floor_s
    assert limits.of("write") == limits.after_signal("write") == SETTINGS.ceiling_s


def test_a_step_that_does_not_end_is_noticed(clock, tmp_path):
    progress, dog = watchdog(clock, tmp_path)
    steps(progress, clock, [1.0] * MIN_DURATIONS)
    progress.enter(MIN_DURATIONS + 1)
    assert passed(dog, clock, 9) is None
    assert passed(dog, clock, 2) == f"step {MIN_DURATIONS + 1} takes 11 s (limit 10 s)"


def test_what_is_no_step_has_a_limit_of_its_own(clock, tmp_path):
    progress, dog = watchdog(clock, tmp_path)
    steps(progress, clock, [1.0] * MIN_DURATIONS)
    with progress.during("save"):
        assert passed(dog, clock, 99) is None
        assert (
            passed(dog, clock, 2) == f"'save' after step {MIN_DURATIONS} takes 101 s (limit 100 s)"
        )
    assert passed(dog, clock, 9) is None, "the step begins anew"


def test_a_silent_process_is_noticed_and_an_unknown_one_is_not(clock, tmp_path):
    peers = [
        Peer(process=1, is_known=False, silent_s=90.0),
        Peer(process=2, is_known=True, silent_s=29.0, host="there"),
        Peer(process=3, is_known=True, silent_s=90.0, state="done"),
    ]
    _, dog = watchdog(clock, tmp_path, peers)
    assert passed(dog, clock, 3) is None
    peers[1] = Peer(process=2, is_known=True, silent_s=31.0, host="there")
    assert passed(dog, clock, 1) == "process 2 on there has given no heartbeat for 31 s"


def test_a_failed_process_is_followed_a_little_later(clock, tmp_path):
    """If all have the same error, each has the time to say so itself."""
    _, dog = watchdog(
        clock,
        tmp_path,
        [Peer(process=1, is_known=True, silent_s=0.0, state="failed", why="no room")],
    )
    assert passed(dog, clock, PEER_FAILURE_WAIT_S) is None
    assert passed(dog, clock, 2) == "process 1 has failed: no room"


@pytest.mark.parametrize(
    ("exit_code", "advice"),
    [(2, "see what that process has printed"), (75, "start it again with --resume")],
)
def test_it_ends_as_the_process_ended_that_failed(clock, tmp_path, capfd, exit_code, advice):
    """Of several exit codes engines take the largest: a mistake must not look like a fault because
    others waited for who made it.
    """
    codes = []
    _, dog = watchdog(
        clock,
        tmp_path,
        [
            Peer(
                process=1,
                is_known=True,
                silent_s=0.0,
                state="failed",
                why="no such file",
                exit_code=exit_code,
            )
        ],
        exit=codes.append,
    )
    why = passed(dog, clock, PEER_FAILURE_WAIT_S + 2)
    dog._process = 2  # who does not stay for others
    dog.end(why)
    assert codes == [exit_code]
    assert advice in capfd.readouterr().err


@pytest.mark.parametrize(
    ("failure", "exit_code"),
    [
        (ConfigError("a typo"), 2),
        (FaultError("the network"), 75),
        (ValueError("a mistake of ours"), 75),
    ],
)
def test_others_hear_how_a_process_ends(clock, tmp_path, failure, exit_code):
    heartbeats = Heartbeats(tmp_path, 1, 2, Progress(clock))
    dog = Watchdog(
        tmp_path, Progress(clock), SETTINGS, process=1, heartbeats=heartbeats, clock=clock
    )
    dog.start()
    dog.close(failure)
    said = json.loads((tmp_path / "progress" / "1.json").read_text())
    assert (said["state"], said["exit_code"]) == ("failed", exit_code)


def test_who_has_an_error_of_its_own_is_not_ended_for_another_s(tmp_path, monkeypatch):
    """Process 0 stays for the others, and one that has failed too would be a reason to end it
    before it has said anything.
    """
    now, codes, watching = Clock(), [], []
    failed = Peer(process=1, is_known=True, silent_s=0.0, state="failed", why="no room")
    heartbeats = SimpleNamespace(
        peers=[failed], process=0, start=lambda: None, close=lambda: None, end=lambda *_: None
    )
    dog = Watchdog(
        tmp_path, Progress(now), SETTINGS, heartbeats=heartbeats, clock=now, exit=codes.append
    )
    monkeypatch.setattr(dog, "_linger", lambda: watching.append(dog._thread.is_alive()))
    dog.start()
    dog.close(ConfigError("a typo"))
    assert (watching, codes) == ([False], [])
    dog.close()  # again is no harm
    assert watching == [False]


@pytest.mark.parametrize(("process", "has_others"), [(0, True), (0, False), (1, True)])
def test_process_0_stays_a_moment_for_others_that_it_cannot_see(
    tmp_path, monkeypatch, process, has_others
):
    """JAX aborts them when it goes, before they can say what they have heard."""
    now, stayed = Clock(), []
    dog = Watchdog(None, Progress(now), SETTINGS, process=process, has_others=has_others, clock=now)
    monkeypatch.setattr(dog, "_linger", lambda: stayed.append(True))
    dog.start()
    dog.close(ConfigError("a typo"))
    assert bool(stayed) == (process == 0 and has_others)


def test_a_process_that_was_stopped_finds_out(clock, tmp_path):
    _, dog = watchdog(clock, tmp_path, [Peer(process=1, is_known=True, silent_s=0.0)])
    assert passed(dog, clock, 1) is None
    clock.now += 60
    assert (
        dog.trouble(clock.now)
        == "this process was stopped for 60 s, and the others have gone on without it"
    )


def test_alone_a_process_may_be_stopped_for_any_time(clock, tmp_path):
    """Ctrl-Z, and later fg."""
    progress, dog = watchdog(clock, tmp_path)
    steps(progress, clock, [1.0] * MIN_DURATIONS)
    assert passed(dog, clock, 1) is None
    clock.now += 10_000
    assert dog.trouble(clock.now) is None
    assert passed(dog, clock, 9) is None
    assert passed(dog, clock, 2) is not None


def test_who_is_late_is_named():
    peers = [
        Peer(process=1, is_known=True, silent_s=40.0, doing="step", entered=6),
        Peer(process=2, is_known=True, silent_s=0.0, doing="step", entered=7),
        Peer(process=3, is_known=True, silent_s=0.0, doing="save", doing_s=12.0, entered=7),
        Peer(process=4, is_known=False, silent_s=0.0),
    ]
    assert late_processes(0, 7, "step", peers) == [
        "process 1 has not begun step 7: it was at step 6, 'step', 40 s ago",
        "process 3 is at 'save' for 12 s, and this one at 'step'",
        "process 4 was never heard of",
    ]
    assert late_processes(0, 6, "step", peers[1:2]) == [
        "process 0 has not begun step 7: it is at step 6, 'step'"
    ]


def test_the_end_leaves_an_event_with_every_stack(clock, tmp_path, capfd):
    codes = []
    progress, dog = watchdog(clock, tmp_path, exit=codes.append)
    steps(progress, clock, [1.0])
    dog.end("it got no further")
    assert codes == [75]
    assert "fault: it got no further; this process ends with exit code 75" in capfd.readouterr().err
    event = json.loads((tmp_path / "faults" / "0.jsonl").read_text())
    assert (event["event"], event["step"], event["what"], event["doing"]) == (
        "fault",
        1,
        "it got no further",
        "step",
    )
    assert "test_the_end_leaves_an_event_with_every_stack" in event["stacks"]
    assert "MainThread" in event["stacks"]


def test_a_disk_that_does_not_answer_does_not_keep_a_process(clock, tmp_path, monkeypatch):
    codes, never = [], threading.Event()
    _, dog = watchdog(clock, tmp_path, exit=codes.append)
    monkeypatch.setattr("optimus_jax.faults.watchdog.write_fault", lambda *_, **__: never.wait())
    monkeypatch.setattr("optimus_jax.faults.watchdog.REPORT_S", 0.01)
    dog.end("it got no further")
    never.set()
    assert codes == [75]


@pytest.fixture
def nobody_reads():
    """Standard error is a pipe that is full."""
    kept, (read, write) = os.dup(2), os.pipe()
    os.set_blocking(write, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(write, b"." * 4096)
    os.set_blocking(write, True)
    os.dup2(write, 2)
    nonblocking_stderr.cache_clear()
    yield
    os.dup2(kept, 2)
    os.close(read)
    for each in (nonblocking_stderr(), write, kept):
        os.close(each)
    nonblocking_stderr.cache_clear()


def test_who_does_not_read_what_it_says_does_not_keep_a_process(
    clock, tmp_path, monkeypatch, nobody_reads
):
    codes = []
    _, dog = watchdog(clock, tmp_path, exit=codes.append)
    monkeypatch.setattr(resilient_io, "FLUSH_TIMEOUT_S", 0.01)
    dog.end("it got no further")
    assert codes == [75]


def test_nor_the_timer_that_needs_no_python(nobody_reads):
    faulthandler.dump_traceback(nonblocking_stderr())
    assert os.get_blocking(2), "whoever else writes there waits as before"


@pytest.mark.parametrize("number", TERMINATING)
def test_a_signal_to_stop_is_heard_while_the_main_thread_does_not_run(tmp_path, number):
    """The handler of before says nothing: as if Python could not call it."""
    ended, codes = threading.Event(), []

    def leave(code):
        codes.append(code)
        ended.set()

    progress = Progress()
    progress.begin("step")
    dog = Watchdog(tmp_path, progress, FaultConfig(stop_s=0.001, grace_s=0.001), exit=leave)
    before = signal.signal(number, lambda *_: None)
    dog.start()
    try:
        os.kill(os.getpid(), number)
        assert ended.wait(60)
    finally:
        dog.close()
        signal.signal(number, before)
    assert codes == [75]
    assert signal.set_wakeup_fd(-1) == -1, "whoever listened before listens again"
    assert "told to stop" in json.loads((tmp_path / "faults" / "0.jsonl").read_text())["what"]


@pytest.mark.parametrize(
    ("watch", "num_processes", "is_watched"),
    [("auto", 1, False), ("auto", 2, True), ("on", 1, True), ("off", 2, False)],
)
def test_who_is_watched(tmp_path, watch, num_processes, is_watched):
    dog = Watchdog.of(
        tmp_path, Progress(), FaultConfig(watch=watch), process=0, num_processes=num_processes
    )
    assert (dog is not None) == is_watched
    if dog is not None:
        dog.close()
