"""Pages of the site, as docs/site/generate.py writes them: each link leads to a page."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from optimus_jax.devices.jax_settings import REFUSED
from optimus_jax.faults.stopping import EXIT_CODES

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"\]\((?!\w+:|#)([^)\s#]+)(?:#[^)\s]*)?\)")


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    """docs/site/generate.py as a module."""
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs/site/generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def pages(generate) -> dict[str, str]:
    """Text of every page by name."""
    return dict(generate.pages())


def test_every_link_leads_to_a_page_or_a_copied_file(pages):
    files = {f"notebooks/{path.name}" for path in (ROOT / "notebooks").glob("*.ipynb")}
    files |= {f"results/{path.name}" for path in (ROOT / "benchmarks/results").iterdir()}
    files |= {f"images/{path.name}" for path in (ROOT / "docs/images").iterdir()}
    here = Path("/site")
    missing = [
        f"{name}: {link}"
        for name, text in pages.items()
        for link in LINK.findall(text)
        if str(((here / name).parent / link).resolve().relative_to(here)) not in files | set(pages)
    ]
    assert missing == []


@pytest.mark.parametrize("folder", ["howto", "notebooks", "decisions", "results"])
def test_the_front_page_links_to_the_index_of_each_folder(folder, pages):
    assert f"({folder}/index.md)" in pages["index.md"]


@pytest.mark.parametrize("folder", ["docs/howto", "docs/tutorials", "notebooks"])
def test_an_index_lists_every_page_of_its_folder(folder, pages):
    listed = re.findall(r"\(\./(.*)\)", pages[f"{Path(folder).name}/index.md"])
    assert sorted(listed) == sorted(
        path.name for end in ("md", "ipynb") for path in (ROOT / folder).glob(f"*.{end}")
    )


def test_a_link_to_a_folder_of_pages_without_an_index_is_an_error(generate):
    readme = ROOT / "README.md"
    with pytest.raises(FileNotFoundError, match="has no index on the site"):
        generate.moved("[all](docs)", readme, "index.md")
    with pytest.raises(FileNotFoundError, match="no such file"):
        generate.moved("[all](absent.md)", readme, "index.md")
    assert generate.moved("[tests](tests/store)", readme, "index.md") == "tests (`tests/store`)"
    assert generate.moved("[tests/store](tests/store)", readme, "index.md") == "`tests/store`"


def test_the_reference_has_every_exit_code_and_every_refused_setting(pages):
    codes = re.findall(r"^\| (\d+) \|", pages["reference/exit-codes.md"], re.MULTILINE)
    assert [int(code) for code in codes] == sorted(EXIT_CODES)
    assert [name for name in REFUSED if f"`{name}`" not in pages["reference/jax-settings.md"]] == []


@pytest.mark.parametrize(
    ("name", "unit"),
    [
        ("model.max_length", "tokens"),
        ("window", "tokens"),
        ("after_step", "steps"),
        ("checkpoint.resume_step", "steps"),
        ("checkpoint.every", "steps"),
    ],
)
def test_a_setting_with_a_dimension_has_its_unit(name, unit, pages):
    rows = pages["reference/settings.md"].splitlines()
    (row,) = [row for row in rows if row.startswith(f"| `{name}` |")]
    assert row.split(" | ")[2] == unit


def test_every_page_is_in_the_table_of_contents(pages):
    listed = {
        line
        for text in pages.values()
        for block in text.split("```{toctree}")[1:]
        for line in block.split("```")[0].split()
    }
    for name, text in pages.items():
        stem = name.removesuffix(".md")
        assert (
            name == "index.md"
            or "orphan: true" in text
            or stem in listed
            or (Path(stem).name in listed)
        ), name
