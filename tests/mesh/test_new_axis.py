"""A fifth mesh axis is one field: meshes, plans and steps have it, and results are the same."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from quick_flags import QUICK_FLAGS

ROOT = Path(__file__).parents[2]
LAST_FIELD = '''    """Parts of every layer: heads, hidden width and vocabulary."""
'''
FIELD = '''    context: int = 1
    """Parts of a sequence."""
'''
PROGRAM = """
import json
from optimus_jax.config.axes import MESH_AXES
from optimus_jax.run.api import train
with open("text.txt", "w") as file:
    file.write("a few words, again and again\\n" * 2000)
result = train(model="gpt2-nano", data="text.txt", mesh="data=2,tensor=2", cpu_devices=4, steps=2,
               seq_len=32, global_batch=4, eval_every=0, run_dir="run")
found = {"axes": MESH_AXES, "losses": [step.loss for step in result.history],
         "planned": json.load(open("run/plan.json"))["axes"]}
print(json.dumps(found))
"""


def outcome(folder: Path, package: Path) -> dict:
    folder.mkdir()
    own = {"PYTHONPATH": str(package), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": QUICK_FLAGS}
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=folder,
        env=os.environ | own,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    return json.loads(run.stdout.splitlines()[-1])


def test_a_fifth_axis_of_one_device_changes_nothing(tmp_path):
    copy = tmp_path / "package"
    shutil.copytree(ROOT / "optimus_jax", copy / "optimus_jax")
    file = copy / "optimus_jax" / "config" / "axes.py"
    text = file.read_text(encoding="utf-8")
    assert LAST_FIELD in text
    file.write_text(text.replace(LAST_FIELD, LAST_FIELD + FIELD), encoding="utf-8")
    four, five = (
        outcome(tmp_path / name, package) for name, package in (("four", ROOT), ("five", copy))
    )
    assert five["axes"] == [*four["axes"], "context"]
    assert five["planned"] == {**four["planned"], "context": 1}
    assert five["losses"] == four["losses"]
