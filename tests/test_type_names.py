"""One name of a type, one meaning: no two modules define the same class or type alias."""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "optimus_jax"
TYPE_NAME = re.compile(r"(?=.*[a-z])[A-Z][A-Za-z0-9]+")
"""Names of types. Constants have capitals alone; T is the usual name of a type variable."""


def type_names(source: str) -> Iterator[str]:
    """Names of the classes and type aliases that a module defines."""
    for node in ast.parse(source).body:
        match node:
            case ast.ClassDef(name=name):
                yield name
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                if TYPE_NAME.fullmatch(name):
                    yield name


def test_every_type_name_has_one_meaning():
    count = Counter(
        name for path in PACKAGE.rglob("*.py") for name in type_names(path.read_text("utf-8"))
    )
    assert [name for name, modules in count.items() if modules > 1] == []


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("class Step: ...", ["Step"]),
        ("Step = dict[str, int]", ["Step"]),
        ("Step: TypeAlias = int", ["Step"]),
        ("STEP = 1\nT = TypeVar('T')\n_step = 2", []),
    ],
)
def test_classes_and_aliases_are_type_names(source, names):
    assert list(type_names(source)) == names
