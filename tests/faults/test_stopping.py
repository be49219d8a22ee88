"""Signals become requests, and the handlers of before come back."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

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
    """Signals that arrive while no StopRequest is entered, kept from ending the tests."""
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


def test_ctrl_c_asks_once_and_insists_the_second_time():
    with StopRequest() as stop:
        send(signal.SIGINT)
        assert (stop.reason, stop.exit_code) == ("interrupt", 0)
        with pytest.raises(ImmediateStop):
            send(signal.SIGINT)


def test_nobody_need_be_there_to_read_the_answer(capfd: pytest.CaptureFixture[str]):
    kept, (read, write) = os.dup(2), os.pipe()
    os.close(read)
    os.dup2(write, 2)
    try:
        with StopRequest() as stop:
            send(signal.SIGINT)
            assert stop.reason == "interrupt"
    finally:
        os.dup2(kept, 2)


def test_the_first_signal_is_answered_at_once(capfd: pytest.CaptureFixture[str]):
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
def test_a_program_that_starts_ends_with_one_line(number: int, code: int):
    program = (
        "import os; from optimus_jax.faults import stopping; stopping.exit_on_signal();"
        f" os.kill(os.getpid(), {int(number)})"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (code, f"\n{NOT_BEGUN}\n")


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, -signal.SIGINT), *((number, 3) for number in TERMINATING)]
)
def test_a_program_that_is_done_ends_with_its_own_code(number: int, code: int):
    program = (
        "import os; from optimus_jax.faults import stopping; stopping.raise_on_signal();"
        f" stopping.exit_with_code_on_signal(3); os.kill(os.getpid(), {int(number)})"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (code, "")


def test_under_nohup_a_terminal_that_closes_is_nothing():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # handlers of before come back with the fixture
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


def test_before_training_signals_are_exceptions():
    raise_on_signal()  # handlers of before come back with the fixture
    with pytest.raises(KeyboardInterrupt):
        send(signal.SIGINT)
    for number in TERMINATING:
        with pytest.raises(Terminated):
            send(number)


@pytest.mark.parametrize("number", [signal.SIGINT, *TERMINATING])
def test_no_signal_takes_the_place_of_an_error(number: int):
    """Who has launched the processes of a run tells all to end when one has failed."""

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
def test_a_run_that_has_come_to_its_end_is_not_said_to_have_stopped(number: int):
    """What is left is to put things in order, and to say so."""
    raise_on_signal()
    with StopRequest():
        pass
    send(number)


@pytest.mark.parametrize("number", TERMINATING)
def test_who_takes_the_machine_asks_for_a_restart_however_often(number: int):
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
def test_handlers_of_before_come_back(outside: list[int], number: int):
    def fail() -> None:
        with StopRequest():
            send(number)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert outside == []
    send(number)
    assert outside == [number]


def test_another_thread_leaves_handlers_alone(outside: list[int]):
    stop = StopRequest()

    def enter() -> None:
        with stop:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert (stop.reason, outside) == (None, [signal.SIGTERM])
