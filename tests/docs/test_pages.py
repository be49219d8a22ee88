"""Numbers and names in README, CONTRIBUTING and the guides agree with the code."""

import re
import tomllib
from pathlib import Path

import pytest

from optimus_jax.config.presets import PRESETS

ROOT = Path(__file__).parents[2]
README_LINES = 100
RESULTS = ROOT / "benchmarks" / "results"


def page(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def test_the_readme_is_short():
    assert len(page("README.md").splitlines()) <= README_LINES


def test_headline_numbers_appear_on_the_pages_they_link_to():
    _, _, *rows = re.findall(r"^\|.*\|$", page("README.md").split("## Measured")[1], re.MULTILINE)
    assert rows
    for row in rows:
        _, _, figures, where, _ = row.split("|")
        (link,) = re.findall(r"\]\(([^)]*)\)", where)
        assert [
            number for number in re.findall(r"[\d.]+", figures) if number not in page(link)
        ] == []


def test_all_models_and_extras_are_listed():
    running = page("docs/running.md")
    models = running.split("Models: ")[1].split("Any setting")[0]
    assert re.findall(r"`([^`]*)`", models) == list(PRESETS)
    extras = tomllib.loads(page("pyproject.toml"))["project"]["optional-dependencies"]
    install = running.split("## Install")[1].split("## Commands")[0]
    assert [name for name in extras if name != "dev" and name not in install] == []


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md"])
def test_make_targets_named_in_the_docs_exist(name):
    targets = set(re.findall(r"^make (\w+)", page(name), re.MULTILINE))
    assert targets
    assert targets <= set(re.findall(r"^(\w+):", page("Makefile"), re.MULTILINE))


def test_every_result_page_is_in_the_index():
    listed = re.findall(r"\]\(([\w-]+\.md)\)", page("benchmarks/results/README.md"))
    assert sorted(listed) == sorted(
        path.name for path in RESULTS.glob("*.md") if path.name != "README.md"
    )


def test_every_file_beside_the_results_is_linked():
    pages = "".join(path.read_text(encoding="utf-8") for path in RESULTS.glob("*.md"))
    assert [
        path.name
        for path in RESULTS.iterdir()
        if path.suffix != ".md" and f"]({path.name})" not in pages
    ] == []
