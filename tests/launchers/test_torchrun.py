"""The real torchrun of the installed torch: its two processes form one run."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from jobs import ROOT, without_launcher_variables

PROGRAM = """
import jax
jax.config.update("jax_platforms", "cpu")
from optimus_jax.config import DistributedConfig
from optimus_jax.cluster.distributed import connect, disconnect, gather_from_all
from optimus_jax.cluster.launch_detection import find_launch

launch = find_launch(DistributedConfig())
connect(launch, timeout_s=60.0, heartbeat_s=60)
where = f"{launch.launcher} {gather_from_all(launch.process_id)} {launch.bind}\\n"
print(where, end="", flush=True)
disconnect()
"""


@pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed")
def test_two_processes_of_torchrun_form_one_run(tmp_path: Path):
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(script)],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=tmp_path,
        env=without_launcher_variables() | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    # Gloo writes ends of lines by themselves, so a line of ours may stand behind one of Gloo's.
    assert done.stdout.count("torchrun [0, 1] 127.0.0.1\n") == 2
