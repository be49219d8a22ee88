"""Run notebooks from top to bottom and store them with their outputs.

`python notebooks/run.py [NAME.ipynb ...]`; without names all of this folder. Outputs above
MOST_BYTES, and interactive ones, which a page cannot show, are replaced by a note.
"""

import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).parent
CELL_TIMEOUT_S = 300
"""Ends a cell that hangs; all of them take less than 10 s on two idle cores."""
MOST_BYTES = 120_000
"""Of one stored output."""
INTERACTIVE = "application/vnd.plotly.v1+json"


def executed(path: Path) -> nbformat.NotebookNode:
    """The notebook as a fresh kernel leaves it. Raises CellExecutionError if a cell fails."""
    book = nbformat.read(path, as_version=4)
    NotebookClient(
        book,
        timeout=CELL_TIMEOUT_S,
        kernel_name="python3",
        record_timing=False,
        resources={"metadata": {"path": str(FOLDER)}},
    ).execute()
    return book


def shortened(book: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Without what depends on the machine's Python, and without large outputs."""
    book.metadata["language_info"] = {"name": "python"}
    for cell in book.cells:
        for output in cell.get("outputs", ()):
            size = len(str(output.get("data", "")))
            if size > MOST_BYTES or INTERACTIVE in output.get("data", ()):
                note = f"(a picture of {size // 1000} kB: run the notebook to see it)"
                output["data"] = nbformat.from_dict({"text/plain": note})
                output["metadata"] = {}
    return book


def main(names: list[str]) -> None:
    for path in [FOLDER / Path(name).name for name in names] or sorted(FOLDER.glob("*.ipynb")):
        nbformat.write(shortened(executed(path)), path)
        print(f"{path.name}: {path.stat().st_size // 1000} kB")


if __name__ == "__main__":
    main(sys.argv[1:])
