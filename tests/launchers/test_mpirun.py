"""Open MPI's mpirun starts the training script by our job script, without distributed flags."""

import os
import shutil
import signal
import subprocess

import pytest
from jobs import CHECKPOINT_EVERY, DEPLOY, ROOT, WatchedRun, environments, python_of

pytestmark = pytest.mark.skipif(
    shutil.which("mpirun") is None, reason="no mpirun here (Debian: apt-get install openmpi-bin)"
)
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def ranks(run):
    """Pids by rank."""
    return {
        int(environment["OMPI_COMM_WORLD_RANK"]): pid
        for pid, environment in environments()
        if environment.get("RUN_DIR") == str(run.run_dir)
        and "OMPI_COMM_WORLD_RANK" in environment
        and python_of(environment, pid)
    }


# Takes half a minute or more: Open MPI starts two processes twice, and ends them after a kill.
def test_a_run_survives_a_killed_process_and_saves_on_sigterm(tmp_path):
    run = WatchedRun(tmp_path, steps=100_000)
    with (tmp_path / "log").open("w") as log:
        script = subprocess.Popen(
            [DEPLOY / "mpirun.sh", "--oversubscribe", "-n", "2", "--", *run.flags],
            cwd=ROOT,
            env=run.environment | AS_ROOT,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    read_log = (tmp_path / "log").read_text
    try:
        start = run.wait_for_start(1, read_log)
        assert (start["launcher"], start["launch"].partition(" (")[0]) == (
            "Open MPI",
            "process 0 of 2",
        )
        run.wait_for_step(CHECKPOINT_EVERY + 5, read_log)
        os.kill(ranks(run)[1], signal.SIGKILL)
        resumed = run.wait_for_start(2, read_log)
        assert (resumed["step"] > 0, resumed["step"] % CHECKPOINT_EVERY) == (True, 0)
        run.wait_for_step(resumed["step"] + 5, read_log)
        script.send_signal(signal.SIGTERM)
        assert script.wait(60) == 75, read_log()
        assert run.events("end")[-1]["reason"] == "terminate"
        assert run.steps == list(range(1, run.events("end")[-1]["step"] + 1))
    finally:
        script.kill()
        for pid in ranks(run).values():
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("arguments", [[], ["-n", "2"], ["--"]])
def test_wrong_arguments_print_the_usage(arguments):
    environment = {name: value for name, value in os.environ.items() if name != "RUN_DIR"}
    shown = subprocess.run(
        [DEPLOY / "mpirun.sh", *arguments], env=environment, capture_output=True, text=True
    )
    assert shown.returncode == 2
    assert shown.stderr.startswith("usage: ")
