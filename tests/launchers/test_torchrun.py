"""The real torchrun of the installed torch: its two processes form one run."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from jobs import ROOT, without_launcher_variables

EXAMPLE = ROOT / "examples" / "several_hosts.py"


@pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed")
def test_two_processes_of_torchrun_form_one_run(tmp_path: Path):
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(EXAMPLE)],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=tmp_path,
        env=without_launcher_variables() | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    # Gloo writes ends of lines by itself, so a line of ours may stand behind one of Gloo's.
    assert done.stdout.count("done on data=2,fsdp=4: ") == 2
    assert "2 (torchrun: process 0 of 2" in done.stdout
