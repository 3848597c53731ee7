"""Functions that read, shorten and run the lessons."""

import os
import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbformat import NotebookNode

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"
SOLUTIONS = sorted((NOTEBOOKS / "solutions").glob("*.ipynb"))


def read(path: Path) -> NotebookNode:
    return nbformat.read(path, as_version=4)


def code_of(path: Path) -> list[NotebookNode]:
    return [cell for cell in read(path).cells if cell.cell_type == "code"]


def shortened(source: str) -> str:
    """Train a small network for one epoch, except in a cell that waits for ``--kill``."""
    source = re.sub(r"widths = \[.*\]", "widths = [8, 8, 16]", source)
    return source if "--kill" in source else re.sub(r"--epochs \d+", "--epochs 1", source)


def with_gaps(path: Path) -> NotebookNode:
    """Return a lesson in which each solution follows its gap and the check of the gap."""
    solved, gaps = read(path), read(NOTEBOOKS / path.name).cells
    cells = []
    for number, cell in enumerate(solved.cells):
        if is_check(cell):  # the solution is the last cell so far
            pair = gaps[number - 1 : number + 1]
            cells[-1:-1] = [nbformat.from_dict(gap | {"id": f"{gap.id}-gap"}) for gap in pair]
        cells.append(cell)
    solved.cells = cells
    return solved


def is_check(cell: NotebookNode) -> bool:
    return cell.source.startswith("%ddp_exercise")


def may_fail(cell: NotebookNode) -> bool:
    return "raises-exception" in cell.metadata.get("tags", ())


def executed(notebook: NotebookNode, folder: Path) -> NotebookNode:
    """Run a shortened lesson from top to bottom. ``folder`` replaces the project folder."""
    (folder / "data").mkdir()
    (folder / "notebooks").mkdir()
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.source = [], shortened(cell.source)
    resources = {"metadata": {"path": str(folder / "notebooks")}}
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("PYTEST_")]:
            patch.delenv(name)  # with them, ipykernel hides the output of child processes
        NotebookClient(notebook, timeout=200, resources=resources).execute()
    nbformat.validate(notebook)
    return notebook
