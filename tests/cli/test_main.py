"""`optimus COMMAND`, `python -m optimus_jax COMMAND` and the script of the same name do
the same.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from optimus_jax.cli import main as cli
from optimus_jax.version import VERSION

SCRIPTS = Path(__file__).parents[2] / "scripts"


def run_python(*arguments):
    return subprocess.run(
        [sys.executable, *map(str, arguments)], capture_output=True, text=True, check=False
    )


def optimus(monkeypatch, *arguments):
    """The exit code of `optimus` in this process."""
    monkeypatch.setattr(sys, "argv", ["optimus", *arguments])
    for stream in ("stdout", "stderr"):  # restored when the test ends
        monkeypatch.setattr(sys, stream, getattr(sys, stream))
    return cli.main()


def test_every_command_has_a_script_and_a_module():
    assert {path.stem for path in SCRIPTS.glob("*.py")} == set(cli.COMMANDS)
    modules = {path.stem for path in Path(cli.__file__).parent.glob("*.py")}
    assert modules == {
        *cli.COMMANDS,
        "__init__",
        "main",
        "model_flags",
        "page_files",
        "plan_output",
        "this_machine",
    }


def test_a_script_and_the_module_print_the_same():
    flags = ("--stages", 2, "--microbatches", 3)
    script = run_python(SCRIPTS / "schedule.py", *flags)
    module = run_python("-m", "optimus_jax", "schedule", *flags)
    assert script.returncode == module.returncode == 0, script.stderr + module.stderr
    assert script.stdout == module.stdout != ""


def test_help_shows_the_command_as_it_was_called(monkeypatch, capsys):
    with pytest.raises(SystemExit):
        optimus(monkeypatch, "plan", "--help")
    assert capsys.readouterr().out.startswith("usage: optimus plan ")


def test_without_a_command_all_commands_are_listed(monkeypatch, capsys):
    assert optimus(monkeypatch) == optimus(monkeypatch, "--help") == 0
    shown = capsys.readouterr().out
    assert all(f"\n  {name} " in shown for name in cli.COMMANDS)
    assert optimus(monkeypatch, "--version") == 0
    assert capsys.readouterr().out == f"optimus_jax {VERSION}\n"


def test_a_typo_gets_a_suggestion(monkeypatch, capsys):
    assert optimus(monkeypatch, "trian", "--model", "gpt2-nano") == 2
    message = capsys.readouterr().err
    assert message.startswith("error: there is no such command")
    assert "'train'" in message
