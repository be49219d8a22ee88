"""The rooms of the package and their order: a module imports from its own room and from rooms above
it in this table.
"""

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LEVELS = [
    "version",
    "errors",
    "robust",
    "system",
    "store",
    "config",
    "devices",
    "mesh",
    "models",
    "pipeline",
    "plan",
    "data",
    "cluster",
    "reshard",
    "run_directory",
    "faults",
    "checkpoint",
    "training",
    "planning.profiles",
    "planning.cost",
    "planning.learning",
    "planning.search",
    "planning.ahead_of_time",
    "planning.trials",
    "planning",
    "control",
    "simulation",
    "viz",
    "report",
    "run",
    "inference",
    "cli",
    "__main__",
]
"""Lowest first. The order is that of the data: what is asked and what is there, the plan, the step,
the run, the controller."""


def module_names(root: Path) -> dict[str, Path]:
    """Every module of the package, by its dotted name without `optimus_jax`."""
    package = root / "optimus_jax"
    paths = {
        path: ".".join(path.relative_to(package).with_suffix("").parts)
        for path in package.rglob("*.py")
    }
    return {name.removesuffix("__init__").removesuffix("."): path for path, name in paths.items()}


def room_of(module: str) -> str:
    """The longest name in the table that the module lies in."""
    parts = module.split(".")
    names = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
    return next((name for name in names if name in LEVELS), module)


def imported(path: Path, modules: dict[str, Path]) -> Iterator[str]:
    """What a module imports of the package, anywhere in it; "" is the package's root."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            source = node.module or ""
            full = [f"{source}.{alias.name}" for alias in node.names]
            # A submodule's package is imported too: circles go through its front.
            names = [name for name in full if name.removeprefix("optimus_jax.") in modules]
            if source != "optimus_jax" or len(names) < len(full):
                names.append(source)
        else:
            continue
        yield from (
            name.removeprefix("optimus_jax").removeprefix(".")
            for name in names
            if name.split(".")[0] == "optimus_jax"
        )


def upward(root: Path) -> list[str]:
    """Imports that go up, or that reach for the package's root."""
    modules = module_names(root)
    found = []
    for module, path in modules.items():
        for name in imported(path, modules) if module else ():
            here, there = room_of(module), room_of(name)
            if (
                not name
                or here not in LEVELS
                or there not in LEVELS
                or LEVELS.index(there) > LEVELS.index(here)
            ):
                found.append(f"{module} imports {name or 'the root of the package'}")
    return found


def test_no_module_imports_upward():
    assert upward(ROOT) == []


def test_no_modules_import_in_a_circle():
    modules = module_names(ROOT)
    TopologicalSorter(
        {
            module: {name for name in imported(path, modules) if name in modules}
            for module, path in modules.items()
            if module
        }
    ).prepare()


def test_the_readme_lists_every_folder_as_its_docstring_says():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for front in (ROOT / "optimus_jax").glob("*/__init__.py"):
        docstring = ast.get_docstring(ast.parse(front.read_text(encoding="utf-8"))) or ""
        assert f"{front.parent.name + '/':<15}{docstring.splitlines()[0]}\n" in readme


def test_every_room_is_there_and_in_the_table():
    rooms = {room_of(module) for module in module_names(ROOT) if module}
    assert rooms == set(LEVELS)
    assert len(LEVELS) == len(set(LEVELS))


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("mesh/axes.py", "from optimus_jax.plan import Plan"),
        ("config/data.py", "import optimus_jax"),
        ("planning/cost/cost.py", "from optimus_jax.planning.search import layouts"),
        ("training/step.py", "def late():\n    from optimus_jax.run import api"),
        ("errors.py", "from optimus_jax import plan"),
        ("somewhere.py", "import optimus_jax.errors"),
    ],
)
def test_an_import_that_goes_up_is_found(module, line, tmp_path):
    for name, path in module_names(ROOT).items():
        target = tmp_path / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text("" if name else "x = 1\n")
    (tmp_path / "optimus_jax" / module).write_text(line + "\n")
    assert upward(tmp_path) != []
