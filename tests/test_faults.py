"""Faults of a run of two real processes: the short version of benchmarks/faults.py."""

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "faults.py"


def test_a_run_goes_on_after_a_dead_and_after_a_stopped_process(tmp_path):
    """What has to hold is in the script, which fails if it does not: nothing hangs, few steps are lost, and losses are those of a run that nobody disturbed."""
    out = tmp_path / "faults.jsonl"
    done = subprocess.run([sys.executable, SCRIPT, "--out", out, "--repetitions", "1", "--cases", "SIGKILL in a step", "SIGSTOP"],
                          capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    killed, stopped = map(json.loads, out.read_text().splitlines())
    assert [row["same_losses"] and row["starts"] >= 2 for row in (killed, stopped)] == [True, True]
    assert stopped["codes"] == [75, 75], "who was stopped finds out, and the other has not waited for it"
    assert stopped["faults_told"] == 2
    assert any(f"process {stopped['process']} on" in said and "no sign of life" in said for said in stopped["said"])
