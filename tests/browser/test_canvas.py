"""The interactive canvas of ``%matplotlib widget`` in a real JupyterLab."""

from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook
from playwright.sync_api import Browser, Locator, Page, expect

from tests.browser.test_lab import command, screenshot, wait_for_saved
from tests.browser.test_panel import cell, run_cell

RACE = 1
"""Which cell compares, from 0."""
SOURCES = [
    "%load_ext ddpnb\n%matplotlib widget\n%ddp_auto off\n%ddp_start -n 2 --device cpu",
    "%ddp_compare ddp --task digits --epochs 0.5 --name seen",
    "%ddp_stop",
]
PIXELS = "canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data"
CHECKSUM = f"canvas => {PIXELS}.reduce((sum, value) => (31 * sum + value) | 0, 0)"
KEEP = f"""canvas => {{
    window.kept = {PIXELS};
    return new Set(new Uint32Array(window.kept.buffer)).size;
}}"""
"""Keeps the pixels in the page, as they are millions; returns how many colours they have."""
CHANGED = f"canvas => {PIXELS}.filter((value, i) => value !== window.kept[i]).length"
"""How many of the numbers differ from those kept: four a pixel."""

pytestmark = [pytest.mark.browser, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def path(lab_folder: Path) -> Path:
    """A notebook's file, in a project of its own."""
    folder = lab_folder / "canvas"
    (folder / "data").mkdir(parents=True)
    return folder / "canvas.ipynb"


@pytest.fixture(scope="module")
def page(chromium: Browser, lab_address: str, path: Path) -> Iterator[Page]:
    """A comparison that has ended, open in JupyterLab; the cluster is stopped at the end."""
    notebook = new_notebook(cells=[new_code_cell(source) for source in SOURCES])
    notebook.metadata.kernelspec = {"name": "python3", "display_name": "Python 3"}
    nbformat.write(notebook, path)
    opened = chromium.new_page(viewport={"width": 1400, "height": 1900})
    opened.goto(lab_address.format(path=f"canvas/{path.name}"))
    opened.wait_for_selector(".jp-Notebook .jp-CodeCell", timeout=90_000)
    opened.get_by_text("| Idle").wait_for(timeout=90_000)
    run_cell(opened, 0)
    run_cell(opened, RACE)
    yield opened
    run_cell(opened, 2)
    opened.close()


def test_the_canvas_is_drawn_below_picture_and_table_and_zooms(page: Page) -> None:
    race = cell(page, RACE)
    expect(race.locator(".jp-RenderedImage img")).to_have_count(1)
    expect(race.locator("table")).to_have_count(1)
    canvas = race.locator(".jupyter-matplotlib canvas").first
    canvas.wait_for(timeout=30_000)
    canvas.scroll_into_view_if_needed()
    wait_for_ink(page, canvas)
    fits = "canvas => canvas.getBoundingClientRect().right <= innerWidth"
    assert canvas.evaluate(fits)
    screenshot(page, "canvas")
    race.locator(".jupyter-matplotlib").hover()
    race.locator(".jupyter-matplotlib button[title*='Zoom']").first.click()
    box = canvas.bounding_box()
    assert box is not None
    left, top = box["x"] + 0.10 * box["width"], box["y"] + 0.20 * box["height"]
    page.wait_for_timeout(500)  # the canvas leaves out moves that follow too soon on another
    page.mouse.move(left, top)
    page.wait_for_timeout(500)
    page.mouse.down()
    for share in (0.02, 0.04, 0.06):
        page.mouse.move(left + share * box["width"], top + 2 * share * box["height"])
        page.wait_for_timeout(200)
    page.mouse.up()
    least = 0.001 * canvas.evaluate("canvas => 4 * canvas.width * canvas.height")
    for _ in range(60):
        page.wait_for_timeout(500)
        if (changed := canvas.evaluate(CHANGED)) > least:
            break
    screenshot(page, "canvas-zoomed")
    assert changed > least


def wait_for_ink(page: Page, canvas: Locator) -> None:
    """Keep a canvas's pixels as soon as they are a figure, no empty sheet, and stay as they are.

    Its size may still change a moment after it has appeared.
    """
    before = 0
    for _ in range(60):
        page.wait_for_timeout(500)
        if (now := canvas.evaluate(CHECKSUM)) == before and canvas.evaluate(KEEP) > 50:
            return
        before = now
    raise AssertionError("no figure was drawn, or it did not come to rest")


def test_a_saved_notebook_keeps_picture_and_table(page: Page, path: Path) -> None:
    command(page, "docmanager:save")
    wait_for_saved(page, path, "image/png")
    page.reload()
    page.wait_for_selector(".jp-Notebook .jp-CodeCell", timeout=90_000)
    race = cell(page, RACE)
    expect(race.locator(".jp-RenderedImage img")).to_have_count(1, timeout=30_000)
    expect(race.locator("table")).to_have_count(1)
    page.get_by_text("| Idle").wait_for(timeout=90_000)
