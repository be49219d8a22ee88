"""The commands of the how-to pages are ones that their programs read."""

import re
import shlex
from importlib import import_module
from pathlib import Path

import pytest

from optimus_jax.cli import train as train_command
from optimus_jax.config import Config

PAGES = sorted((Path(__file__).parents[2] / "docs/howto").glob("*.md"))
COMMANDS = re.compile(r"^ *python scripts/(\w+)\.py ((?:.*\\\n)*.*)$", re.MULTILINE)


def commands(page: Path) -> list[tuple[str, list[str]]]:
    """The name and arguments of every command of a page."""
    found = COMMANDS.findall(page.read_text(encoding="utf-8"))
    return [(name, shlex.split(text.replace("\\\n", " "))) for name, text in found]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_have_flags_and_settings_that_exist(page):
    for name, arguments in commands(page):
        given = import_module(f"optimus_jax.cli.{name}").parser().read(arguments)
        if name == "train":
            overrides = train_command.settings(given, note=pytest.fail)
            # The longest sequence is a matter of the model, which may be on the hub.
            named = {each for each in overrides if "." in each} - {"data.seq_len"}
            Config().with_values({each: overrides[each] for each in named})


def test_commands_are_found():
    assert sum(len(commands(page)) for page in PAGES) > 20
