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

VIEW = "application/vnd.jupyter.widget-view+json"
WIDTH_AT_LEAST = 800
BACKENDS = ["inline", "widget"]


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A notebook for each backend of matplotlib, executed, and beside it as HTML."""
    paths = {}
    for backend in BACKENDS:
        folder = tmp_path_factory.mktemp(backend)
        (folder / "data").mkdir()
        cells = [
            f"%load_ext ddpnb\n%matplotlib {backend}",
            "%ddp_start -n 2 --device cpu",
            "%ddp_compare ddp --task digits --epochs 0.5 --name kept",
            "%ddp_plot kept/ddp",
            "%ddp_runs",
            "%ddp_stop",
        ]
        notebook = new_notebook(cells=[new_code_cell(source) for source in cells])
        notebook.metadata.kernelspec = {"name": "python3", "display_name": "Python 3"}
        paths[backend] = folder / f"{backend}.ipynb"
        nbformat.write(notebook, paths[backend])
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("PYTEST_")]:
            patch.delenv(name)  # ipykernel hides what child processes print where it sees one
        for name, value in DYNAMO.items():
            patch.setenv(name, value)
        _jupyter("execute", "--inplace", "--timeout=200", *map(str, paths.values()))
    _jupyter("nbconvert", "--to", "html", *map(str, paths.values()))
    return paths


@pytest.mark.timeout(300)
@pytest.mark.parametrize("backend", BACKENDS)
def test_an_executed_notebook_holds_its_results_without_widgets(
    executed: dict[str, Path], backend: str
) -> None:
    path = executed[backend]
    saved = nbformat.read(path, as_version=4)
    nbformat.validate(saved)
    for cell in saved.cells[2:4]:
        kinds = [set(output.data) for output in cell.outputs]
        beside = [{VIEW, "text/plain"}] if backend == "widget" else []
        assert kinds == [{"image/png", "text/plain"}, {"text/html", "text/plain"}, *beside]
    html = path.with_suffix(".html").read_text()
    images = re.findall(r'<img[^>]*src="data:image/png;base64,([^"]+)"', html)
    assert len(images) == 2
    for image in images:
        png = base64.b64decode(image)
        assert png.startswith(b"\x89PNG")
        assert int.from_bytes(png[16:20]) >= WIDTH_AT_LEAST
    captions = re.findall(r"<caption[^>]*>([^<]*)</caption>", html)
    assert len(captions) == 4
    assert captions[1].startswith("kept: digits, global batch 256")
    assert "stored run" in captions[3]
    assert html.count("The cluster has stopped.") == 1
    assert "Traceback" not in html


def _jupyter(*words: str) -> None:
    done = run([executable, "-m", "jupyter", *words], capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
