"""The life of a job on a real SLURM cluster of three nodes, started by our job script without
distributed flags.
"""

import os
import signal

import pytest
from jobs import CHECKPOINT_EVERY, DEPLOY, ROOT, WatchedRun
from slurm_cluster import NODES, Slurm, missing_requirement

pytestmark = pytest.mark.skipif(
    missing_requirement() is not None, reason=f"no SLURM: {missing_requirement()}"
)


@pytest.fixture(scope="module")
def slurm():
    with Slurm() as cluster:
        yield cluster


class Job(WatchedRun):
    """A job of deploy/slurm.sbatch."""

    def __init__(self, slurm, there, *options, steps):
        super().__init__(there, steps=steps)
        self.slurm = slurm
        self.id = slurm.run(
            "sbatch",
            "--parsable",
            f"--chdir={ROOT}",
            f"--output={slurm.there}/job-%j.log",
            *options,
            str(DEPLOY / "slurm.sbatch"),
            *self.flags,
            environment=self.environment,
        ).stdout.strip()

    def wait_for_step(self, step):
        super().wait_for_step(step, self.slurm.logs)

    def wait_for_start(self, times):
        return super().wait_for_start(times, self.slurm.logs)


def stops(job):
    """The ends of a job's starts, without those that an error ended: of a lost process, say."""
    return [event for event in job.events("end") if event["reason"] != "error"]


# Takes up to three minutes: a SLURM cluster starts the job four times, and waits before each
# restart. By day, the tests below, test_job_scripts.py and test_mpirun.py try its parts.
@pytest.mark.nightly
def test_a_job_survives_a_killed_process_preemption_and_a_lost_node(slurm, tmp_path):
    job = Job(slurm, tmp_path, "--nodes=1-3", steps=100_000)
    start = job.wait_for_start(1)
    assert (start["launcher"], start["launch"]) == (
        "SLURM",
        f"process 0 of 3 of step {job.id}.0 on 127.0.0.[1-3]",
    )
    # all on one host, although SLURM has three nodes
    assert start["devices"] == "3 x cpu (cpu) in 3 processes"

    job.wait_for_step(CHECKPOINT_EVERY + 5)
    os.kill(slurm.tasks(job.id)[1], signal.SIGKILL)
    resumed = job.wait_for_start(2)
    assert (resumed["step"] > 0, resumed["step"] % CHECKPOINT_EVERY) == (True, 0)

    job.wait_for_step(resumed["step"] + 5)
    urgent = slurm.run(
        "sbatch",
        "--parsable",
        "--partition=urgent",
        "--nodes=3",
        "--output=/dev/null",
        "--wrap",
        "true",
    ).stdout.strip()
    slurm.until(lambda: slurm.state(urgent)["JobState"] == "COMPLETED", "the urgent job is done")
    [ended] = stops(job)
    assert ended["reason"] == "terminate"
    assert job.wait_for_start(3)["step"] == ended["step"]

    job.wait_for_step(ended["step"] + CHECKPOINT_EVERY + 5)
    slurm.lose(NODES[2])
    resumed = job.wait_for_start(4)
    assert resumed["launch"] == f"process 0 of 2 of step {job.id}.0 on 127.0.0.[1-2]"
    assert (resumed["step"] >= ended["step"], resumed["step"] % CHECKPOINT_EVERY == 0) == (
        True,
        True,
    )
    job.wait_for_step(resumed["step"] + 5)
    plans = [event["layout"].split(", ")[0] for event in job.events("plan")]
    assert [plans[0], plans[-1]] == ["mesh data=3", "mesh data=2"]

    slurm.run("scancel", job.id)
    slurm.until(lambda: len(stops(job)) == 2, "the cancelled job has saved")
    slurm.until(lambda: slurm.state(job.id)["JobState"] == "CANCELLED", "the job has ended")
    assert slurm.state(job.id)["Restarts"] == "3"
    assert job.steps == list(range(1, stops(job)[-1]["step"] + 1))


@pytest.fixture
def program(tmp_path):
    """Writes what the job script runs in place of Python; it knows from SLURM which start it is."""
    path = tmp_path / "program"

    def write(body):
        path.write_text(f"#!/bin/bash\nagain=$SLURM_RESTART_COUNT there={tmp_path}\n{body}\n")
        path.chmod(0o755)
        return {"PYTHON": str(path), "RUN_DIR": str(tmp_path / "run")}

    return write


def submit(slurm, environment, nodes=1):
    return slurm.run(
        "sbatch",
        "--parsable",
        f"--chdir={ROOT}",
        f"--output={slurm.there}/job-%j.log",
        f"--nodes={nodes}",
        str(DEPLOY / "slurm.sbatch"),
        "--a-flag",
        environment=environment,
    ).stdout.strip()


@pytest.mark.parametrize(("code", "state"), [(0, "COMPLETED"), (2, "FAILED")])
def test_completed_jobs_and_user_mistakes_are_not_restarted(slurm, program, code, state):
    job = submit(slurm, program(f"exit {code}"))
    slurm.until(lambda: slurm.state(job)["JobState"] == state, f"the job is {state}")
    assert (slurm.state(job)["Restarts"], slurm.state(job)["ExitCode"]) == ("0", f"{code}:0")


def test_a_user_mistake_in_one_task_is_not_restarted(slurm, program):
    """As with a typo: tasks that are still importing when the first task exits are terminated,
    which by itself would requeue the job.
    """
    job = submit(
        slurm,
        program("""
        trap 'exit 75' TERM USR1
        [ "$SLURM_PROCID" = 1 ] && exit 2
        while :; do sleep 0.1; done""")
        | {"RUN_DIR": "of-no-folder"},
        nodes=2,
    )
    slurm.until(lambda: slurm.state(job)["JobState"] == "FAILED", "the job has failed")
    assert (slurm.state(job)["Restarts"], slurm.state(job)["ExitCode"]) == ("0", "2:0")


def test_a_warning_signal_requeues_the_job_without_requeue_exit_75(tmp_path, program):
    with Slurm(requeue_exit=99) as slurm:
        job = submit(
            slurm,
            program("""
            [ "$again" ] && exit 0
            trap 'exit 75' USR1
            touch $there/ready
            while :; do sleep 0.1; done"""),
        )
        slurm.until((tmp_path / "ready").exists, "the program is there")
        slurm.run("scancel", "--batch", "--signal=USR1", job)
        slurm.until(lambda: slurm.state(job)["JobState"] == "COMPLETED", "the job is done")
        assert slurm.state(job)["Restarts"] == "1"
