"""Files named in documents, docstrings and comments exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    path
    for pattern in (
        "*.md",
        "docs/**/*.md",
        "benchmarks/results/*.md",
        "notebooks/*.ipynb",
        "optimus_jax/**/*.py",
        "tests/**/*.py",
        "scripts/*.py",
    )
    for path in ROOT.glob(pattern)
    if path.name != "CHANGELOG.md"  # which names files as they were
)
FOLDERS = "optimus_jax|tests|docs|scripts|benchmarks|notebooks"
NAMED = re.compile(rf"(?<![\w/.-])((?:{FOLDERS})/[\w/.-]*\.(?:md|py|json|ipynb|textproto|sh)\b)")
"""A path from the root, in running text, code or a link."""


def test_paths_are_found_in_text():
    assert "tests/test_levels.py" in NAMED.findall((ROOT / "CONTRIBUTING.md").read_text())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_named_files_exist(page):
    named = set(NAMED.findall(page.read_text(encoding="utf-8")))
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


BELOW_PACKAGE = re.compile(r"`((?:[a-z_]+/)*[a-z_]+\.py)`(?: \(`([\w.]+)`)?")
"""A path as the architecture page and the how-tos give it, and the symbol written beside it."""
GUIDES = [
    ROOT / "CONTRIBUTING.md",
    ROOT / "docs/architecture.md",
    *sorted((ROOT / "docs/howto").glob("*.md")),
]


def missing_below_package(text: str) -> list[str]:
    missing = []
    for name, symbol in BELOW_PACKAGE.findall(text):
        file = next((f for f in (ROOT / name, ROOT / "optimus_jax" / name) if f.exists()), None)
        if file is None:
            missing.append(name)
        elif symbol and not all(
            re.search(rf"\b{part}\b", file.read_text(encoding="utf-8"))
            for part in symbol.split(".")
        ):
            missing.append(f"{name}: {symbol}")
    return missing


def test_a_missing_file_or_symbol_is_reported():
    text = "`plan.py` (`Plan`), `plan.py` (`Plam`), `mesh/absent.py`"
    assert missing_below_package(text) == ["plan.py: Plam", "mesh/absent.py"]


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_and_symbols_of_the_guides_exist(page):
    assert missing_below_package(page.read_text(encoding="utf-8")) == []


def test_modules_outside_the_package_have_names_of_their_own():
    """Tests import each other and benchmarks by name alone: of two, the first imported wins."""
    names = [
        path.stem for folder in ("tests", "benchmarks") for path in ROOT.glob(f"{folder}/**/*.py")
    ]
    names = [name for name in names if name != "__init__"]
    assert sorted(name for name in set(names) if names.count(name) > 1) == []
