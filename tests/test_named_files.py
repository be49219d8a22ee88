"""Files named in documents, docstrings and comments exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "optimus_jax/**/*.py", "tests/**/*.py", "scripts/*.py")
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
