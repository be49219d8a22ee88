"""Faults of a run of two real processes: the short version of benchmarks/faults.py."""

import fcntl
import json
import os
import pty
import resource
import select
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest
from helpers import free_port

TRAIN, LAUNCH = (Path(__file__).parents[2] / "scripts" / name for name in ("train.py", "launch.py"))
TINY = [
    "--model",
    "gpt2-nano",
    "--set",
    "model.num_layers=1",
    "--cpu-devices",
    "1",
    "--global-batch",
    "4",
    "--seq-len",
    "32",
]
SCRIPT = Path(__file__).parents[2] / "benchmarks" / "faults.py"


# Takes over a minute: two processes start three times, and the others wait until a process that is
# stopped counts as lost.
def test_a_run_continues_after_a_killed_and_a_stopped_process(tmp_path):
    """The script checks the invariants, and fails if one does not hold: nothing hangs, few steps
    are lost, and losses equal those of an undisturbed run.
    """
    out = tmp_path / "faults.jsonl"
    done = subprocess.run(
        [
            sys.executable,
            SCRIPT,
            "--out",
            out,
            "--repetitions",
            "1",
            "--cases",
            "SIGKILL in a step",
            "SIGSTOP",
        ],
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    killed, stopped = map(json.loads, out.read_text().splitlines())
    assert [row["same_losses"] and row["starts"] >= 2 for row in (killed, stopped)] == [True, True]
    assert stopped["codes"] == [
        75,
        75,
    ], "who was stopped finds out, and the other has not waited for it"
    assert stopped["faults_told"] == 2
    assert any(
        f"process {stopped['process']} on" in stderr and "no heartbeat" in stderr
        for stderr in stopped["said"]
    )


@pytest.mark.parametrize("who", [pytest.param(0, marks=pytest.mark.nightly), 1])
def test_a_process_that_alone_cannot_write_is_not_waited_for(tmp_path, who):
    """As with a disk that has room only for the other process's part of a checkpoint: both exit
    with the code of a user mistake, and say why.
    """
    address = f"127.0.0.1:{free_port()}"

    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))

    processes = [
        subprocess.Popen(
            [
                sys.executable,
                TRAIN,
                *TINY,
                "--mesh",
                "fsdp=2",
                "--steps",
                "6",
                "--set",
                "checkpoint.every=3",
                "--run-dir",
                tmp_path / "run",
                "--coordinator",
                address,
                "--num-processes",
                "2",
                "--process-id",
                str(number),
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=limit if number == who else None,
        )
        for number in range(2)
    ]
    stderr = [process.communicate(timeout=240)[1] for process in processes]
    assert [process.returncode for process in processes] == [2, 2], stderr
    assert "saving the checkpoint of step 3 failed" in stderr[who]
    assert f"process {who} has failed: saving the checkpoint of step 3 failed" in stderr[1 - who]


BROKEN = """
import os, runpy, sys
sys.argv = sys.argv[1:]
if os.environ.get("OPTIMUS_PROCESS_ID", "-1") == {who!r}:
    def broken(self, item, clock):
        float(item.metrics["loss"])  # then the other process is in its first step as well
        raise {error}
    Trainer.record = broken
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize(
    ("who", "error", "codes", "message"),
    [
        (0, "RunDirectoryError('the log is full')", {2}, "error: the log is full"),
        pytest.param(
            0,
            "ValueError('a mistake of ours')",
            {1, 75},
            "ValueError: a mistake of ours",
            marks=pytest.mark.nightly,
        ),
        (1, "ValueError('a mistake of ours')", {1, 75}, "[1] ValueError: a mistake of ours"),
    ],
)
def test_the_cause_is_printed_although_the_launcher_ends_all(tmp_path, who, error, codes, message):
    """And no process waits for the others to exit in order.

    The launcher's exit code is that of the first process to end, which may be one that was told of
    the error.
    """
    script = tmp_path / "broken.py"
    script.write_text(
        "from optimus_jax.errors import RunDirectoryError\nfrom optimus_jax.training.trainer import"
        " Trainer\n" + BROKEN.format(who=str(who), error=error)
    )
    ended = subprocess.run(
        [
            sys.executable,
            LAUNCH,
            "--processes",
            "2",
            "--",
            script,
            TRAIN,
            *TINY,
            "--mesh",
            "data=2",
            "--steps",
            "6",
            "--run-dir",
            tmp_path / "run",
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        timeout=120,
    )
    assert ended.returncode in codes, ended.stderr
    assert message in ended.stderr
    assert f"in process {who} of 2" in ended.stderr
    assert "before training had begun" not in ended.stderr
    assert not any(
        "DEADLINE_EXCEEDED" in line or "terminate called" in line
        for line in ended.stderr.splitlines()
    )


def start_processes(script, *arguments, directories):
    """Start a process for each directory; a function that waits for one returns its standard error
    and exit code.
    """
    address = f"127.0.0.1:{free_port()}"
    processes = [
        subprocess.Popen(
            [
                sys.executable,
                script,
                *TINY,
                "--mesh",
                f"data={len(directories)}",
                *arguments,
                "--run-dir",
                directory,
                "--coordinator",
                address,
                "--num-processes",
                str(len(directories)),
                "--process-id",
                str(number),
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number, directory in enumerate(directories)
    ]
    return processes, lambda process: (process.communicate(timeout=240)[1], process.returncode)


def changed_script(tmp_path, change):
    """The training script, preceded by the code `change`."""
    script = tmp_path / "changed.py"
    script.write_text(
        f"import os, runpy, signal, sys\n{change}\nrunpy.run_path({str(TRAIN)!r},"
        " run_name='__main__')\n"
    )
    return script


def test_processes_with_different_run_directories_do_not_train(tmp_path):
    """Each directory would get a part of every checkpoint, and none a whole one."""
    script = changed_script(
        tmp_path,
        "from optimus_jax.run_directory import shared as"
        " shared_directory\nshared_directory.PATIENCE_S = 0.5",
    )
    processes, end = start_processes(
        script, "--steps", "2", directories=[tmp_path / "a", tmp_path / "b"]
    )
    (first, first_code), (second, second_code) = map(end, processes)
    assert (first_code, second_code) == (2, 2), first + second
    assert "the run directory of this process is not that of process 0" in second
    assert "given: process 1 of 2" in first
    assert not (tmp_path / "a" / "config.json").exists()


def test_a_directory_that_cannot_hold_heartbeats_is_an_error_of_all(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "progress").touch()
    processes, end = start_processes(TRAIN, "--steps", "2", directories=[tmp_path / "run"] * 2)
    for stderr, code in map(end, processes):
        assert code == 2, stderr
        assert "Traceback" not in stderr
        assert "progress" in stderr or "another process of this run cannot continue" in stderr


# 24 s: two processes start, and one is waited for as long as its limit says.
@pytest.mark.parametrize("is_told_to_end", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_a_process_that_never_exits_is_not_waited_for(tmp_path, is_told_to_end):
    """The run is complete then, as its exit code shows, even if the launcher does not wait."""
    script = changed_script(
        tmp_path,
        f"""
import threading
from optimus_jax.run import api
from optimus_jax.cluster import distributed
if {is_told_to_end}:
    disconnect = distributed.disconnect
    distributed.SHUTDOWN_WAIT_S = 1000.0
    def disconnect_when_told():
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
        return disconnect()
    distributed.disconnect = disconnect_when_told
else:
    distributed.SHUTDOWN_WAIT_S = 2.0
train = api.train
def stop_after(*arguments, **more):
    result = train(*arguments, **more)
    if sys.argv[-1] == "1":
        os.kill(os.getpid(), signal.SIGSTOP)
    return result
api.train = stop_after""",
    )
    (first, stopped), end = start_processes(
        script, "--steps", "2", directories=[tmp_path / "run"] * 2
    )
    stderr, code = end(first)
    stopped.kill()
    end(stopped)
    assert code == 0, stderr
    assert ("without waiting for another one that is not" in stderr) != is_told_to_end
    assert "stopped before" not in stderr


def test_a_death_while_jax_connects_is_reported_at_once(tmp_path):
    """Without waiting for `connect_s`, and also to processes that are connected."""
    script = changed_script(
        tmp_path,
        """
from optimus_jax.cluster import distributed
joining = distributed._start_joining
def die_or_join(*arguments):
    if sys.argv[-1] == "2":
        os.kill(os.getpid(), signal.SIGKILL)
    return joining(*arguments)
distributed._start_joining = die_or_join""",
    )
    processes, end = start_processes(script, "--steps", "2", directories=[tmp_path / "run"] * 3)
    for (stderr, code), expected in zip(
        map(end, processes), (75, 75, -signal.SIGKILL), strict=True
    ):
        assert code == expected, stderr
        assert expected != 75 or "process 2 of 3 ended before JAX had connected them" in stderr


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 0), pytest.param(signal.SIGTERM, 75, marks=pytest.mark.nightly)],
)
def test_a_run_whose_output_pipe_is_closed_is_saved(tmp_path, number, code):
    """As after Ctrl-C in a pipeline with `tee`."""
    with subprocess.Popen(
        [
            sys.executable,
            TRAIN,
            *TINY,
            "--steps",
            "100000",
            "--set",
            "checkpoint.every=0",
            "--run-dir",
            tmp_path / "run",
            "--set",
            "log.every=1",
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("step 3/"):
                break
        process.stdout.close()
        process.send_signal(number)
        assert process.wait(timeout=120) == code
    (saved,) = (
        path for path in (tmp_path / "run" / "checkpoints").iterdir() if path.name.isdecimal()
    )
    assert int(saved.name) >= 3


def test_a_run_whose_terminal_is_closed_is_saved_and_can_be_resumed(tmp_path):
    """The system sends SIGHUP to the terminal's processes, and writing to the terminal fails."""

    def take_terminal():
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # these tests may run under nohup
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    command = [
        sys.executable,
        TRAIN,
        *TINY,
        "--set",
        "checkpoint.every=0",
        "--run-dir",
        tmp_path / "run",
        "--resume",
        "auto",
    ]
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [*command, "--steps", "100000"],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        preexec_fn=take_terminal,
    )
    os.close(theirs)
    metrics, shown, limit = tmp_path / "run" / "metrics.jsonl", b"", time.monotonic() + 120
    while not metrics.exists() or metrics.read_bytes().count(b"\n") < 3:
        assert time.monotonic() < limit, shown
        if select.select([ours], [], [], 0.05)[0]:
            shown += os.read(ours, 4096)
    os.close(ours)
    assert process.wait(timeout=120) == 75
    (saved,) = (
        int(path.name)
        for path in (tmp_path / "run" / "checkpoints").iterdir()
        if path.name.isdecimal()
    )
    assert saved >= 3
    resumed = subprocess.run(
        [*command, "--steps", str(saved + 1)], capture_output=True, text=True, timeout=120
    )
    assert resumed.returncode == 0, resumed.stderr
    assert [json.loads(line)["step"] for line in metrics.read_text().splitlines()] == list(
        range(1, saved + 2)
    )
