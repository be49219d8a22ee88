"""Every notebook runs from top to bottom in a fresh kernel, shows its pictures, and is stored
without outputs.
"""

from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")

FOLDER = Path(__file__).parent.parent / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
PICTURES = {"mesh_layouts": 6, "pipeline_timelines": 4, "planner_frontier": 2, "remesh": 4}
"""How many each shows at least."""
CELL_TIMEOUT_S = 300
"""Ends a cell that hangs; all of them take less than 10 s on two idle cores."""


def test_all_notebooks_are_tested():
    assert {path.stem for path in NOTEBOOKS} == set(PICTURES)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_stored_as_source_alone(path):
    book = nbformat.read(path, as_version=4)
    nbformat.validate(book)
    cells = [cell for cell in book.cells if cell.cell_type == "code"]
    assert all(not cell.outputs and cell.execution_count is None for cell in cells), (
        "clear all outputs before you commit"
    )
    assert path.read_text().startswith('{\n "cells"'), (
        "one line of JSON for each line of source, so that diffs are small"
    )


# planner_frontier and remesh take 25 CPU-seconds each: a fresh kernel imports everything, then
# searches plans of several clusters or compiles three layouts. No other test could share that.
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path, monkeypatch):
    # The kernel begins like one that a person starts: nothing of this test's own setting of JAX.
    for name in ("XLA_FLAGS", "JAX_NUMPY_DTYPE_PROMOTION", "JAX_NUMPY_RANK_PROMOTION"):
        monkeypatch.delenv(name, raising=False)
    book = nbformat.read(path, as_version=4)
    nbclient.NotebookClient(
        book,
        timeout=CELL_TIMEOUT_S,
        kernel_name="python3",
        resources={"metadata": {"path": str(FOLDER)}},
    ).execute()
    outputs = [output for cell in book.cells if cell.cell_type == "code" for output in cell.outputs]
    pictures = [
        output
        for output in outputs
        if {"image/png", "application/vnd.plotly.v1+json"} & set(output.get("data", ()))
    ]
    assert len(pictures) >= PICTURES[path.stem]
    assert not [
        output for output in outputs if output.output_type == "stream" and output.name == "stderr"
    ], "no warnings among the pictures"
