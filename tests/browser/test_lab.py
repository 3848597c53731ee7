"""The first comparison of the first lesson runs in a real JupyterLab, as in class."""

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from playwright.sync_api import Browser, Locator, Page, TimeoutError

from ddpnb.reports.figures.figure import FIGURE_WIDTH
from ddpnb.reports.style import SMALL_POINTS
from tests.browser.lab import SCREENSHOTS, open_notebook, wait_for_kernel
from tests.lessons import SOLUTIONS

LESSON = SOLUTIONS[0]
RACE = 4
"""Position of the cell that compares, among the code cells, counted from 1."""
pytestmark = [pytest.mark.browser, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def folder(lab_folder: Path) -> Path:
    made = lab_folder / "lesson"
    (made / "notebooks").mkdir(parents=True)
    (made / "data").mkdir()
    lesson = nbformat.read(LESSON, as_version=4)
    names = [cell.source.partition("--name ")[2] for cell in lesson.cells]
    stop = next(cell for cell in lesson.cells if cell.source == "%ddp_stop")
    lesson.cells[names.index("race") + 1 :] = [stop]  # tests/kernel/test_lessons.py runs all cells
    for cell in lesson.cells:
        if cell.cell_type == "code":  # so that all later outputs come from this test
            cell.outputs, cell.execution_count = [], None
            cell.source = cell.source.replace("8xV100", "2xV100")
    nbformat.write(lesson, made / "notebooks" / LESSON.name)
    return made


@pytest.fixture(scope="module")
def lesson(chromium: Browser, lab_address: str, folder: Path) -> Iterator[Page]:
    page = chromium.new_page(viewport={"width": 1366, "height": 768})
    open_notebook(page, lab_address, f"lesson/notebooks/{LESSON.name}")
    wait_for_kernel(page)
    yield page
    use_theme(page, "JupyterLab Light")
    page.close()


def use_theme(page: Page, name: str) -> None:
    is_light = "true" if name.endswith("Light") else "false"
    command(page, "apputils:change-theme", theme=name)
    page.wait_for_function(f"document.body.dataset.jpThemeLight === '{is_light}'", timeout=30_000)
    page.locator("#jupyterlab-splash").wait_for(state="detached", timeout=30_000)


def figure_of(page: Page, cell: Locator) -> Locator:
    """Wait for a cell's figure. If no figure appears, fail with the notebook's outputs."""
    picture = cell.locator(".jp-RenderedImage img")
    failed = page.locator('[data-mime-type="application/vnd.jupyter.error"]')
    try:
        picture.or_(failed).first.wait_for(timeout=180_000)
    except TimeoutError:
        said = "\n\n".join(page.locator(".jp-OutputArea").all_inner_texts())
        pytest.fail(f"no figure appeared; the outputs so far:\n{said}")
    assert not failed.count(), failed.first.inner_text()
    return picture


def command(page: Page, name: str, **arguments: object) -> None:
    script = "([name, args]) => { window.jupyterapp.commands.execute(name, args) }"
    page.evaluate(script, [name, arguments])


def screenshot(page: Page, name: str) -> None:
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=SCREENSHOTS / f"{name}.png")


def test_the_figure_grows_in_sight_and_the_table_stands_at_the_end(lesson: Page) -> None:
    command(lesson, "notebook:clear-all-cell-outputs")
    race = lesson.locator(".jp-CodeCell").nth(RACE - 1)
    command(lesson, "notebook:run-all-cells")
    picture = figure_of(lesson, race)

    def check_size() -> None:
        box = picture.bounding_box()
        assert box["height"] <= 520
        assert SMALL_POINTS / 72 / FIGURE_WIDTH * box["width"] >= 10, (
            "the smallest text must be readable"
        )

    race.evaluate("cell => cell.scrollIntoView({block: 'start'})")
    seen: dict[str | None, str] = {}
    progress = race.get_by_role("progressbar")
    progress.wait_for(timeout=10_000)
    while progress.count():
        is_new = (source := picture.get_attribute("src")) not in seen
        seen[source] = picture.evaluate("image => image.naturalWidth + 'x' + image.naturalHeight")
        if is_new and len(seen) == 2:
            check_size()
            screenshot(lesson, "lesson-while-training")
        lesson.wait_for_timeout(200)
    assert len(seen) >= 3, "the figure did not change while training"
    assert len(set(seen.values())) == 1, "the figure's size changed while training"
    race.locator("table").first.wait_for(timeout=10_000)
    check_size()
    race.get_by_text("How to read this").click()
    assert "2 emulated V100" in race.locator("table").nth(1).inner_text()
    screenshot(lesson, "lesson-table")


def test_no_cell_fails_and_the_cluster_stops_and_it_is_readable_in_the_dark(lesson: Page) -> None:
    last = lesson.locator(".jp-CodeCell").last
    last.scroll_into_view_if_needed()
    last.get_by_text("The cluster has stopped.").wait_for(timeout=240_000)
    assert lesson.locator('[data-mime-type="application/vnd.jupyter.error"]').count() == 0
    screenshot(lesson, "lesson-end")
    use_theme(lesson, "JupyterLab Dark")
    race = lesson.locator(".jp-CodeCell").nth(RACE - 1)
    race.locator("table").first.scroll_into_view_if_needed()
    colour = race.locator("table").first.evaluate("element => getComputedStyle(element).color")
    numbers = re.findall(r"\d+", colour)[:3]
    assert sum(map(int, numbers)) / 3 > 150, "the table's text must be light in the dark theme"
    screenshot(lesson, "lesson-dark")


def test_a_saved_notebook_shows_figure_and_table_without_a_kernel(
    lesson: Page, folder: Path, lab_address: str
) -> None:
    original = folder / "notebooks" / LESSON.name
    command(lesson, "docmanager:save")
    deadline = time.monotonic() + 60
    while "The cluster has stopped." not in original.read_text():
        assert time.monotonic() < deadline, "the notebook was not saved"
        lesson.wait_for_timeout(200)
    saved = json.loads(original.read_text())
    saved["metadata"]["kernelspec"] = {"name": "gone", "display_name": "gone", "language": ""}
    (folder / "notebooks" / "saved.ipynb").write_text(json.dumps(saved))
    open_notebook(lesson, lab_address, "lesson/notebooks/saved.ipynb")
    if (dialog := lesson.locator(".jp-Dialog")).count():  # JupyterLab asks for a kernel
        dialog.get_by_role("button", name="No Kernel").click()
    race = lesson.locator(".jp-CodeCell").nth(RACE - 1)
    picture = race.locator(".jp-RenderedImage img")
    picture.wait_for(timeout=30_000)
    picture.scroll_into_view_if_needed()
    assert "held-out accuracy" in race.locator("table").first.inner_text()
    screenshot(lesson, "lesson-saved")
