"""Two processes under one controller switch together, forth and back, with the losses of a run that
does not switch.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import F32_RELATIVE, free_port
from quick_flags import QUICK_FLAGS

PROCESS, TESTS = Path(__file__).parent / "two_processes.py", Path(__file__).parents[1]
STEPS = 20
"""From the decision on a switch to the end of its trial it is ten steps at most, since processes
exchange commands every two steps or more often (two_processes.py)."""
THERE, BACK = "pipe=2,tensor=2", "data=4"


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_text("".join(f"{n} times {n} is {n * n}.\n" for n in range(500)))
    return path


def run(run_dir, text, script, keep=True):
    """The last line of each process's output; losses by step; switch events."""
    address = f"127.0.0.1:{free_port()}"
    options = json.dumps({"mesh": "fsdp=4", "steps": STEPS, "script": script, "keep": keep})
    processes = [
        subprocess.Popen(
            [sys.executable, PROCESS, str(number), address, run_dir, text, options],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={
                "PYTHONPATH": f"{TESTS}:{PROCESS.parent}",
                "PATH": "",
                "HOME": str(run_dir.parent),
                "JAX_PLATFORMS": "cpu",
                "XLA_FLAGS": QUICK_FLAGS,
            },
        )
        for number in range(2)
    ]
    outputs = [process.communicate(timeout=300) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], [
        errors[-2000:] for _, errors in outputs
    ]
    losses = [
        json.loads(line)["loss"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()
    ]
    events = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    return (
        [json.loads(output.splitlines()[-1]) for output, _ in outputs],
        losses,
        [event for event in events if event["event"] in ("remesh", "rollback")],
    )


# Takes half a minute, once for the file: two processes start and train without a switch.
@pytest.fixture(scope="module")
def unswitched_losses(tmp_path_factory, text):
    _, losses, moves = run(tmp_path_factory.mktemp("stayed") / "run", text, {})
    assert moves == []
    return losses


# Takes over a minute: two processes compile two plans and the moves between them.
def test_both_processes_switch_at_the_same_boundary(tmp_path, text, unswitched_losses):
    outputs, losses, moves = run(tmp_path / "run", text, {"4": THERE, "10": BACK})
    assert [(move["event"], move["layout"].split(", ")[0]) for move in moves] == [
        ("remesh", f"mesh {mesh}") for mesh in (THERE, BACK)
    ]
    assert moves[0]["step"] < moves[1]["step"] < STEPS
    assert outputs[0]["plan"] == outputs[1]["plan"]
    assert outputs[0]["plan"].startswith("mesh data=4")
    assert losses == pytest.approx(unswitched_losses, rel=F32_RELATIVE)


# Takes a minute: two processes compile two plans, and the moves to the second one and back.
def test_both_processes_take_back_a_plan_that_is_not_kept(tmp_path, text, unswitched_losses):
    outputs, losses, moves = run(tmp_path / "run", text, {"4": THERE}, keep=False)
    assert [move["event"] for move in moves] == ["remesh", "rollback"]
    assert outputs[0]["plan"] == outputs[1]["plan"]
    assert outputs[0]["plan"].startswith("mesh fsdp=4")
    assert any(THERE in message and "failed" in message for message in outputs[0]["messages"])
    assert losses == pytest.approx(unswitched_losses, rel=F32_RELATIVE)
