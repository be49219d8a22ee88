"""What counts as a fault, on a clock that only the test advances, and how a process exits after
one.
"""

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


def make_watchdog(clock, tmp_path, peers=None, **more):
    """The progress and watchdog of a process in its first steps, beside others if peers
    are given.
    """
    progress = Progress(clock)
    progress.begin("step")
    heartbeats = (
        None if peers is None else SimpleNamespace(peers=peers, process=0, end=lambda *_: None)
    )
    return progress, Watchdog(
        tmp_path, progress, SETTINGS, heartbeats=heartbeats, clock=clock, **more
    )


def passed(watchdog, clock, seconds):
    """The fault found within this time, checking every second; None: no fault."""
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


def test_the_silence_limit_has_a_minimum():
    FaultConfig(silence_s=LEAST_SILENCE_S)
    with pytest.raises(ConfigError, match=r"faults\.silence_s=1\n.*choose 5 or more"):
        FaultConfig(silence_s=1.0)


def test_limits_are_a_multiple_of_usual_durations():
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


def test_after_a_signal_activities_never_timed_get_the_launchers_grace():
    clock = Clock()
    progress = Progress(clock)
    limits = Limits(SETTINGS, progress)
    assert limits.after_signal("step") == limits.after_signal("evaluation") == SETTINGS.grace_s
    steps(progress, clock, [3.0] * 3)
    assert limits.after_signal("step") == SETTINGS.stop_s + 3.0
    progress.forget_steps()
    assert limits.after_signal("step") == SETTINGS.grace_s, "another plan's"


def test_the_limit_for_writing_a_checkpoint_ignores_durations():
    """It is written while steps continue: mostly nothing waits for it, and at the end of the run
    something does.
    """
    clock = Clock()
    progress = Progress(clock)
    limits = Limits(SETTINGS, progress)
    for _ in range(MIN_DURATIONS):
        for activity, time_s in (("write", 0.0), ("save", 0.1)):
            with progress.during(activity):
                clock.now += time_s
    assert limits.of("save") == SETTINGS.floor_s
    assert limits.of("write") == limits.after_signal("write") == SETTINGS.ceiling_s


def test_a_step_that_does_not_end_is_a_fault(clock, tmp_path):
    progress, watchdog = make_watchdog(clock, tmp_path)
    steps(progress, clock, [1.0] * MIN_DURATIONS)
    progress.enter(MIN_DURATIONS + 1)
    assert passed(watchdog, clock, 9) is None
    assert passed(watchdog, clock, 2) == f"step {MIN_DURATIONS + 1} takes 11 s (limit 10 s)"


def test_other_activities_have_their_own_limit(clock, tmp_path):
    progress, watchdog = make_watchdog(clock, tmp_path)
    steps(progress, clock, [1.0] * MIN_DURATIONS)
    with progress.during("save"):
        assert passed(watchdog, clock, 99) is None
        assert (
            passed(watchdog, clock, 2)
            == f"'save' after step {MIN_DURATIONS} takes 101 s (limit 100 s)"
        )
    assert passed(watchdog, clock, 9) is None, "the step begins anew"


def test_a_silent_process_is_a_fault_and_an_unknown_one_is_not(clock, tmp_path):
    peers = [
        Peer(process=1, is_known=False, silent_s=90.0),
        Peer(process=2, is_known=True, silent_s=29.0, host="there"),
        Peer(process=3, is_known=True, silent_s=90.0, state="done"),
    ]
    _, watchdog = make_watchdog(clock, tmp_path, peers)
    assert passed(watchdog, clock, 3) is None
    peers[1] = Peer(process=2, is_known=True, silent_s=31.0, host="there")
    assert passed(watchdog, clock, 1) == "process 2 on there has given no heartbeat for 31 s"


def test_a_failed_process_ends_the_others_after_a_delay(clock, tmp_path):
    """If all have the same error, each has time to report it itself."""
    _, watchdog = make_watchdog(
        clock,
        tmp_path,
        [Peer(process=1, is_known=True, silent_s=0.0, state="failed", why="no room")],
    )
    assert passed(watchdog, clock, PEER_FAILURE_WAIT_S) is None
    assert passed(watchdog, clock, 2) == "process 1 has failed: no room"


