"""A pipelined step compiles for 8 and 64 H100s, sends asynchronously and fits where the plan says
so.

Needs the CUDA compiler's wheels (extra plan-gpu), but no GPU.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import MEMORY_ESTIMATE

from optimus_jax.planning.ahead_of_time.compile_check import can_compile

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "compile_for_gpu.py"

pytestmark = pytest.mark.skipif(
    not can_compile(), reason="the CUDA compiler is not installed (extra plan-gpu)"
)


def compiled(*arguments: str) -> dict:
    done = subprocess.run(
        [sys.executable, SCRIPT, *arguments], check=True, capture_output=True, text=True
    )
    return json.loads(done.stdout)


@pytest.mark.parametrize("attention", ["xla", "cudnn"])
@pytest.mark.parametrize("mesh", ["pipe=4,tensor=2", "pipe=4,data=8,tensor=2"])
def test_sends_are_asynchronous_and_memory_is_within_the_plan(mesh, attention):
    found = compiled(
        "--model",
        "gpt2",
        "--seq-len",
        "1024",
        "--mesh",
        mesh,
        "--microbatches",
        "8",
        "--set",
        f"parallel.attention={attention}",
    )
    assert len(found["sends"]) >= 2
    assert all(send["work_under"] for send in found["sends"]), "none that the device waits for"
    assert found["state_gib"] + found["temp_gib"] <= (1 + MEMORY_ESTIMATE) * found["estimate_gib"]
    assert found["fits"]
