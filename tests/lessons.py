"""Functions that read, shorten and run the lessons."""

import os
import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbformat import NotebookNode

from tests.cluster.rig import DYNAMO

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"
SOLUTIONS = sorted((NOTEBOOKS / "solutions").glob("*.ipynb"))


def read(path: Path) -> NotebookNode:
    return nbformat.read(path, as_version=4)


def code_of(path: Path) -> list[NotebookNode]:
    return [cell for cell in read(path).cells if cell.cell_type == "code"]


SHORTER = {
    r"widths = \[.*\]": "widths = [8, 8, 16]",
    r"(_compare .*--epochs) \d+(?!.*--kill)": r"\1 0.5",
    r"--epochs \d+(.*)--kill 1@1s": r"--epochs 1\1--kill 1@0.3s",
    "8xV100": "3xV100",
    r"\(8 \* speeds": "(3 * speeds",
    "%ddp_restart -n 8": "%ddp_restart -n 3",
    "--nnodes 2": "--nnodes 1",
    r"\({host} & {host}; wait\)": "({host})",
}
"""Patterns in the lessons, and the text that makes a lesson run faster."""


def shortened(source: str) -> str:
    for pattern, text in SHORTER.items():
        source = re.sub(pattern, text, source)
    return source


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
        for name, value in DYNAMO.items():
            patch.setenv(name, value)
        NotebookClient(notebook, timeout=200, resources=resources).execute()
    nbformat.validate(notebook)
    return notebook
