"""A pipelined step compiles for 8 and 64 H100s, sends asynchronously and fits where the plan says so.

Needs the CUDA compiler's wheels (benchmarks/compile_for_gpu.py names them), but no GPU.
"""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import MEMORY_ESTIMATE

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "compile_for_gpu.py"

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda12_plugin") is None or importlib.util.find_spec("jax_plugins.xla_cuda12") is None,
    reason="the CUDA compiler is not installed (jax-cuda12-pjrt, jax-cuda12-plugin, nvidia-cuda-nvcc-cu12)")


def compiled(*arguments: str) -> dict:
    done = subprocess.run([sys.executable, SCRIPT, *arguments], check=True, capture_output=True, text=True)
    return json.loads(done.stdout)


@pytest.mark.parametrize(("devices", "mesh"), [("8", "pipe=4,tensor=2"), ("64", "pipe=4,data=8,tensor=2")])
def test_sends_are_asynchronous_and_memory_is_within_the_plan(devices, mesh):
    found = compiled("--model", "gpt2", "--seq-len", "1024", "--devices", devices, "--mesh", mesh, "--microbatches", "8")
    assert found["collectives"]["collective-permute-start"] >= 2
    assert "collective-permute" not in found["collectives"], "none that the device waits for"
    assert found["state_gib"] + found["temp_gib"] <= (1 + MEMORY_ESTIMATE) * found["estimate_gib"]
    assert found["estimate_gib"] < found["device_gib"]

