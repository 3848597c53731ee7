"""Do the lessons run without a browser?  The first trains less than as it is saved."""

import os
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbconvert import HTMLExporter

from tests.cluster.rig import DYNAMO

LESS = {
    "--epochs 42 --batch-size 128 --repeats 3": "--epochs 1 --batch-size 128 --repeats 2",
    "--epochs 42 --batch-size 128 --name": "--epochs 1 --batch-size 128 --name",
    "--epochs 6 --batch-size 256": "--epochs 1 --batch-size 256",
    "--epochs 20 --batch-size 512": "--epochs 2 --batch-size 512",
}
LESSONS = Path(__file__).parents[2] / "notebooks"
FIRST = "01_first_comparison.ipynb"


def executed(name: str, folder: Path, changes: dict[str, str]) -> nbformat.NotebookNode:
    """Run a lesson in a folder of its own, with words of its cells replaced."""
    (folder / "data").mkdir()
    (folder / "notebooks").mkdir()
    notebook = nbformat.read(LESSONS / name, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert cell.outputs or not cell.source.startswith("%ddp_")  # as it is saved
            cell.outputs = []
            for words, others in changes.items():
                cell.source = cell.source.replace(words, others)
    resources = {"metadata": {"path": str(folder / "notebooks")}}
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("PYTEST_")]:
            patch.delenv(name)  # ipykernel hides what child processes print where it sees one
        for name, value in DYNAMO.items():
            patch.setenv(name, value)
        NotebookClient(notebook, timeout=200, resources=resources).execute()
    nbformat.validate(notebook)
    return notebook


@pytest.mark.timeout(300)
def test_the_lesson_runs_and_a_page_of_it_shows_its_results(tmp_path: Path) -> None:
    saved = nbformat.read(LESSONS / FIRST, as_version=4)
    assert all(any(options in cell.source for cell in saved.cells) for options in LESS)
    notebook = executed(FIRST, tmp_path, LESS)
    for name, named in {"race": "8 emulated V100", "cores": "dp (emulated)"}.items():
        race = next(cell for cell in notebook.cells if f"--name {name}" in cell.source)
        kinds = [set(output.data) for output in race.outputs]
        assert ["image/png" in kind for kind in kinds] == [False, True, False]
        assert named in race.outputs[2].data["text/html"]
    assert notebook.cells[-1].outputs[0].text == "The cluster has stopped.\n"
    assert (tmp_path / "data" / "runs").is_dir()
    page, _ = HTMLExporter().from_notebook_node(notebook)
    data = [output.get("data", {}) for cell in notebook.cells for output in cell.get("outputs", ())]
    pictures = [each["image/png"] for each in data if "image/png" in each]
    assert pictures
    assert all(picture.replace("\n", "") in page for picture in pictures)
    assert page.count("<caption") == sum(
        each.get("text/html", "").count("<caption") for each in data
    )
    assert "Traceback" not in page


@pytest.mark.timeout(300)
def test_the_lesson_on_a_step_runs(tmp_path: Path) -> None:
    notebook = executed("04_inside_a_step.ipynb", tmp_path, {})
    checks = [cell.outputs[0] for cell in notebook.cells if cell.source == "%ddp_check net sgd"]
    assert [output.data["text/plain"].split("\n")[0] for output in checks] == [
        "The replicas are the same on ranks 0-2.",
        "The replicas on ranks 0-2 differ: parameters of net.",
    ]