@pytest.mark.parametrize(
    ("exit_code", "advice"),
    [(2, "see what that process has printed"), (75, "start it again with --resume")],
)
def test_the_exit_code_is_that_of_the_process_that_failed(
    clock, tmp_path, capfd, exit_code, advice
):
    """Launchers take the largest of several exit codes: a user mistake must not look like a fault
    because others waited for the process that made it.
    """
    codes = []
    _, watchdog = make_watchdog(
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
    why = passed(watchdog, clock, PEER_FAILURE_WAIT_S + 2)
    watchdog._process = 2  # process 2 does not wait for others
    watchdog.end(why)
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
def test_other_processes_are_told_how_a_process_ends(clock, tmp_path, failure, exit_code):
    heartbeats = Heartbeats(tmp_path, 1, 2, Progress(clock))
    watchdog = Watchdog(
        tmp_path, Progress(clock), SETTINGS, process=1, heartbeats=heartbeats, clock=clock
    )
    watchdog.start()
    watchdog.close(failure)
    heartbeat = json.loads((tmp_path / "progress" / "1.json").read_text())
    assert (heartbeat["state"], heartbeat["exit_code"]) == ("failed", exit_code)


def test_a_process_with_its_own_error_is_not_ended_for_another(tmp_path, monkeypatch):
    """Process 0 waits for the others, and the failure of another one would end it before it has
    reported its own error.
    """
    now, codes, watching = Clock(), [], []
    failed = Peer(process=1, is_known=True, silent_s=0.0, state="failed", why="no room")
    heartbeats = SimpleNamespace(
        peers=[failed], process=0, start=lambda: None, close=lambda: None, end=lambda *_: None
    )
    watchdog = Watchdog(
        tmp_path, Progress(now), SETTINGS, heartbeats=heartbeats, clock=now, exit=codes.append
    )
    monkeypatch.setattr(watchdog, "_linger", lambda: watching.append(watchdog._thread.is_alive()))
    watchdog.start()
    watchdog.close(ConfigError("a typo"))
    assert (watching, codes) == ([False], [])
    watchdog.close()  # closing twice is harmless
    assert watching == [False]


@pytest.mark.parametrize(("process", "has_others"), [(0, True), (0, False), (1, True)])
def test_process_0_waits_a_moment_for_others(tmp_path, monkeypatch, process, has_others):
    """JAX aborts them when process 0 exits, before they can report their errors."""
    now, stayed = Clock(), []
    watchdog = Watchdog(
        None, Progress(now), SETTINGS, process=process, has_others=has_others, clock=now
    )
    monkeypatch.setattr(watchdog, "_linger", lambda: stayed.append(True))
    watchdog.start()
    watchdog.close(ConfigError("a typo"))
    assert bool(stayed) == (process == 0 and has_others)


def test_a_process_that_was_stopped_notices(clock, tmp_path):
    _, watchdog = make_watchdog(clock, tmp_path, [Peer(process=1, is_known=True, silent_s=0.0)])
    assert passed(watchdog, clock, 1) is None
    clock.now += 60
    assert (
        watchdog.trouble(clock.now)
        == "this process was suspended for 60 s; the others consider it lost"
    )


def test_a_single_process_may_be_stopped_for_any_time(clock, tmp_path):
    """As with Ctrl-Z, and later fg."""
    progress, watchdog = make_watchdog(clock, tmp_path)
    steps(progress, clock, [1.0] * MIN_DURATIONS)
    assert passed(watchdog, clock, 1) is None
    clock.now += 10_000
    assert watchdog.trouble(clock.now) is None
    assert passed(watchdog, clock, 9) is None
    assert passed(watchdog, clock, 2) is not None


def test_late_processes_are_named():
    peers = [
        Peer(process=1, is_known=True, silent_s=40.0, doing="step", entered=6),
        Peer(process=2, is_known=True, silent_s=0.0, doing="step", entered=7),
        Peer(process=3, is_known=True, silent_s=0.0, doing="save", doing_s=12.0, entered=7),
        Peer(process=4, is_known=False, silent_s=0.0),
    ]
    assert late_processes(0, 7, "step", peers) == [
        "process 1 has not begun step 7: it was at step 6, 'step', 40 s ago",
        "process 3 is at 'save' for 12 s, and this one at 'step'",
        "process 4 has never sent a heartbeat",
    ]
    assert late_processes(0, 6, "step", peers[1:2]) == [
        "process 0 has not begun step 7: it is at step 6, 'step'"
    ]


def test_a_fault_event_has_the_stacks_of_all_threads(clock, tmp_path, capfd):
    codes = []
    progress, watchdog = make_watchdog(clock, tmp_path, exit=codes.append)
    steps(progress, clock, [1.0])
    watchdog.end("it got no further")
    assert codes == [75]
    assert "fault: it got no further; this process ends with exit code 75" in capfd.readouterr().err
    event = json.loads((tmp_path / "faults" / "0.jsonl").read_text())
    assert (event["event"], event["step"], event["what"], event["doing"]) == (
        "fault",
        1,
        "it got no further",
        "step",
    )
    assert "test_a_fault_event_has_the_stacks_of_all_threads" in event["stacks"]
    assert "MainThread" in event["stacks"]


def test_a_hanging_disk_does_not_prevent_the_exit(clock, tmp_path, monkeypatch):
    codes, never = [], threading.Event()
    _, watchdog = make_watchdog(clock, tmp_path, exit=codes.append)
    monkeypatch.setattr("optimus_jax.faults.watchdog.write_fault", lambda *_, **__: never.wait())
    monkeypatch.setattr("optimus_jax.faults.watchdog.REPORT_S", 0.01)
    watchdog.end("it got no further")
    never.set()
    assert codes == [75]


@pytest.fixture
def stderr_without_reader():
    """Standard error is a full pipe without a reader."""
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


def test_a_full_stderr_pipe_does_not_prevent_the_exit(
    clock, tmp_path, monkeypatch, stderr_without_reader
):
    codes = []
    _, watchdog = make_watchdog(clock, tmp_path, exit=codes.append)
    monkeypatch.setattr(resilient_io, "FLUSH_TIMEOUT_S", 0.01)
    watchdog.end("it got no further")
    assert codes == [75]


def test_a_full_stderr_pipe_does_not_block_faulthandler(stderr_without_reader):
    faulthandler.dump_traceback(nonblocking_stderr())
    assert os.get_blocking(2), "whoever else writes there waits as before"


@pytest.mark.parametrize("number", TERMINATING)
def test_a_stop_signal_is_handled_while_the_main_thread_is_blocked(tmp_path, number):
    """The previous handler does nothing, as if Python could not call it."""
    ended, codes = threading.Event(), []

    def leave(code):
        codes.append(code)
        ended.set()

    progress = Progress()
    progress.begin("step")
    watchdog = Watchdog(tmp_path, progress, FaultConfig(stop_s=0.001, grace_s=0.001), exit=leave)
    before = signal.signal(number, lambda *_: None)
    watchdog.start()
    try:
        os.kill(os.getpid(), number)
        assert ended.wait(60)
    finally:
        watchdog.close()
        signal.signal(number, before)
    assert codes == [75]
    assert signal.set_wakeup_fd(-1) == -1, "whoever listened before listens again"
    assert "told to stop" in json.loads((tmp_path / "faults" / "0.jsonl").read_text())["what"]


@pytest.mark.parametrize(
    ("watch", "num_processes", "is_watched"),
    [("auto", 1, False), ("auto", 2, True), ("on", 1, True), ("off", 2, False)],
)
def test_the_watch_setting_decides_whether_there_is_a_watchdog(
    tmp_path, watch, num_processes, is_watched
):
    watchdog = Watchdog.of(
        tmp_path, Progress(), FaultConfig(watch=watch), process=0, num_processes=num_processes
    )
    assert (watchdog is not None) == is_watched
    if watchdog is not None:
        watchdog.close()
