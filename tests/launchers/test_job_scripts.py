"""Signals and exit codes in the job scripts, with test programs in place of the launchers."""

import os
import signal
import subprocess
import sys
import time

import pytest
from jobs import DEPLOY, ROOT, until, without_launcher_variables

WAITS = """trap 'touch $there/heard; exit 75' USR1
touch $there/began
for _ in {1..200}; do sleep 0.05; done"""
"""A program that runs for 10 s unless it gets SIGUSR1."""


@pytest.fixture
def script(tmp_path):
    """Starts a script of deploy/ with programs that precede others in PATH."""
    programs, started = tmp_path / "programs", []
    programs.mkdir()

    def start(name, *arguments, on_hangup="default", environment=None, **bodies):
        for program, body in bodies.items():
            (programs / program).write_text(f"#!/bin/bash\nthere={tmp_path}\n{body}\n")
            (programs / program).chmod(0o755)
        process = subprocess.Popen(
            # These tests may run under nohup, or in a shell's background.
            [
                "env",
                "--default-signal=INT",
                f"--{on_hangup}-signal=HUP",
                "bash",
                DEPLOY / name,
                *arguments,
            ],
            cwd=ROOT,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=without_launcher_variables()
            | {
                "PATH": f"{programs}:{os.environ['PATH']}",
                "RUN_DIR": str(tmp_path / "run"),
                "PYTHON": sys.executable,
            }
            | (environment or {}),
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def mpirun(script, **options):
    return script(
        "mpirun.sh",
        "-n",
        "2",
        "--",
        "--a-flag",
        mpirun=f'[ "${{*: -2:1}}" = -c ] && exit 0  # whether Python can be started\n{WAITS}',
        **options,
    )


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_every_signal_reaches_mpirun_as_a_request_to_save(script, tmp_path, number):
    process = mpirun(script)
    until((tmp_path / "began").exists, "mpirun runs", str)
    process.send_signal(number)
    assert (process.wait(20), (tmp_path / "heard").exists()) == (75, True)


def test_under_nohup_mpirun_is_not_told_of_a_closed_terminal(script, tmp_path):
    process = mpirun(script, on_hangup="ignore")
    until((tmp_path / "began").exists, "mpirun runs", str)
    process.send_signal(signal.SIGHUP)
    time.sleep(0.3)  # the signal must have no effect
    assert (process.poll(), (tmp_path / "heard").exists()) == (None, False)
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 75


def slurm(script, *, srun, python=sys.executable, restarts=0, **programs):
    """Run slurm.sbatch in a cluster that does not requeue on exit code 75, so that the script
    requeues itself.
    """
    return script(
        "slurm.sbatch",
        "--a-flag",
        environment={
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NODELIST": "n1",
            "SLURM_RESTART_COUNT": str(restarts),
            "PYTHON": str(python),
        },
        srun=srun,
        scontrol='echo "$@" >> $there/asked',
        squeue="echo RUNNING",
        **programs,
    )


@pytest.mark.parametrize(
    ("mode", "code"), [(None, 127), (0o644, 126)], ids=["not there", "no program"]
)
def test_a_python_that_cannot_be_started_is_a_user_mistake(script, tmp_path, mode, code):
    python = tmp_path / "python"
    if mode is not None:
        python.write_text("#!/bin/bash\n")
        python.chmod(mode)
    process = slurm(script, python=python, srun='while [ "$1" != bash ]; do shift; done\n"$@"')
    output = process.communicate(timeout=20)[0]
    assert process.returncode == 2, output
    assert f"cannot start {python}" in output
    assert not (tmp_path / "asked").exists(), f"{code} is not worth another start"
    assert not list(tmp_path.glob("*.mistake-*"))


@pytest.mark.parametrize("code", [2, 76])
def test_exit_codes_that_a_restart_would_repeat_are_not_restarted(script, tmp_path, code):
    """One task exits with that code, the others are killed for it, and srun returns their code."""
    python = tmp_path / "python"
    python.write_text(f"#!/bin/bash\nexit {code}\n")
    python.chmod(0o755)
    process = slurm(
        script, python=python, srun='while [ "$1" != bash ]; do shift; done\n"$@"\nexit 137'
    )
    output = process.communicate(timeout=20)[0]
    assert (process.returncode, (tmp_path / "asked").exists()) == (code, False), output
    assert not list(tmp_path.glob("*.mistake-*"))


def test_a_python_missing_after_a_restart_requeues_the_job(script, tmp_path):
    process = slurm(
        script,
        python=tmp_path / "python",
        srun='while [ "$1" != bash ]; do shift; done\n"$@"',
        restarts=3,
    )
    output = process.communicate(timeout=20)[0]
    assert (process.returncode, (tmp_path / "asked").read_text().splitlines()[-1]) == (
        75,
        "requeue 7",
    ), output
    assert f"cannot start {tmp_path / 'python'}" in output


def test_a_warning_signal_before_srun_starts_is_not_lost(script, tmp_path):
    """It arrives while the script removes the old mistake file."""
    process = slurm(script, srun=WAITS, rm='kill -USR1 $PPID\n/bin/rm "$@"')
    output = process.communicate(timeout=20)[0]
    assert process.returncode == 75, output
    assert not (tmp_path / "began").exists(), "there is no time for it"
    assert (tmp_path / "asked").read_text().splitlines()[-1] == "requeue 7"


def test_a_warning_signal_is_passed_on(script, tmp_path):
    process = slurm(script, srun=WAITS)
    until((tmp_path / "began").exists, "srun runs", str)
    process.send_signal(signal.SIGUSR1)
    assert (process.wait(20), (tmp_path / "heard").exists()) == (75, True)
    assert (tmp_path / "asked").read_text().splitlines()[-1] == "requeue 7"
