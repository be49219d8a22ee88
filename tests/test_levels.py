"""The packages in their order: a module imports only from its own package and from packages that
come earlier in LEVELS.
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
    "weights",
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
    "planning.traces",
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
"""Lowest first, in the order of the data flow: config and topology, the plan, the step, the run,
the controller.
"""


def module_names(root: Path) -> dict[str, Path]:
    """Every module of the package, by its dotted name without `optimus_jax`."""
    package = root / "optimus_jax"
    paths = {
        path: ".".join(path.relative_to(package).with_suffix("").parts)
        for path in package.rglob("*.py")
    }
    return {name.removesuffix("__init__").removesuffix("."): path for path, name in paths.items()}


def level_of(module: str) -> str:
    """The longest name in the table that contains the module."""
    parts = module.split(".")
    names = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
    return next((name for name in names if name in LEVELS), module)


def imported(path: Path, modules: dict[str, Path]) -> Iterator[str]:
    """The modules of the package that a module imports, anywhere in it; "" is the
    package's root.
    """
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            source = node.module or ""
            full = [f"{source}.{alias.name}" for alias in node.names]
            # A submodule's package is imported too: cycles may go through its __init__.
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


def upward_imports(root: Path) -> list[str]:
    """Imports from a higher level or from the package's root."""
    modules = module_names(root)
    found = []
    for module, path in modules.items():
        for name in imported(path, modules) if module else ():
            here, there = level_of(module), level_of(name)
            if (
                not name
                or here not in LEVELS
                or there not in LEVELS
                or LEVELS.index(there) > LEVELS.index(here)
            ):
                found.append(f"{module} imports {name or 'the root of the package'}")
    return found


def test_no_module_imports_upward():
    assert upward_imports(ROOT) == []


def test_there_are_no_import_cycles():
    modules = module_names(ROOT)
    TopologicalSorter(
        {
            module: {name for name in imported(path, modules) if name in modules}
            for module, path in modules.items()
            if module
        }
    ).prepare()


def test_the_readme_lists_every_package_with_its_docstring():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for front in (ROOT / "optimus_jax").glob("*/__init__.py"):
        docstring = ast.get_docstring(ast.parse(front.read_text(encoding="utf-8"))) or ""
        assert f"{front.parent.name + '/':<15}{docstring.splitlines()[0]}\n" in readme


def test_every_package_exists_and_is_in_the_table():
    packages = {level_of(module) for module in module_names(ROOT) if module}
    assert packages == set(LEVELS)
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
def test_upward_imports_are_detected(module, line, tmp_path):
    for name, path in module_names(ROOT).items():
        target = tmp_path / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text("" if name else "x = 1\n")
    (tmp_path / "optimus_jax" / module).write_text(line + "\n")
    assert upward_imports(tmp_path) != []
