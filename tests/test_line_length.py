"""No line is wider than 100 columns: code, pages, settings and the cells of notebooks.

Ruff checks Python too, but not lines that are one string. A table of Markdown may be wider, because
a row cannot be broken. So may a line that ends with a URL, and a comment for ruff or pyright at the
end of a line.
"""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
WIDEST = 100
FOLDERS = ("benchmarks", "docs", "notebooks", "optimus_jax", "scripts", "tests")
FILES = sorted(
    path
    for pattern in (
        "Makefile",
        "*.md",
        "*.toml",
        "*.cff",
        ".pre-commit-config.yaml",
        ".ci/*",
        "deploy/*",
        "optimus_jax/**/*.json",
        *(f"{folder}/**/*.{end}" for folder in FOLDERS for end in ("ipynb", "md", "py", "toml")),
    )
    for path in ROOT.glob(pattern)
)
URL_AT_END = re.compile(r"\S+://\S+$")
FOR_TOOLS = re.compile(r"  # (noqa|type|pyright):.*$")


def lines_of(path: Path) -> list[str]:
    """Lines of a file; of a notebook those of its cells, without their outputs."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".ipynb":
        return text.splitlines()
    return "\n".join("".join(cell["source"]) for cell in json.loads(text)["cells"]).splitlines()


def wide_lines(lines: list[str], suffix: str) -> list[str]:
    """Lines that are too wide, with their numbers."""
    found = []
    for number, line in enumerate(lines, 1):
        measured = URL_AT_END.sub("", FOR_TOOLS.sub("", line) if suffix == ".py" else line)
        is_row = line.startswith("|") and suffix in (".md", ".ipynb")
        if len(measured) > WIDEST and not is_row:
            found.append(f"{number}: {line}")
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_line_is_wider_than_100_columns(path: Path):
    assert not wide_lines(lines_of(path), path.suffix)


@pytest.mark.parametrize("suffix", [".md", ".py", ".toml"])
def test_wide_lines_are_found_in_prose_code_and_strings(suffix):
    prose, string = "word " * 21, f'    "{"x" * 100}",'
    assert wide_lines(["```", prose, "```", string], suffix) == [f"2: {prose}", f"4: {string}"]


def test_tables_urls_and_comments_for_tools_may_be_wide():
    wide = "x" * 101
    assert not wide_lines([f"| {wide} |", f"see https://{wide}"], ".md")
    assert not wide_lines([f'    "https://{wide}",', f"x = 1  # noqa: {wide}"], ".py")
    assert wide_lines([f"| {wide} |"], ".py")
