"""The tutorials of docs/tutorials: every command in a `console` block runs as it is written, and
prints the lines that the page shows.

A line `$ ...` is a command, `\\` at its end continues it, `^C` sends SIGINT to it once the line
above has been printed, and the other lines are its output. In the output, `...` matches anything:
alone on a line it matches any lines, inside a line any text. Decimals and numbers with thousands
separators may differ, and so may the step reached by a command that is stopped by `^C` (`step 11`,
not `step 10/200`).
"""

import dataclasses
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

import pytest

from optimus_jax.run_directory.contents import COMMON, EVENTS, FILES
from optimus_jax.run_directory.directory import RunDirectory

ROOT = Path(__file__).parents[2]
TUTORIALS = ROOT / "docs" / "tutorials"
NAMES = sorted(path.stem for path in TUTORIALS.glob("*.md"))
NEEDS = {"watch_a_run": "first_run"}
"""Tutorials that continue in the directory of another one."""
DAILY = ("first_run", "watch_a_run")
"""Tutorials that `make test` runs; `make nightly` runs the others."""
BLOCK = re.compile(r"^```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NUMBER = r"\d[\d,]*\.\d+|\d+(?:,\d{3})+"
"""Numbers that depend on the machine, the version of Python or this documentation."""
STOP = "^C"


@dataclasses.dataclass(frozen=True)
class Command:
    """A command of a tutorial, and the lines that the page shows below it."""

    text: str
    shown: list[str]


def commands(page: str) -> list[Command]:
    """Every command of a page, in order."""
    found: list[Command] = []
    for block in BLOCK.findall(page):
        continues = False
        for line in block.splitlines():
            if continues:
                last = found[-1]
                found[-1] = Command(last.text + line.strip().removesuffix("\\"), [])
                continues = line.endswith("\\")
            elif line.startswith("$ "):
                found.append(Command(line[2:].removesuffix("\\"), []))
                continues = line.endswith("\\")
            else:
                found[-1].shown.append(line)
    return found


def pattern_of(line: str, *, any_step: bool) -> re.Pattern[str]:
    """The pattern that a printed line has to match, to be the line that a page shows."""
    reached = r"|(?<=step )\d+(?![\d/])" if any_step else ""
    parts = re.split(rf"(\.\.\.|{NUMBER}{reached})", line)
    made = [
        re.escape(part) if number % 2 == 0 else (".*" if part == "..." else r"[\d,.]+")
        for number, part in enumerate(parts)
    ]
    return re.compile("".join(made))


class Expected:
    """The lines that a page shows, compared with what is printed, line by line."""

    def __init__(self, command: Command) -> None:
        self.any_step = STOP in command.shown
        self.left = list(command.shown)
        self.may_skip = False

    def printed(self, line: str) -> bool:
        """Compare a printed line; returns whether to send Ctrl-C now."""
        while self.left and self.left[0] == "...":
            self.may_skip = True
            self.left.pop(0)
        if not self.left or not pattern_of(self.left[0], any_step=self.any_step).fullmatch(line):
            assert self.may_skip, f"printed: {line!r}, the page shows: {self.left[:1]}"
            return False
        self.left.pop(0)
        self.may_skip = False
        if self.left[:1] == [STOP]:
            self.left.pop(0)
            return True
        return False

    def ended(self) -> None:
        """Check that every line of the page has been printed."""
        assert [line for line in self.left if line != "..."] == []


def run(command: Command, folder: Path) -> None:
    """Run a command, and compare its output."""
    expected = Expected(command)
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONUNBUFFERED": "1",
    }
    process = subprocess.Popen(
        ["bash", "-c", command.text],
        cwd=folder,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    assert process.stdout is not None
    printed: list[str] = []
    try:
        for line in process.stdout:
            printed.append(line.rstrip("\n"))
            if expected.printed(printed[-1]):
                os.killpg(process.pid, signal.SIGINT)
        expected.ended()
        assert process.wait(timeout=60) == 0
    except BaseException:
        print("\n".join([f"$ {command.text}", *printed]))
        raise
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """A function that runs a tutorial once and returns its folder."""
    folders: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in folders:
            if name in NEEDS:
                path = folder(NEEDS[name])
            else:
                path = tmp_path_factory.mktemp(name)
                for each in ("scripts", "docs"):
                    (path / each).symlink_to(ROOT / each)
            page_commands = commands((TUTORIALS / f"{name}.md").read_text(encoding="utf-8"))
            assert page_commands
            for command in page_commands:
                run(command, path)
            folders[name] = path
        return folders[name]

    return folder


def tutorials(names: Sequence[str]) -> list:
    """Tutorials as parameters of a test that runs them."""
    return [
        pytest.param(name, marks=() if name in DAILY else pytest.mark.nightly) for name in names
    ]


@pytest.mark.parametrize("name", tutorials(NAMES))
def test_tutorial_commands_print_what_the_page_shows(name, folder_of):
    folder_of(name)


@pytest.mark.parametrize("name", NAMES)
def test_tutorial_commands_can_be_parsed(name):
    for command in commands((TUTORIALS / f"{name}.md").read_text(encoding="utf-8")):
        program, *words = shlex.split(command.text.partition(" > ")[0])
        if program == "python" and words[0].startswith("scripts/"):
            module = import_module(f"optimus_jax.cli.{Path(words[0]).stem}")
            assert module.parser().read(words[1:])


@pytest.mark.nightly
def test_the_resume_tutorial_loses_and_repeats_no_step(folder_of):
    lines = (folder_of("stop_move_resume") / "runs/a/metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert [record["step"] for record in records] == list(range(1, len(records) + 1))
    assert len({record["plan"] for record in records}) == 2


@pytest.mark.parametrize("name", tutorials(["watch_a_run", "stop_move_resume", "several_hosts"]))
def test_tutorial_runs_have_only_documented_files_and_events(name, folder_of):
    (path,) = (folder_of(name) / "runs").iterdir()
    run = RunDirectory(path)
    assert {each.name for each in path.iterdir()} <= set(FILES)
    for event in run.events():
        assert set(event) <= {*COMMON, *EVENTS[event["event"]].fields}


def test_a_missing_line_of_output_is_detected():
    expected = Expected(Command("train", ["...", "  mesh    data=2 ...", "done"]))
    assert not expected.printed("what you got")
    assert not expected.printed("  mesh    data=2 (given)")
    with pytest.raises(AssertionError):
        expected.printed("step 1")
    with pytest.raises(AssertionError):
        expected.ended()
