"""The life of a job on a real SLURM of three nodes, started by the job script that we ship: no
distributed flags anywhere.
"""

import os
import signal

import pytest
from jobs import DEPLOY, EVERY, ROOT, Watched
from slurm_cluster import NODES, Slurm, why_not

pytestmark = pytest.mark.skipif(why_not() is not None, reason=f"no SLURM: {why_not()}")


@pytest.fixture(scope="module")
def slurm():
    with Slurm() as cluster:
        yield cluster


class Job(Watched):
    """One that deploy/slurm.sbatch trains."""

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

    def comes_to(self, step):
        super().comes_to(step, self.slurm.logs)

    def has_started(self, times):
        return super().has_started(times, self.slurm.logs)


def test_a_job_outlives_a_killed_process_preemption_and_a_lost_node(slurm, tmp_path):
    job = Job(slurm, tmp_path, "--nodes=1-3", steps=100_000)
    start = job.has_started(1)
    assert (start["engine"], start["launch"]) == (
        "SLURM",
        f"process 0 of 3 of step {job.id}.0 on 127.0.0.[1-3]",
    )
    # on one host, whatever SLURM calls it
    assert start["devices"] == "3 x cpu (cpu) in 3 processes"

    job.comes_to(EVERY + 5)
    os.kill(slurm.tasks(job.id)[1], signal.SIGKILL)
    resumed = job.has_started(2)
    assert (resumed["step"] > 0, resumed["step"] % EVERY) == (True, 0)

    job.comes_to(resumed["step"] + 5)
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
    [ended] = job.events("end")
    assert ended["reason"] == "terminate"
    assert job.has_started(3)["step"] == ended["step"]

    job.comes_to(ended["step"] + EVERY + 5)
    slurm.lose(NODES[2])
    resumed = job.has_started(4)
    assert resumed["launch"] == f"process 0 of 2 of step {job.id}.0 on 127.0.0.[1-2]"
    assert (resumed["step"] >= ended["step"], resumed["step"] % EVERY == 0) == (True, True)
    job.comes_to(resumed["step"] + 5)
    plans = [event["layout"].split(", ")[0] for event in job.events("plan")]
    assert [plans[0], plans[-1]] == ["mesh data=3", "mesh data=2"]

    slurm.run("scancel", job.id)
    slurm.until(lambda: len(job.events("end")) == 2, "the cancelled job has saved")
    slurm.until(lambda: slurm.state(job.id)["JobState"] == "CANCELLED", "the job has ended")
    assert slurm.state(job.id)["Restarts"] == "3"
    assert job.steps == list(range(1, job.events("end")[-1]["step"] + 1))


@pytest.fixture
def program(tmp_path):
    """What the job script runs in place of Python: which start it is, it knows from SLURM."""
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
def test_what_is_done_or_a_mistake_is_not_started_again(slurm, program, code, state):
    job = submit(slurm, program(f"exit {code}"))
    slurm.until(lambda: slurm.state(job)["JobState"] == state, f"the job is {state}")
    assert (slurm.state(job)["Restarts"], slurm.state(job)["ExitCode"]) == ("0", f"{code}:0")


def test_a_mistake_of_the_first_task_is_one_though_the_others_are_killed_for_it(slurm, program):
    """As with a typo: who is still importing when the first task has ended is told to end, which
    for itself would be worth another start.
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


def test_a_warning_ends_in_another_start_on_a_cluster_that_knows_nothing_of_75(tmp_path, program):
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
