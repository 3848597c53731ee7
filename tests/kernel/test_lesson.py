"""Does the first lesson run as it was saved, without a browser?"""

import os
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

LESSON = Path(__file__).parents[2] / "notebooks" / "01_first_comparison.ipynb"


@pytest.mark.timeout(300)
def test_the_lesson_runs_in_nbclient(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("PYTEST_")]:
        monkeypatch.delenv(name)  # ipykernel hides what child processes print where it sees one
    (tmp_path / "data").mkdir()
    (tmp_path / "notebooks").mkdir()
    notebook = nbformat.read(LESSON, as_version=4)
    saved = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.outputs or cell.source == "%load_ext ddpnb" for cell in saved)
    for cell in saved:
        cell.outputs = []
    resources = {"metadata": {"path": str(tmp_path / "notebooks")}}
    NotebookClient(notebook, timeout=200, resources=resources).execute()
    race = next(cell for cell in notebook.cells if "--name race" in cell.source)
    kinds = [set(output.data) for output in race.outputs]
    assert ["image/png" in kind for kind in kinds] == [True, False]
    assert "dp (emulated)" in race.outputs[1].data["text/html"]
    assert notebook.cells[-1].outputs[0].text == "The cluster has stopped.\n"
    assert (tmp_path / "data" / "runs").is_dir()
