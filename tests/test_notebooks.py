"""Every notebook runs from top to bottom in a fresh kernel, shows its figures, and is stored with
small outputs.
"""

import re
import runpy
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat")
pytest.importorskip("nbclient")

FOLDER = Path(__file__).parent.parent / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
PICTURES = {"mesh_layouts": 6, "pipeline_timelines": 4, "planner_frontier": 2, "remesh": 4}
"""Smallest number of figures of each notebook."""
LONG = ("planner_frontier", "remesh")
"""Notebooks that only `make nightly` runs."""
MOST_BYTES = 1_000_000
"""Largest total size of the stored notebooks."""
LEFT_OUT = "(a picture of "
"""Begins the text that notebooks/run.py stores in place of a large output."""
SWITCH = FOLDER.parent / "optimus_jax" / "control" / "switch.py"


def cells_of(book):
    return [cell for cell in book.cells if cell.cell_type == "code"]


def kinds_of(outputs):
    """Media types of each output; streams and errors by their kind."""
    return [sorted(output.get("data", ())) or output.output_type for output in outputs]


def test_all_notebooks_are_tested():
    assert {path.stem for path in NOTEBOOKS} == set(PICTURES)


def test_notebooks_are_small():
    assert sum(path.stat().st_size for path in NOTEBOOKS) < MOST_BYTES


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_stored_as_executed(path):
    book = nbformat.read(path, as_version=4)
    nbformat.validate(book)
    counts = [cell.execution_count for cell in cells_of(book)]
    assert counts == list(range(1, len(counts) + 1)), "run notebooks/run.py before you commit"
    assert any(cell.outputs for cell in cells_of(book))
    assert path.read_text().startswith('{\n "cells"'), (
        "one line of JSON for each line of source, so that diffs are small"
    )


def test_the_phases_of_a_replayed_switch_are_those_of_the_controller():
    book = nbformat.read(FOLDER / "remesh.ipynb", as_version=4)
    replayed = set(re.findall(r'Phase\("(\w+)"\)', "\n".join(cell.source for cell in book.cells)))
    real = set(re.findall(r'phase\("(\w+)_s"\)', SWITCH.read_text())) | {"prepare", "canary"}
    assert {"move", "verify", "commit"} <= replayed <= real
    table, note = book.cells[0].source.split("The controller has two more:")
    assert set(re.findall(r"^\| (\w+) \| [^|]*\| (?:continues|pauses)", table, re.M)) == replayed
    assert set(re.findall(r"`(\w+)` \(", note)) == real - replayed


# planner_frontier and remesh take 25 CPU-seconds each: a fresh kernel imports everything, then
# searches plans of several clusters or compiles three layouts. No other test could share that.
# Searches and switches are tested elsewhere.
@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, marks=pytest.mark.nightly if path.stem in LONG else ())
        for path in NOTEBOOKS
    ],
    ids=lambda path: path.stem,
)
def test_a_notebook_runs_without_warnings(path, monkeypatch):
    # The kernel starts as for a user: without the tests' settings of JAX.
    for name in ("XLA_FLAGS", "JAX_NUMPY_DTYPE_PROMOTION", "JAX_NUMPY_RANK_PROMOTION"):
        monkeypatch.delenv(name, raising=False)
    cells = cells_of(runpy.run_path(str(FOLDER / "run.py"))["executed"](path))
    outputs = [output for cell in cells for output in cell.outputs]
    pictures = [
        output
        for output in outputs
        if {"image/png", "application/vnd.plotly.v1+json"} & set(output.get("data", ()))
    ]
    assert len(pictures) >= PICTURES[path.stem]
    assert not [
        output for output in outputs if output.output_type == "stream" and output.name == "stderr"
    ], "no warnings among the pictures"
    stored = cells_of(nbformat.read(path, as_version=4))
    for cell, before in zip(cells, stored, strict=True):
        if LEFT_OUT not in str(before.outputs):
            assert kinds_of(cell.outputs) == kinds_of(before.outputs), "run notebooks/run.py"
