"""The transcript in README shows what the program prints, without a run of its own.

The digests of its plans are computed from its commands. All its other lines have the form of a line
of a tutorial, and the tutorials are run by `test_tutorials.py`. Only the losses are not compared.
"""

import re
import shlex
from pathlib import Path
from typing import Any

from test_tutorials import STOP, TUTORIALS, commands

from optimus_jax.cli.train import parser
from optimus_jax.config.axes import AxisSizes
from optimus_jax.config.request import make_config
from optimus_jax.mesh.build import discover
from optimus_jax.planning.search.assemble import plan_for
from optimus_jax.run.command_line import settings

ROOT = Path(__file__).parents[2]
PLAN_LINE = re.compile(r"  plan +([0-9a-f]+)")


def form_of(line: str) -> str:
    """A line with N for each number, and with one name for every plan."""
    return re.sub(r"\d[\d.]*", "N", PLAN_LINE.sub("  plan DIGEST", line))


def digest_of(given: dict[str, Any]) -> str:
    """The plan of a run with these flags and eight devices."""
    config = make_config(given["model"], settings(given))
    return plan_for(config, AxisSizes.parse(given["mesh"]), discover()).digest


def test_the_readmes_plans_are_those_of_its_commands():
    given: dict[str, Any] = {}
    for command in commands((ROOT / "README.md").read_text(encoding="utf-8")):
        _, script, *arguments = shlex.split(command.text)
        assert script == "scripts/train.py"
        given |= parser().read(arguments)
        assert int(given["cpu_devices"]) == discover().num_devices
        (shown,) = filter(None, map(PLAN_LINE.fullmatch, command.shown))
        assert shown[1] == digest_of(given)


def test_the_readmes_other_lines_are_like_those_of_a_tutorial():
    tested = {STOP, "..."} | {
        form_of(line)
        for path in TUTORIALS.glob("*.md")
        for command in commands(path.read_text(encoding="utf-8"))
        for line in command.shown
    }
    transcript = commands((ROOT / "README.md").read_text(encoding="utf-8"))
    lines = [line for command in transcript for line in command.shown]
    assert len(lines) > 10
    assert [line for line in lines if form_of(line) not in tested] == []


def test_another_form_of_a_line_is_noticed():
    assert form_of("step 20/60  loss 2.9702 ...") == form_of("step 10/200  loss 3.1 ...")
    assert form_of("step 20/60  loss 2.9702 ...") != form_of("step 20 of 60  loss 2.9702 ...")
