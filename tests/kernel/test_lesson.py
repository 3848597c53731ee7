"""Do the lessons run without a browser?  The first trains less than as it is saved."""

import os
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.cluster.rig import DYNAMO

LESS = {
    "--epochs 42 --batch-size 128 --repeats 3": "--epochs 1 --batch-size 128 --repeats 2",
    "--epochs 42 --batch-size 128 --name": "--epochs 1 --batch-size 128 --name",
    "--epochs 6 --batch-size 256": "--epochs 1 --batch-size 256",
    "--epochs 20 --batch-size 512": "--epochs 2 --batch-size 512",
}
LESSON = Path(__file__).parents[2] / "notebooks" / "01_first_comparison.ipynb"


@pytest.mark.timeout(300)
def test_the_lesson_runs_in_nbclient(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("PYTEST_")]:
        monkeypatch.delenv(name)  # ipykernel hides what child processes print where it sees one
    for name, value in DYNAMO.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "data").mkdir()
    (tmp_path / "notebooks").mkdir()
    notebook = nbformat.read(LESSON, as_version=4)
    saved = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(any(options in cell.source for cell in saved) for options in LESS)
    assert all(cell.outputs or cell.source == "%load_ext ddpnb" for cell in saved)
    for cell in saved:
        cell.outputs = []
        for options, fewer in LESS.items():
            cell.source = cell.source.replace(options, fewer)
    resources = {"metadata": {"path": str(tmp_path / "notebooks")}}
    NotebookClient(notebook, timeout=200, resources=resources).execute()
    for name, named in {"race": "8 emulated V100", "cores": "dp (emulated)"}.items():
        race = next(cell for cell in notebook.cells if f"--name {name}" in cell.source)
        kinds = [set(output.data) for output in race.outputs]
        assert ["image/png" in kind for kind in kinds] == [False, True, False]
        assert named in race.outputs[2].data["text/html"]
    assert notebook.cells[-1].outputs[0].text == "The cluster has stopped.\n"
    assert (tmp_path / "data" / "runs").is_dir()


@pytest.mark.timeout(300)
def test_the_lesson_on_a_step_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("PYTEST_")]:
        monkeypatch.delenv(name)
    for name, value in DYNAMO.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "data").mkdir()
    (tmp_path / "notebooks").mkdir()
    notebook = nbformat.read(LESSON.with_name("04_inside_a_step.ipynb"), as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert cell.outputs or not cell.source.startswith("%ddp_")
            cell.outputs = []
    resources = {"metadata": {"path": str(tmp_path / "notebooks")}}
    NotebookClient(notebook, timeout=200, resources=resources).execute()
    checks = [cell.outputs[0] for cell in notebook.cells if cell.source == "%ddp_check net sgd"]
    assert [output.data["text/plain"].split("\n")[0] for output in checks] == [
        "The replicas are the same on ranks 0-2.",
        "The replicas on ranks 0-2 differ: parameters of net.",
    ]
