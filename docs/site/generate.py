"""The sources of the site: pages of docs/, README, CHANGELOG and results, and the reference.

The reference is read from the code. `make docs` runs this before Sphinx. A link that leads nowhere
is an error.
"""

import ast
import dataclasses
import inspect
import itertools
import re
import shutil
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType

from optimus_jax.config import Config
from optimus_jax.faults import stopping

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
LINK = re.compile(r"\]\((?!\w+:|#|/)([^)\s#]+)(#[^)\s]*)?\)")
"""A link to a file, and where in it."""


def fields_of(section: type) -> Iterator[tuple[str, str, str, str]]:
    """Name, type, default and meaning of every field of a section, as its source says them."""
    (body,) = ast.parse(inspect.cleandoc(inspect.getsource(section))).body
    assert isinstance(body, ast.ClassDef)
    for node, after in zip(body.body, [*body.body[1:], None], strict=True):
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        is_said = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
        meaning = " ".join(str(after.value.value).split()) if is_said else ""
        default = "" if node.value is None else ast.unparse(node.value)
        yield node.target.id, ast.unparse(node.annotation), default, meaning


def settings_page() -> str:
    """Every setting: its name on the command line, type, default and meaning."""
    sections = {
        each.name: each.default_factory
        for each in dataclasses.fields(Config)
        if isinstance(each.default_factory, type) and dataclasses.is_dataclass(each.default_factory)
    }
    lines = ["# Settings", "", "Each is set by `--set NAME=VALUE`, in Python or in JSON.", ""]
    for prefix, section in [("", Config), *((f"{name}.", each) for name, each in sections.items())]:
        lines += [f"## {prefix.rstrip('.') or 'run'}", "", "| name | type | default | meaning |"]
        lines += ["|---|---|---|---|"]
        for name, kind, default, meaning in fields_of(section):
            if name not in sections:
                cells = (f"`{prefix}{name}`", f"`{kind}`", f"`{default}`", meaning)
                lines.append(
                    f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
                )
        lines.append("")
    return "\n".join(lines)


def exit_codes_page(module: ModuleType) -> str:
    """Every exit code of a run, as the constants that hold them say."""
    lines = ["# Exit codes", "", "| code | meaning |", "|---|---|", "| 0 | Done. |"]
    body = ast.parse(inspect.getsource(module)).body
    for node, after in itertools.pairwise(body):
        if (
            isinstance(node, ast.Assign)
            and isinstance(name := node.targets[0], ast.Name)
            and name.id.startswith("EXIT_")
            and isinstance(after, ast.Expr)
            and isinstance(after.value, ast.Constant)
        ):
            meaning = " ".join(str(after.value.value).split())
            lines.append(f"| {ast.literal_eval(node.value)} | {meaning} |")
    return "\n".join(lines) + "\n"


def moved(text: str, here: Path, place: str) -> str:
    """Text of a file whose links are those of the page that it becomes.

    A link to a file that the site does not have becomes its path.

    Raises:
      FileNotFoundError: a link leads nowhere.
    """
    up = "../" * place.count("/")

    def link(match: re.Match[str]) -> str:
        path, anchor = (here.parent / match[1]).resolve(), match[2] or ""
        if not path.exists():
            raise FileNotFoundError(f"{here}: no such file: {match[1]}")
        if path == ROOT / "docs" / "decisions":
            return f"]({up}decisions/index.md)"
        if path.is_relative_to(ROOT / "docs") and path.suffix == ".md":
            return f"]({up}{path.relative_to(ROOT / 'docs')}{anchor})"
        if path.parent == RESULTS:
            return f"]({up}results/{path.name}{anchor})"
        if path.name in ("CHANGELOG.md", "CONTRIBUTING.md"):
            return f"]({up}{path.name.lower()}{anchor})"
        return f" (`{path.relative_to(ROOT)}`)]"

    return re.sub(r"\[([^\]]*)\] \((`[^`]*`)\)\]", r"\1 (\2)", LINK.sub(link, text))


API = """# Python API

```{eval-rst}
.. autofunction:: optimus_jax.train
.. autoclass:: optimus_jax.RunResult
   :members:
.. autofunction:: optimus_jax.find_plans
.. autoclass:: optimus_jax.RankedPlan
   :members:
.. autoclass:: optimus_jax.Plan
   :members:
```
"""
GUIDES = [
    "running",
    "data",
    "planning",
    "extending",
    "clusters",
    "stores",
    "control",
    "pipelines",
    "gpus",
    "faults",
    "names",
]


def contents(caption: str, names: Iterable[str]) -> str:
    """A part of the table of contents."""
    return "\n".join(["```{toctree}", ":hidden:", f":caption: {caption}", "", *names, "```", ""])


def pages() -> Iterator[tuple[str, str]]:
    """Name and text of every page."""
    yield "reference/settings.md", settings_page()
    yield "reference/exit-codes.md", exit_codes_page(stopping)
    yield "reference/api.md", API
    results = sorted((each.stem for each in RESULTS.glob("*.md")), reverse=True)
    decisions = sorted(each.stem for each in (ROOT / "docs" / "decisions").glob("*.md"))
    yield (
        "results/index.md",
        "# Results\n\nNewest first; a page holds machine, date, command and commit.\n\n"
        + "\n".join(["```{toctree}", *results, "```", ""]),
    )
    yield (
        "decisions/index.md",
        "\n".join(["# Decisions", "", "```{toctree}", *decisions, "```", ""]),
    )
    copied = {ROOT / name: name.lower() for name in ("CHANGELOG.md", "CONTRIBUTING.md")}
    copied |= {each: f"results/{each.name}" for each in RESULTS.glob("*.md")}
    docs = ROOT / "docs"
    copied |= {each: str(each.relative_to(docs)) for each in docs.rglob("*.md")}
    for path, place in copied.items():
        yield place, moved(path.read_text(encoding="utf-8"), path, place)
    readme = ROOT / "README.md"
    yield (
        "index.md",
        moved(readme.read_text(encoding="utf-8"), readme, "index.md")
        + "\n"
        + contents("Guides", GUIDES)
        + contents("Reference", ["reference/api", "reference/settings", "reference/exit-codes"])
        + contents(
            "More", ["measured", "results/index", "decisions/index", "contributing", "changelog"]
        ),
    )


def main(target: Path) -> None:
    """Write all pages, and the files beside results, into an empty directory."""
    shutil.rmtree(target, ignore_errors=True)
    for name, text in pages():
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        (target / name).write_text(text, encoding="utf-8")
    for each in RESULTS.iterdir():
        if each.suffix != ".md":
            shutil.copy(each, target / "results" / each.name)
    shutil.copy(Path(__file__).with_name("conf.py"), target)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
