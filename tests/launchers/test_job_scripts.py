"""What the job scripts do with signals and exit codes, with programs of ours in place of the
engine's.
"""

import os
import signal
import subprocess
import sys
import time

import pytest
from jobs import DEPLOY, ROOT, until, without_engines

WAITS = """trap 'touch $there/heard; exit 75' USR1
touch $there/began
for _ in {1..200}; do sleep 0.05; done"""
"""A program that runs for 10 s if it is not told to end."""


@pytest.fixture
def script(tmp_path):
    """Starts one of deploy/ where programs of these names come before others."""
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
            env=without_engines()
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
def test_mpirun_is_told_to_save_by_every_signal(script, tmp_path, number):
    process = mpirun(script)
    until((tmp_path / "began").exists, "mpirun runs", str)
    process.send_signal(number)
    assert (process.wait(20), (tmp_path / "heard").exists()) == (75, True)


def test_under_nohup_mpirun_is_told_nothing_of_a_terminal_that_closes(script, tmp_path):
    process = mpirun(script, on_hangup="ignore")
    until((tmp_path / "began").exists, "mpirun runs", str)
    process.send_signal(signal.SIGHUP)
    time.sleep(0.3)  # nothing is to come of it
    assert (process.poll(), (tmp_path / "heard").exists()) == (None, False)
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 75


def slurm(script, *, srun, python=sys.executable, restarts=0, **programs):
    """In a cluster that knows nothing of 75, so that the script asks for another start."""
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
def test_a_python_that_cannot_be_started_is_a_mistake(script, tmp_path, mode, code):
    python = tmp_path / "python"
    if mode is not None:
        python.write_text("#!/bin/bash\n")
        python.chmod(mode)
    process = slurm(script, python=python, srun='while [ "$1" != bash ]; do shift; done\n"$@"')
    said = process.communicate(timeout=20)[0]
    assert process.returncode == 2, said
    assert f"cannot start {python}" in said
    assert not (tmp_path / "asked").exists(), f"{code} is not worth another start"
    assert not list(tmp_path.glob("*.mistake-*"))


@pytest.mark.parametrize("code", [2, 76])
def test_what_a_restart_would_only_repeat_is_not_started_again(script, tmp_path, code):
    """One task ends with that, the others are killed for it, and srun's own code is theirs."""
    python = tmp_path / "python"
    python.write_text(f"#!/bin/bash\nexit {code}\n")
    python.chmod(0o755)
    process = slurm(
        script, python=python, srun='while [ "$1" != bash ]; do shift; done\n"$@"\nexit 137'
    )
    said = process.communicate(timeout=20)[0]
    assert (process.returncode, (tmp_path / "asked").exists()) == (code, False), said
    assert not list(tmp_path.glob("*.mistake-*"))


def test_a_python_that_was_there_before_is_on_a_node_that_lacks_a_mount(script, tmp_path):
    process = slurm(
        script,
        python=tmp_path / "python",
        srun='while [ "$1" != bash ]; do shift; done\n"$@"',
        restarts=3,
    )
    said = process.communicate(timeout=20)[0]
    assert (process.returncode, (tmp_path / "asked").read_text().splitlines()[-1]) == (
        75,
        "requeue 7",
    ), said
    assert f"cannot start {tmp_path / 'python'}" in said


def test_a_warning_before_there_is_a_step_is_not_lost(script, tmp_path):
    """It comes while the script makes room for the word of a mistake."""
    process = slurm(script, srun=WAITS, rm='kill -USR1 $PPID\n/bin/rm "$@"')
    said = process.communicate(timeout=20)[0]
    assert process.returncode == 75, said
    assert not (tmp_path / "began").exists(), "there is no time for it"
    assert (tmp_path / "asked").read_text().splitlines()[-1] == "requeue 7"


def test_a_warning_is_passed_on(script, tmp_path):
    process = slurm(script, srun=WAITS)
    until((tmp_path / "began").exists, "srun runs", str)
    process.send_signal(signal.SIGUSR1)
    assert (process.wait(20), (tmp_path / "heard").exists()) == (75, True)
    assert (tmp_path / "asked").read_text().splitlines()[-1] == "requeue 7"
