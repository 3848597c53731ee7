"""The first lesson in a real JupyterLab, as a teacher would run it."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, sync_playwright

from tests.browser.lab import CHROMIUM_FLAGS, SCREENSHOTS, find_chromium, lab_server

LESSON = Path(__file__).parents[2] / "notebooks" / "01_first_comparison.ipynb"
RACE = 4
"""The number of the cell that compares, among code cells, from 1."""

pytestmark = [pytest.mark.browser, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def lesson(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """The lesson, open in JupyterLab in a folder of its own."""
    chromium = find_chromium()
    folder = tmp_path_factory.mktemp("lab")
    (folder / "notebooks").mkdir()
    (folder / "data").mkdir()
    shutil.copy(LESSON, folder / "notebooks")
    with lab_server(folder) as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=CHROMIUM_FLAGS)
        page = browser.new_page(viewport={"width": 1600, "height": 900})
        page.goto(address.format(path=f"notebooks/{LESSON.name}"))
        page.wait_for_selector(".jp-Notebook .jp-CodeCell", timeout=90_000)
        page.wait_for_selector(".jp-NotebookPanel-toolbar")
        page.add_style_tag(content=".Toastify { display: none }")  # JupyterLab's own news
        yield page
        browser.close()


def command(page: Page, name: str, **arguments: object) -> None:
    """Run one of JupyterLab's own commands."""
    script = "([name, args]) => { window.jupyterapp.commands.execute(name, args) }"
    page.evaluate(script, [name, arguments])


def screenshot(page: Page, name: str) -> None:
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=SCREENSHOTS / f"{name}.png")


def test_the_figure_changes_while_it_trains_and_the_table_stands_at_the_end(lesson: Page) -> None:
    command(lesson, "notebook:clear-all-cell-outputs")
    race = lesson.locator(".jp-CodeCell").nth(RACE - 1)
    race.scroll_into_view_if_needed()
    command(lesson, "notebook:run-all-cells")
    picture = race.locator(".jp-RenderedImage img")
    picture.wait_for(timeout=60_000)
    race.scroll_into_view_if_needed()
    seen = set()
    progress = race.locator("[role=progressbar]")
    while progress.count():
        seen.add(picture.get_attribute("src"))
        if len(seen) == 5:
            screenshot(lesson, "lesson-while-training")
        lesson.wait_for_timeout(300)
    assert len(seen) > 5, "the figure did not change while training"
    race.locator("table").wait_for(timeout=10_000)
    race.locator("table").scroll_into_view_if_needed()
    text = race.locator("table").inner_text()
    assert "dp (emulated)" in text
    assert "held-out accuracy" in text
    screenshot(lesson, "lesson-table")


def test_no_cell_fails_and_the_cluster_stops(lesson: Page) -> None:
    last = lesson.locator(".jp-CodeCell").last
    last.scroll_into_view_if_needed()
    last.get_by_text("The cluster has stopped.").wait_for(timeout=120_000)
    assert lesson.locator('[data-mime-type="application/vnd.jupyter.error"]').count() == 0
    screenshot(lesson, "lesson-end")


def test_the_figure_is_readable_in_the_dark_theme(lesson: Page) -> None:
    command(lesson, "apputils:change-theme", theme="JupyterLab Dark")
    lesson.wait_for_function("document.body.dataset.jpThemeLight === 'false'", timeout=30_000)
    lesson.locator("#jupyterlab-splash").wait_for(state="detached", timeout=30_000)
    race = lesson.locator(".jp-CodeCell").nth(RACE - 1)
    race.locator("table").scroll_into_view_if_needed()
    colour = race.locator("table").evaluate("element => getComputedStyle(element).color")
    assert brightness(colour) > 150, "the table's text must be light on a dark ground"
    screenshot(lesson, "lesson-dark")


def brightness(colour: str) -> float:
    """Return the mean of ``rgb(r, g, b)``."""
    numbers = colour[colour.index("(") + 1 : -1].split(",")[:3]
    return sum(map(float, numbers)) / 3
