"""Signals become stop requests, and the previous handlers are restored."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from optimus_jax.faults import stopping
from optimus_jax.faults.stopping import (
    EXIT_INTERRUPT,
    EXIT_RESTART,
    NOT_BEGUN,
    TERMINATING,
    ImmediateStop,
    StopRequest,
    Terminated,
    exit_on_signal,
    keep_reason,
    raise_on_signal,
)


def send(number: int) -> None:
    os.kill(os.getpid(), number)


@pytest.fixture(autouse=True)
def outside() -> Iterator[list[int]]:
    """Signals that arrive while no StopRequest is entered; they do not end the tests."""
    seen: list[int] = []
    previous = {
        number: signal.signal(number, lambda number, _: seen.append(number))
        for number in (signal.SIGINT, *TERMINATING)
    }
    yield seen
    for number, handler in previous.items():
        signal.signal(number, handler)


def test_without_a_signal_there_is_no_reason():
    with StopRequest() as stop:
        pass
    assert (stop.reason, stop.exit_code) == (None, 0)


def test_the_first_ctrl_c_requests_a_stop_and_the_second_forces_it():
    with StopRequest() as stop:
        send(signal.SIGINT)
        assert (stop.reason, stop.exit_code) == ("interrupt", 0)
        with pytest.raises(ImmediateStop):
            send(signal.SIGINT)


def test_a_signal_is_handled_although_stderr_has_no_reader(capfd: pytest.CaptureFixture[str]):
    kept, (read, write) = os.dup(2), os.pipe()
    os.close(read)
    os.dup2(write, 2)
    try:
        with StopRequest() as stop:
            send(signal.SIGINT)
            assert stop.reason == "interrupt"
    finally:
        os.dup2(kept, 2)


def test_the_first_signal_is_acknowledged_at_once(capfd: pytest.CaptureFixture[str]):
    with StopRequest():
        send(signal.SIGINT)
        assert "finished and saved first; Ctrl-C (again) ends at once" in capfd.readouterr().err
        send(signal.SIGTERM)
        assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGINT, EXIT_INTERRUPT),
        (signal.SIGTERM, EXIT_RESTART),
        (signal.SIGUSR1, EXIT_RESTART),
        (signal.SIGHUP, EXIT_RESTART),
    ],
)
def test_a_signal_during_startup_exits_with_one_line(number: int, code: int):
    program = (
        "import os; from optimus_jax.faults import stopping; stopping.exit_on_signal();"
        f" os.kill(os.getpid(), {int(number)})"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (code, f"\n{NOT_BEGUN}\n")


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, -signal.SIGINT), *((number, 3) for number in TERMINATING)]
)
def test_a_signal_after_completion_keeps_the_exit_code(number: int, code: int):
    program = (
        "import os; from optimus_jax.faults import stopping; stopping.raise_on_signal();"
        f" stopping.exit_with_code_on_signal(3); os.kill(os.getpid(), {int(number)})"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (code, "")


def test_under_nohup_a_closed_terminal_is_ignored():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the fixture restores the handlers
    exit_on_signal()
    send(signal.SIGHUP)
    raise_on_signal()
    send(signal.SIGHUP)
    with StopRequest() as stop:
        send(signal.SIGHUP)
        assert stop.reason is None
        send(signal.SIGTERM)
        assert stop.reason == "terminate"
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


def test_before_training_signals_raise_exceptions():
    raise_on_signal()  # the fixture restores the handlers
    with pytest.raises(KeyboardInterrupt):
        send(signal.SIGINT)
    for number in TERMINATING:
        with pytest.raises(Terminated):
            send(number)


@pytest.mark.parametrize("number", [signal.SIGINT, *TERMINATING])
def test_a_signal_does_not_replace_an_earlier_error(number: int):
    """A launcher terminates all processes when one has failed."""

    def fail(error: BaseException) -> None:
        try:
            with StopRequest():
                raise error
        finally:
            send(number)

    raise_on_signal()
    with pytest.raises(RuntimeError):
        fail(RuntimeError())
    send(number)
    raise_on_signal()
    keep_reason(Terminated())
    with pytest.raises(KeyboardInterrupt if number == signal.SIGINT else Terminated):
        fail(Terminated())


@pytest.mark.parametrize("number", [signal.SIGINT, *TERMINATING])
def test_a_signal_after_training_is_not_reported_as_a_stop(number: int):
    """What is left is to clean up and report completion."""
    raise_on_signal()
    with StopRequest():
        pass
    send(number)


@pytest.mark.parametrize("number", TERMINATING)
def test_repeated_termination_signals_ask_for_a_restart(number: int):
    with StopRequest() as stop:
        send(number)
        send(number)
    assert (stop.reason, stop.exit_code, EXIT_RESTART) == ("terminate", EXIT_RESTART, 75)


def test_the_first_signal_is_the_reason():
    with StopRequest() as stop:
        send(signal.SIGINT)
        send(signal.SIGTERM)
        assert stop.reason == "interrupt"


def test_ctrl_c_after_sigterm_ends_at_once():
    with StopRequest() as stop:
        send(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)
        assert stop.reason == "terminate"


@pytest.mark.parametrize("number", [signal.SIGINT, *TERMINATING])
def test_previous_signal_handlers_are_restored(outside: list[int], number: int):
    def fail() -> None:
        with StopRequest():
            send(number)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert outside == []
    send(number)
    assert outside == [number]


def test_another_thread_does_not_change_signal_handlers(outside: list[int]):
    stop = StopRequest()

    def enter() -> None:
        with stop:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert (stop.reason, outside) == (None, [signal.SIGTERM])


def test_every_exit_code_of_ours_is_in_the_table():
    ours = [value for name, value in vars(stopping).items() if name.startswith("EXIT_")]
    assert {code for code in ours if isinstance(code, int)} <= set(stopping.EXIT_CODES)
