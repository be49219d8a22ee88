"""Numbers and names in README, CONTRIBUTING and the guides agree with the code."""

import ast
import re
import tomllib
from dataclasses import fields
from pathlib import Path

import plans
import pytest

from optimus_jax.config.presets import PRESETS
from optimus_jax.models import kernels
from optimus_jax.training.task import Task
from optimus_jax.version import VERSION

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


def test_every_field_of_a_task_is_described():
    table = page("docs/howto/add_a_task.md")
    assert [each.name for each in fields(Task) if f"| `{each.name}` |" not in table] == []


def test_all_models_and_extras_are_listed():
    running = page("docs/running.md")
    models = running.split("Models: ")[1].split("Any setting")[0]
    assert re.findall(r"`([^`]*)`", models) == list(PRESETS)
    extras = tomllib.loads(page("pyproject.toml"))["project"]["optional-dependencies"]
    install = running.split("## Install")[1].split("## Commands")[0]
    assert [name for name in extras if name != "dev" and name not in install] == []


def test_the_architecture_page_lists_every_package_inside_a_package():
    listed = re.findall(r"^\| `([\w/]+)/` \| (.*) \|$", page("docs/architecture.md"), re.MULTILINE)
    fronts = sorted((ROOT / "optimus_jax").glob("*/*/__init__.py"))
    docstrings = [ast.get_docstring(ast.parse(front.read_text("utf-8"))) for front in fronts]
    assert listed == [
        (str(front.parent.relative_to(ROOT / "optimus_jax")), (text or "").splitlines()[0])
        for front, text in zip(fronts, docstrings, strict=True)
    ]


def test_decisions_are_titled_by_their_number():
    for path in (ROOT / "docs/decisions").glob("*.md"):
        title = path.read_text(encoding="utf-8").splitlines()[0]
        assert title.startswith(f"# {int(path.name[:4])}. "), path.name


def test_the_citation_has_the_version_of_the_package():
    assert f"version: {VERSION}\n" in page("CITATION.cff")


def test_models_named_for_parity_exist():
    text = page("CONTRIBUTING.md") + page("docs/howto/add_a_family.md")
    named = set(re.findall(r"MODEL=(\w+)", text))
    assert len(named) > 1
    assert named <= {*plans.MODELS, *plans.FAMILY_MODELS, *plans.INPUT_MODELS}


def test_gpus_md_has_the_widths_that_cudnns_kernel_takes():
    widths = f"wider than {kernels.CUDNN_HEAD_DIM} ({kernels.CUDNN_HEAD_DIM_HOPPER} from Hopper on)"
    assert widths in page("docs/gpus.md")


def rows_of(text: str) -> list[list[str]]:
    """Cells of the rows of all tables in a text."""
    return [
        [cell.strip() for cell in row.strip("|").split("|")]
        for row in re.findall(r"^\|.*\|$", text, re.MULTILINE)
    ]


def test_pipelines_md_repeats_the_measured_cost_of_a_step():
    cost = {row[0]: row[1] for row in rows_of(page("docs/measured.md")) if len(row) == 4}
    text = " ".join(page("docs/pipelines.md").split("*Compared with other meshes*")[1].split())
    piped = cost["pipe=4, data=2, 4 microbatches"]
    assert f"{piped} CPU-s under pipe=4,data=2 with 4 microbatches" in text
    assert f"{cost['data=8']} under data=8" in text


def test_errors_on_published_steps_are_those_of_the_table():
    table = page("docs/planning.md").split("131 published steps")[1].split("\n\n")[1]
    errors = [float(row[2].removesuffix("%")) for row in rows_of(table)[2:]]
    text = page(next((ROOT / "docs/decisions").glob("0010-*")).relative_to(ROOT).as_posix())
    assert f"{min(errors):g}% to {max(errors):g}% on average" in text


def test_coverage_of_earlier_predictions_is_that_of_the_results():
    results = rows_of(page("benchmarks/results/prediction.md"))
    rows = [row for row in results if len(row) == 7 and row[0].split()[0].isdigit()]
    covered = [round(float(cell.removesuffix("%"))) for row in rows for cell in row[4:6]]
    held = [float(row[6].split("%")[0]) for row in rows]
    decision = page("docs/decisions/0010-one-regression-for-planner-and-controller.md")
    text = " ".join(decision.split())
    assert f"{min(covered)} to {max(covered)}%" in text
    assert f"{min(held):.0f} to {max(held):.0f}%" in text


def test_coverage_of_predictions_is_that_of_the_results():
    measured, simulated, precise, held = [list[float]() for _ in range(4)]
    for table in page("benchmarks/results/prediction.md").split("\n## ")[1].split("\n\n"):
        rows = [row for row in rows_of(table) if re.fullmatch(r"\d+( seen)?", row[0])]
        covered = [float(cell.split("%")[0]) for row in rows for cell in row[4:6]]
        if "measured" in table:
            measured += covered
            held += [float(row[8].removesuffix("%")) for row in rows]
        else:
            (precise if "plans 2%" in table else simulated).extend(covered)
    usual = [*measured, *simulated]
    text = " ".join(page("docs/control.md").split())
    assert f"90% intervals held {min(measured):.0f} to {max(measured):.0f}% of [plans" in text
    assert (
        f"they held {min(simulated):.0f} to {max(simulated):.0f}% where plans deviate 10%, and"
        f" {min(precise):.0f} to {max(precise):.0f}% where they deviate 2%"
    ) in text
    assert f"faster in {min(held):.0f} to {max(held):.0f}% of cases" in text
    decision = page("docs/decisions/0026-a-deviation-of-each-plan.md")
    assert f"{min(usual):.0f} to {max(usual):.0f}% of 90% intervals" in " ".join(decision.split())


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
