"""A notebook run without a browser, and what of it stands in a static page."""

import base64
import os
import re
from pathlib import Path
from subprocess import run
from sys import executable

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook

from tests.cluster.rig import DYNAMO

WIDTH_AT_LEAST = 800


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An executed notebook, and beside it the same as HTML."""
    folder = tmp_path_factory.mktemp("saved")
    (folder / "data").mkdir()
    cells = [
        "%load_ext ddpnb",
        "%ddp_start -n 2 --device cpu",
        "%ddp_compare ddp --task digits --epochs 0.5 --name kept",
        "%ddp_plot kept/ddp",
        "%ddp_runs",
        "%ddp_stop",
    ]
    notebook = new_notebook(cells=[new_code_cell(source) for source in cells])
    notebook.metadata.kernelspec = {"name": "python3", "display_name": "Python 3"}
    path = folder / "saved.ipynb"
    nbformat.write(notebook, path)
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("PYTEST_")]:
            patch.delenv(name)  # ipykernel hides what child processes print where it sees one
        for name, value in DYNAMO.items():
            patch.setenv(name, value)
        _jupyter("execute", "--inplace", "--timeout=200", str(path))
    _jupyter("nbconvert", "--to", "html", str(path))
    return path


@pytest.mark.timeout(300)
def test_an_executed_notebook_holds_its_results_without_widgets(executed: Path) -> None:
    saved = nbformat.read(executed, as_version=4)
    nbformat.validate(saved)
    html = {"text/html", "text/plain"}
    for cell in saved.cells[2:4]:
        assert [set(output.data) for output in cell.outputs] == [
            html,
            {"image/png", "text/plain"},
            html,
        ]
    page = executed.with_suffix(".html").read_text()
    images = re.findall(r'<img[^>]*src="data:image/png;base64,([^"]+)"', page)
    assert len(images) == 2
    for image in images:
        png = base64.b64decode(image)
        assert png.startswith(b"\x89PNG")
        assert int.from_bytes(png[16:20]) >= WIDTH_AT_LEAST
    captions = re.findall(r"<caption[^>]*>([^<]*)</caption>", page)
    assert len(captions) == 4
    assert captions[1].startswith("kept: digits, global batch 256")
    assert "stored run" in captions[3]
    assert page.count("The cluster has stopped.") == 1
    assert "Traceback" not in page


def _jupyter(*words: str) -> None:
    done = run([executable, "-m", "jupyter", *words], capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
