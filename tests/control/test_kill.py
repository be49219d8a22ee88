"""A run that is killed repeatedly during switches loses nothing: the short version of
benchmarks/kill_fuzz.py.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

from quick_flags import QUICK_FLAGS

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "kill_fuzz.py"
ENVIRONMENT = {"XLA_FLAGS": QUICK_FLAGS, "OPENBLAS_NUM_THREADS": "1"}
"""Compile without optimisation, and use no threads, since processes are forked from one that has
imported everything.
"""


# Takes over two minutes: a run is killed in every phase of a switch, and each start compiles its
# steps.
def test_a_run_that_is_killed_in_every_phase_of_a_switch_loses_nothing():
    """One run, killed while it prepares, quiesces (half a line of the journal is written), moves,
    commits, in the first steps, and when it keeps the plan. The script checks the invariants, and
    fails if one does not hold.
    """
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XLA_"))
    }
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--essential"],
        env=environment | ENVIRONMENT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    *killed, last = json.loads(done.stdout.splitlines()[-1])
    assert [row["phase"] for row in killed] == [
        "prepare",
        "quiesce",
        "move",
        "commit",
        "canary",
        "canary",
    ]
    assert all(row["killed"] for row in killed)
    assert not last["killed"]
    assert [row["in_a_switch"] for row in killed] == [False, False, True, True, True, True], (
        "the journal knows of the switch once it has begun"
    )
    assert {row["goes_on_under"] for row in killed} == {"data=8"}, (
        "a switch without an end has not been"
    )
