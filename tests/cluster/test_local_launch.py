"""The local launcher: the processes it starts, what it passes on, and its exit code.

(Real runs: test_distributed.py.)
"""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from optimus_jax.cluster.local_launch import _forwarding

LAUNCH = Path(__file__).parents[2] / "scripts" / "launch.py"
VARIABLES = ("COORDINATOR", "NUM_PROCESSES", "PROCESS_ID", "LOCAL_ID", "NUM_LOCAL")


@pytest.fixture
def start(tmp_path):
    """Launch a program with the names `number` and `told` (the variables of its launch), `say`
    (make a file) and `wait` (for a file that another process makes with `say`).
    """

    def launch(program, *flags, processes=2, arguments=()):
        script = tmp_path / "program.py"
        script.write_text(
            textwrap.dedent(f"""\
            import os, pathlib, signal, sys, time
            told = {{name: os.environ["OPTIMUS_" + name] for name in {VARIABLES}}}
            number, there = int(told["PROCESS_ID"]), pathlib.Path({str(tmp_path)!r})
            def say(name):
                (there / name).touch()
            def wait(name):
                while not (there / name).exists():
                    time.sleep(0.01)
            """)
            + textwrap.dedent(program)
        )
        return subprocess.Popen(
            [
                sys.executable,
                LAUNCH,
                "--processes",
                str(processes),
                *flags,
                "--",
                script,
                *arguments,
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return launch


def finish(process):
    output, errors = process.communicate(timeout=60)
    return process.returncode, output, errors


def test_each_process_gets_its_place_and_the_arguments(start):
    code, output, errors = finish(
        start(
            "print(sys.argv[1:], *told.values())",
            "--cpu-devices",
            "4",
            processes=3,
            arguments=("--model", "m"),
        )
    )
    assert code == 0
    lines = [
        output.strip(),
        *(
            line.removeprefix(f"[{number}] ")
            for number, line in enumerate(sorted(errors.splitlines()), 1)
        ),
    ]
    port = lines[0].split("127.0.0.1:")[1].split()[0]
    assert lines == [
        f"['--model', 'm', '--cpu-devices', '4'] 127.0.0.1:{port} 3 {number} {number} 3"
        for number in range(3)
    ]


@pytest.mark.parametrize(
    ("how", "code"),
    [
        ("sys.exit(75)", 75),
        ("sys.exit(2)", 2),
        ("os.kill(os.getpid(), 9)", 137),
        ("raise ValueError('no')", 1),
    ],
)
def test_if_one_process_fails_all_end_with_its_exit_code(start, how, code):
    ended, _, errors = finish(
        start(f"""
        if number == 1:
            wait("waiting")
            {how}
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        say("waiting")
        while True:
            time.sleep(0.01)
        """)
    )
    assert ended == code
    assert ("[1] ValueError: no" in errors) == (code == 1)


def test_a_process_that_does_not_stop_in_time_is_killed(start):
    code, _, _ = finish(
        start(
            """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        say(f"waiting-{number}")
        wait("waiting-0")
        if number == 1:
            sys.exit(3)
        while True:
            time.sleep(0.01)
        """,
            "--grace",
            "0.1",
        )
    )
    assert code == 3


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_signals_reach_every_process_once(start, number, tmp_path):
    launched = start("""
        seen = []
        for number_ in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number_, lambda number, _: seen.append(number))
        say(f"ready-{number}")
        while not seen:
            time.sleep(0.01)
        say(f"seen-{number}")
        wait("seen-0")
        wait("seen-1")
        print("seen", *map(int, seen), flush=True)
        sys.exit(75)
        """)
    while not all((tmp_path / f"ready-{which}").exists() for which in range(2)):
        assert launched.poll() is None
    launched.send_signal(number)
    code, output, errors = finish(launched)
    assert (code, output, errors) == (75, f"seen {int(number)}\n", f"[1] seen {int(number)}\n")


WAITS_FOR_SIGTERM = """
    ended = []
    signal.signal(signal.SIGTERM, lambda number, _: ended.append(number))
    say(f"ready-{number}")
    while not ended:
        time.sleep(0.01)
    say(f"ended-{number}")
    """


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGKILL])
def test_processes_end_with_their_terminal_or_their_launcher(start, number, tmp_path):
    """SIGKILL cannot be passed on: the system signals processes whose parent has died."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # these tests may run under nohup
    try:
        launched = start(WAITS_FOR_SIGTERM)
    finally:
        signal.signal(signal.SIGHUP, before)
    while not all((tmp_path / f"ready-{which}").exists() for which in range(2)):
        assert launched.poll() is None
    launched.send_signal(number)
    finish(launched)
    limit = time.monotonic() + 30
    while not all((tmp_path / f"ended-{which}").exists() for which in range(2)):
        assert time.monotonic() < limit


def test_under_nohup_a_closed_terminal_is_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with _forwarding([], 1) as (forwarded, _):
            os.kill(os.getpid(), signal.SIGHUP)
            assert forwarded == []
    finally:
        signal.signal(signal.SIGHUP, before)


class RecordsSignals:
    """A process that records the signals it is sent."""

    def __init__(self):
        self.signals = []

    def poll(self):
        return None

    def send_signal(self, number):
        self.signals.append(number)


def test_a_signal_during_startup_reaches_each_process_once():
    processes = [RecordsSignals()]
    with _forwarding(processes, 2) as (_, send_early_signals):
        os.kill(os.getpid(), signal.SIGTERM)
        processes.append(RecordsSignals())
        send_early_signals()
        assert [process.signals for process in processes] == [[signal.SIGTERM]] * 2
        os.kill(os.getpid(), signal.SIGUSR1)
        assert [process.signals for process in processes] == [[signal.SIGTERM, signal.SIGUSR1]] * 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "required"),
        (("--processes", "0", "--", "train.py"), "--processes must be at least 1"),
        (("--processes", "2", "--", "trian.py"), "no such script"),
        (("--processes", "two", "--", "train.py"), "invalid int value"),
        (("--processes", "2"), "required: SCRIPT"),
    ],
)
def test_user_mistakes_end_with_one_message(arguments, message):
    failed = subprocess.run(
        [sys.executable, LAUNCH, *arguments], capture_output=True, text=True, timeout=60
    )
    assert failed.returncode == 2
    assert message in failed.stderr
    assert "do: " in failed.stderr
    assert "Traceback" not in failed.stderr


def test_help_does_not_import_jax():
    shown = subprocess.run(
        [sys.executable, "-X", "importtime", LAUNCH, "--help"],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "COLUMNS": "118"},
    )
    assert shown.returncode == 0
    assert "launch.py --processes N [flags] -- SCRIPT" in shown.stdout
    assert " jax\n" not in shown.stderr
