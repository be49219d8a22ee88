"""No line is wider than a reader's window, also where ruff does not look."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
WIDEST = 100
FILES = sorted(
    path
    for pattern in (
        "Makefile",
        ".ci/*",
        "deploy/*",
        "*.md",
        "docs/**/*.md",
        "scripts/*.py",
        "optimus_jax/**/*.toml",
    )
    for path in ROOT.glob(pattern)
)


def wide_lines(text: str, *, is_markdown: bool) -> list[str]:
    """Lines that are too wide, with their numbers; but for Markdown's tables, blocks of code and
    links.
    """
    found, in_code = [], False
    for number, line in enumerate(text.splitlines(), 1):
        if is_markdown and line.lstrip().startswith("```"):
            in_code = not in_code
        is_free = in_code or line.startswith("|") or "](" in line or "://" in line
        if len(line) > WIDEST and not (is_free and is_markdown):
            found.append(f"{number}: {line}")
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_line_is_wider_than_100_columns(path: Path):
    text = path.read_text(encoding="utf-8")
    assert not wide_lines(text, is_markdown=path.suffix == ".md")


def test_wide_lines_are_found_in_prose_alone():
    wide = "word " * 21
    assert wide_lines(f"{wide}\n", is_markdown=True) == [f"1: {wide}"]
    assert not wide_lines(f"```\n{wide}\n```\n| {wide} |\n", is_markdown=True)
