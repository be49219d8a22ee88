"""Marks slow tests: those that start processes or compile steps, recognised by the names that they
use. The others are quick.

A test is marked `processes` or `compiles` if its function, or any helper, fixture or other test
module that it uses, uses one of the names below.
"""

import ast
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

TESTS = Path(__file__).parent
MARKS: Mapping[str, frozenset[str]] = {
    "processes": frozenset({"subprocess", "Popen", "runpy"}),
    "compiles": frozenset(
        {
            "jit",
            "shard_map",
            "build_program",
            "train_step",
            "find_plans",
            "search",
            "simulate",
            "eval_shape",
            "grad",
            "vjp",
            "train",
            "compile_plan",
            "compiled_quickly",
            "run_all",
            "run_trial",
            "time_reference_steps",
            "profile_hardware",
        }
    ),
}
"""Names that make a test slow, by mark."""


@cache
def definitions(path: Path) -> dict[str, frozenset[str]]:
    """Names at the top of a test module, to the names that each uses.

    A name imported from another test module is `module:name`.
    """
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found: dict[str, frozenset[str]] = {}
    modules = {
        alias.asname or alias.name: other
        for node in tree.body
        if isinstance(node, ast.Import)
        for alias in node.names
        if (other := _module(path, alias.name)) is not None
    }
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
            found[node.name] = frozenset(_names(node, modules))
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {
                target.id: frozenset(_names(node, modules))
                for target in targets
                if isinstance(target, ast.Name)
            }
        elif isinstance(node, ast.ImportFrom) and (other := _module(path, node.module)) is not None:
            found |= {
                alias.asname or alias.name: frozenset({f"{other}:{alias.name}"})
                for alias in node.names
            }
    return found


@cache
def used(path: Path, name: str) -> frozenset[str]:
    """All names that a definition at the top of a test module uses, directly or through other
    definitions.
    """
    seen: set[tuple[Path, str]] = set()
    todo, names = [(path, name)], set()
    while todo:
        place = todo.pop()
        if place in seen:
            continue
        seen.add(place)
        for each in _of(*place):
            names.add(each)
            module, colon, inner = each.rpartition(":")
            todo.append((Path(module), inner) if colon else (place[0], each))
    return frozenset(names)


def marks_of(path: Path, test: str) -> list[str]:
    """The marks of a test function."""
    names = used(path, test)
    return [mark for mark, slow in MARKS.items() if names & slow]


@cache
def _of(path: Path, name: str) -> frozenset[str]:
    for place in (path, path.parent / "conftest.py", TESTS / "conftest.py"):
        if place.exists() and name in (there := definitions(place)):
            return there[name]
    return frozenset()


def _names(node: ast.AST, modules: Mapping[str, Path]) -> Iterator[str]:
    for each in ast.walk(node):
        if (
            isinstance(each, ast.Attribute)
            and isinstance(each.value, ast.Name)
            and each.value.id in modules
        ):
            yield f"{modules[each.value.id]}:{each.attr}"
        elif isinstance(each, ast.Name):
            yield each.id
        elif isinstance(each, ast.Attribute):
            yield each.attr
        elif isinstance(each, ast.arg):
            yield each.arg


def _module(path: Path, name: str | None) -> Path | None:
    parts = (name or "").removeprefix("tests.").split(".")
    for folder in (path.parent, TESTS):
        found = folder.joinpath(*parts).with_suffix(".py")
        if name and found.exists():
            return found
    return None
