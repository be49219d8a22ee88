"""Runs of two and four processes match one process, whichever mesh axis crosses processes, and
their checkpoints can be resumed with one, two and eight.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import F32_RELATIVE
from quick_flags import QUICK_FLAGS

GROUPS = Path(__file__).parent / "process_groups.py"
TINY = {
    "model": "gpt2-nano",
    "steps": 3,
    "global_batch": 8,
    "seq_len": 32,
    "eval_every": 0,
    "progress": "none",
    "model.num_layers": 2,
    "model.embed_dim": 32,
    "model.mlp_dim": 64,
    "model.head_dim": 4,
    "model.vocab_size": 264,
}
TWO = {
    "data=4": {"data": "hosts"},
    "tensor=4": {"tensor": "hosts"},
    "pipe=2,fsdp=2": {"pipe": "hosts"},
}
"""Meshes of two processes with two devices each, and what crosses them where each process is a
host; fsdp: test_distributed.py."""
FOUR = {
    "pipe=2,tensor=4": {"pipe": "hosts", "tensor": "processes"},
    "data=2,fsdp=4": {"data": "hosts", "fsdp": "processes"},
}
"""Meshes of four processes with two devices each, where processes 0 and 2 are on one host, 1 and 3
on another.
"""
SAVED = "data=2,fsdp=4"


@pytest.fixture(scope="module")
def groups(tmp_path_factory):
    """Functions that start a group of processes and return their answers."""
    there = tmp_path_factory.mktemp("groups")
    (there / "text.txt").write_text("".join(f"{n} times {n} is {n * n}.\n" for n in range(500)))
    process = subprocess.Popen(
        [sys.executable, GROUPS],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={
            "PATH": "",
            "HOME": str(there),
            "PYTHONPATH": ":".join(sys.path),
            "XLA_FLAGS": QUICK_FLAGS,
        },
    )
    assert process.stdin is not None
    assert process.stdout is not None

    def ask(processes, devices, tasks, hosts=None):
        process.stdin.write(
            json.dumps({"processes": processes, "devices": devices, "hosts": hosts, "tasks": tasks})
            + "\n"
        )
        process.stdin.flush()
        answers = json.loads(process.stdout.readline())
        assert all(isinstance(each, list) for each in answers), "\n".join(
            each for each in answers if isinstance(each, str)
        )
        return answers

    def run_dir(mesh, processes):
        return str(there / f"{mesh}-{processes}")

    def train(processes, devices, meshes, hosts=None, **more):
        tasks = [
            TINY
            | {
                "mesh": mesh,
                "data": str(there / "text.txt"),
                "run_dir": run_dir(mesh, processes),
                "saves": mesh == SAVED,
                **more,
            }
            for mesh in meshes
        ]
        answers = ask(processes, devices, tasks, hosts)
        return {mesh: [each[place] for each in answers] for place, mesh in enumerate(meshes)}

    def resume(mesh, processes, *target):
        return ask(
            *target[:2],
            [
                {
                    "run_dir": run_dir(mesh, processes),
                    "resume": True,
                    "mesh": target[2],
                    "progress": "none",
                }
            ],
        )

    try:
        yield train, resume
        process.stdin.close()
        assert process.wait(60) == 0
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def one_process_losses(groups):
    return groups[0](1, 1, ["data=1"])["data=1"][0]["losses"]


# Takes half a minute, once for the file: two processes train on every mesh of TWO.
@pytest.fixture(scope="module")
def two(groups):
    return groups[0](2, 2, list(TWO), hosts=["a", "b"])


# Takes a minute, once for the file: four processes share the cores and train on every mesh of FOUR.
@pytest.fixture(scope="module")
def four(groups):
    return groups[0](4, 2, list(FOUR), hosts=["a", "b", "a", "b"])


def crosses(answers):
    return next(event["crosses"] for event in answers[0]["events"] if event["event"] == "plan")


@pytest.mark.parametrize("mesh", TWO)
def test_two_processes_match_the_losses_of_one(two, one_process_losses, mesh):
    assert two[mesh][0]["losses"] == pytest.approx(one_process_losses, rel=F32_RELATIVE)
    assert crosses(two[mesh]) == TWO[mesh]


@pytest.mark.parametrize("mesh", FOUR)
def test_four_processes_match_the_losses_of_one(four, one_process_losses, mesh):
    """JAX lists the devices of process 1 after those of process 0; the mesh puts those of process 2
    there, which is on the same host.
    """
    assert four[mesh][0]["losses"] == pytest.approx(one_process_losses, rel=F32_RELATIVE)
    assert crosses(four[mesh]) == FOUR[mesh]


# Takes half a minute: two processes compile three programs and the moves between them.
def test_two_processes_move_their_loop_together(groups, one_process_losses):
    moves = {"1": "tensor=4", "2": "pipe=2,fsdp=2"}
    answers = groups[0](2, 2, ["fsdp=4"], hosts=["a", "b"], moves=moves)["fsdp=4"]
    assert answers[0]["losses"] == pytest.approx(one_process_losses, rel=F32_RELATIVE)
    found = {
        str(event["step"]): event["layout"].split(", ")[0].removeprefix("mesh ")
        for event in answers[0]["events"]
        if event["event"] == "remesh"
    }
    assert found == moves


def test_each_process_loads_only_its_rows(two, four):
    assert [answer["rows"] for answer in two["data=4"]] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert [answer["rows"] for answer in two["tensor=4"]] == [list(range(8))] * 2
    assert [answer["rows"] for answer in four[SAVED]] == [[0, 1], [4, 5], [2, 3], [6, 7]]


def test_the_start_event_names_the_launcher_and_devices(two):
    starts = [
        next(event for event in answers[0]["events"] if event["event"] == "start")
        for answers in two.values()
    ]
    assert [start["launcher"] for start in starts] == ["flags", "program", "program"]
    assert starts[0]["devices"] == "4 x cpu (cpu) in 2 processes on 2 hosts"


@pytest.mark.parametrize(
    "target",
    [(1, 2, "data=2"), (2, 1, "fsdp=2"), (8, 1, "data=2,fsdp=4")],
    ids=["one", "two", "eight"],
)
def test_a_checkpoint_of_four_processes_resumes_with_other_numbers(groups, four, target):
    answers = groups[1](SAVED, 4, *target)
    assert {
        name
        for name, digest in answers[0][0]["state"].items()
        if digest != four[SAVED][0]["state"][name]
    } == set()
    assert answers[0][0]["events"][-1]["step"] == TINY["steps"]
