"""Commands that the program prints can be typed where it was started."""

import sys
from pathlib import Path

import pytest

from optimus_jax.system.command import typed_command

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("started", "typed"),
    [
        ("scripts/plan.py", "python scripts/train.py"),
        ("./scripts/train.py", "python scripts/train.py"),
        ("optimus plan", "optimus train"),
        ("/venv/bin/optimus", "optimus train"),
        ("mine.py", "optimus train"),
        ("elsewhere/plan.py", "optimus train"),
        ("", "optimus train"),
    ],
)
def test_a_command_is_named_as_the_program_was_started(started, typed, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", [started])
    assert typed_command("train") == typed


def test_a_script_of_another_folder_is_named_by_its_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(ROOT / "scripts" / "plan.py")])
    assert typed_command("tokenize") == f"python {ROOT / 'scripts' / 'tokenize.py'}"


def test_every_script_is_a_command():
    for name in (path.stem for path in (ROOT / "scripts").glob("*.py")):
        assert (ROOT / "optimus_jax" / "cli" / f"{name}.py").exists()
