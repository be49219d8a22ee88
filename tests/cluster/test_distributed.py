"""Runs of two processes, each with its own devices."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import F32_RELATIVE, free_port

TRAIN, LAUNCH = (Path(__file__).parents[2] / "scripts" / name for name in ("train.py", "launch.py"))
SMALL = [
    "--model",
    "gpt2-nano",
    "--steps",
    "3",
    "--global-batch",
    "8",
    "--seq-len",
    "32",
    "--eval-every",
    "0",
    "--progress",
    "none",
    "--set",
    "model.num_layers=1",
    "--set",
    "model.embed_dim=32",
    "--set",
    "model.mlp_dim=64",
    "--set",
    "model.head_dim=4",
]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_text("".join(f"{n} times {n} is {n * n}.\n" for n in range(500)))
    return str(path)


def start(run_dir, text, *flags, cwd=None):
    return subprocess.Popen(
        [sys.executable, TRAIN, *SMALL, "--data", text, "--run-dir", run_dir, *flags],
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process):
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    return errors


def losses(run_dir):
    return [
        json.loads(line)["loss"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()
    ]


@pytest.fixture(scope="module")
def one_process(tmp_path_factory, text):
    run_dir = tmp_path_factory.mktemp("one") / "run"
    finish(start(run_dir, text, "--cpu-devices", "1"))
    return losses(run_dir)


def test_two_launched_processes_match_one_process_and_can_be_resumed(tmp_path, text, one_process):
    """Each axis by itself, and more processes: see test_process_groups.py."""
    run_dir, shown = tmp_path / "run", ["plain" if flag == "none" else flag for flag in SMALL]
    launched = subprocess.run(
        [
            sys.executable,
            LAUNCH,
            "--processes",
            "2",
            "--cpu-devices",
            "2",
            "--",
            "train.py",
            *shown,
            "--data",
            text,
            "--run-dir",
            run_dir,
            "--mesh",
            "fsdp=2,tensor=2",
        ],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert launched.returncode == 0, launched.stderr
    assert losses(run_dir) == pytest.approx(one_process, rel=F32_RELATIVE)
    started, plan = (
        json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()[:2]
    )
    assert "4 x cpu (cpu) in 2 processes" in started["devices"]
    assert (started["launcher"], plan["crosses"]) == ("environment", {"fsdp": "processes"})
    assert "fsdp crosses processes" in launched.stdout

    resumed = subprocess.run(
        [
            sys.executable,
            TRAIN,
            "--run-dir",
            run_dir,
            "--resume",
            "--steps",
            "4",
            "--mesh",
            "auto",
            "--cpu-devices",
            "1",
        ],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert resumed.returncode == 0, resumed.stderr
    assert len(losses(run_dir)) == 4
    assert losses(run_dir)[:3] == pytest.approx(one_process, rel=F32_RELATIVE)


def test_an_error_of_one_process_ends_both(tmp_path, text):
    """As on a host that cannot read the data."""
    run_dir, address = tmp_path / "run", f"127.0.0.1:{free_port()}"
    processes = [
        start(
            run_dir,
            Path(text).name,
            "--mesh",
            "fsdp=4",
            "--cpu-devices",
            "2",
            "--coordinator",
            address,
            "--num-processes",
            "2",
            "--process-id",
            str(number),
            cwd=place,
        )
        for number, place in enumerate((tmp_path, Path(text).parent))
    ]
    errors = [process.communicate(timeout=300)[1] for process in processes]
    assert [process.returncode for process in processes] == [2, 2]
    assert "no such data file" in errors[0]
    assert (
        "error: another process of this run cannot continue\n  given: process 0 of 2" in errors[1]
    )
    assert all(f"\n  in process {number} of 2\n" in text for number, text in enumerate(errors))
    assert not any("Traceback" in text for text in errors)
    assert not run_dir.exists()


@pytest.mark.parametrize(
    ("flag", "values", "setting", "shown"),
    [
        pytest.param(
            *("--lr", ("1e-3", "2e-3"), "optimizer.lr", ("0.001", "0.002")),
            marks=pytest.mark.nightly,
        ),
        # the second is invalid, which only its process would find
        ("--mesh", ("data=2", "data=3"), "parallel.mesh", ('"data=2"', '"data=3"')),
    ],
)
def test_processes_with_different_settings_do_not_train_together(
    tmp_path, text, flag, values, setting, shown
):
    coordinator = f"127.0.0.1:{free_port()}"
    processes = [
        start(
            tmp_path / "run",
            text,
            "--cpu-devices",
            "1",
            *([] if flag == "--mesh" else ["--mesh", "data=2"]),
            flag,
            value,
            "--coordinator",
            coordinator,
            "--num-processes",
            "2",
            "--process-id",
            str(number),
        )
        for number, value in enumerate(values)
    ]
    for process, here in zip(processes, shown, strict=True):
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 2, errors
        assert f"the processes of this run do not agree on {setting}\n" in errors
        assert f"process 1 differs from process 0; here it is {here}\n" in errors
    assert not (tmp_path / "run").exists()


@pytest.mark.nightly  # by day, test_agreement.py has errors of all processes
def test_an_impossible_mesh_is_an_error_of_all_processes(tmp_path, text):
    coordinator = f"127.0.0.1:{free_port()}"
    processes = [
        start(
            tmp_path / "run",
            text,
            "--cpu-devices",
            "1",
            "--mesh",
            "data=3",
            "--coordinator",
            coordinator,
            "--num-processes",
            "2",
            "--process-id",
            str(number),
        )
        for number in range(2)
    ]
    for process in processes:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 2, errors
        assert "the mesh needs 3 devices; this run has 2" in errors
