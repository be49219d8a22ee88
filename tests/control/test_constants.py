"""The constants of the controller's decisions are described in one file, and read from there."""

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from optimus_jax.control import constants

ROOT = Path(__file__).parents[2]
CONTROL = ROOT / "optimus_jax" / "control"
SOURCE = Path(constants.__file__).read_text("utf-8")
GROUP = re.compile(r"^# [A-Z].*?\?.*?\((.*?)\)", re.MULTILINE | re.DOTALL)
"""The comment above a group: a question, and the files that read its constants."""


def documented() -> dict[str, str]:
    """Each constant with the docstring below it; empty: it has none."""
    body = ast.parse(SOURCE).body
    return {
        name.id: ast.literal_eval(below.value)
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
        else ""
        for statement, below in zip(body, [*body[1:], None], strict=True)
        if isinstance(statement, ast.Assign)
        for target in statement.targets
        for name in ast.walk(target)
        if isinstance(name, ast.Name)
    }


def groups() -> Iterator[tuple[set[str], set[str]]]:
    """The files that the comment above each group names, and the constants of the group."""
    _, *parts = re.split(r"(?=^# [A-Z])", SOURCE, flags=re.MULTILINE)
    for part in parts:
        found = GROUP.match(part)
        assert found, part
        files = set(re.sub(r"[#\s]", "", found[1]).split(","))
        assigned = re.findall(r"^([A-Z].*) = ", part, re.MULTILINE)
        yield files, {name for names in assigned for name in names.split(", ")}


def constants_read(tree: ast.AST) -> set[str]:
    """Names that are read as `constants.NAME`."""
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "constants"
    }


def read_late(tree: ast.AST) -> set[str]:
    """Those of them that are read when a function is called."""
    return {
        name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
        for statement in node.body
        for name in constants_read(statement)
    }


def frozen_reads(source: str) -> set[str]:
    """Constants whose values the module copies when it is imported."""
    tree = ast.parse(source)
    copied = {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == constants.__name__
        for alias in node.names
    }
    early = ast.parse(source)
    for node in ast.walk(early):
        if isinstance(node, ast.FunctionDef):
            node.body = [ast.Pass()]
        elif isinstance(node, ast.Lambda):
            node.body = ast.Constant(value=None)
    return copied | constants_read(early)


def modules() -> Mapping[str, str]:
    """Source of each module of the controller, by its path in the package."""
    return {
        str(path.relative_to(CONTROL)): path.read_text("utf-8") for path in CONTROL.rglob("*.py")
    }


@pytest.mark.parametrize("name", documented())
def test_a_constant_says_where_its_value_is_from(name):
    told = documented()[name]
    assert re.search(r"\b(Theory:|Measured |measured |Reasoned\b)", told)
    for number in re.findall(r"decision (\d+)", told):
        assert list((ROOT / "docs" / "decisions").glob(f"{int(number):04}-*.md"))


def test_each_file_of_a_group_reads_it_and_each_constant_is_read_there():
    read = {path: read_late(ast.parse(source)) for path, source in modules().items()}
    grouped = set[str]()
    for files, names in groups():
        grouped |= names
        assert {path for path in read if read[path] & names} == files
    assert grouped == set(documented())
    assert set().union(*read.values()) == grouped


def test_no_module_copies_a_constant():
    assert {
        path: found for path, source in modules().items() if (found := frozen_reads(source))
    } == {}


@pytest.mark.parametrize(
    "source",
    [
        "from optimus_jax.control.constants import MIN_PROBABILITY",
        "HALF = constants.MIN_PROBABILITY / 2",
        "def f(least=constants.MIN_PROBABILITY): ...",
        "class A:\n    least: float = constants.MIN_PROBABILITY",
    ],
)
def test_a_copied_constant_is_found(source):
    assert frozen_reads(source) == {"MIN_PROBABILITY"}
    assert not frozen_reads("def f():\n    return constants.MIN_PROBABILITY")
