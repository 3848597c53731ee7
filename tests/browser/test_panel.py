"""The panel in a real JupyterLab can be used with only the keyboard."""

import re
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook
from playwright.sync_api import Browser, Locator, Page, expect

from tests.browser.lab import open_notebook, wait_for_kernel
from tests.browser.test_lab import command, screenshot

PANEL = 1
"""Index of the cell that shows the panel."""

pytestmark = [pytest.mark.browser, pytest.mark.timeout(600)]


@pytest.fixture
def page(chromium: Browser, lab_folder: Path, lab_address: str) -> Iterator[Page]:
    """A notebook that shows the panel, open in JupyterLab."""
    (lab_folder / "panel" / "data").mkdir(parents=True)
    sources = ["%load_ext ddpnb", "%ddp_panel"]
    notebook = new_notebook(cells=[new_code_cell(source) for source in sources])
    notebook.metadata.kernelspec = {"name": "python3", "display_name": "Python 3"}
    nbformat.write(notebook, lab_folder / "panel" / "panel.ipynb")
    page = chromium.new_page(viewport={"width": 1600, "height": 1100})
    open_notebook(page, lab_address, "panel/panel.ipynb")
    wait_for_kernel(page)
    for index in (0, PANEL):
        cell(page, index).locator(".jp-InputArea-editor").click()
        command(page, "notebook:run-cell")
        prompt = cell(page, index).locator(".jp-InputPrompt")
        expect(prompt).to_have_text(re.compile(r"\[\d+\]"), timeout=60_000)
    page.get_by_role("button", name="Run", exact=True).wait_for(timeout=60_000)
    yield page
    page.close()


def cell(page: Page, index: int) -> Locator:
    return page.locator(".jp-CodeCell").nth(index)


def focused(page: Page) -> str:
    """Return the name that a screen reader would read for the focused element."""
    return str(
        page.evaluate(
            """() => {
            const at = document.activeElement;
            const label = at.labels && at.labels[0];
            return (label ? label.innerText : at.innerText || at.title).trim();
        }"""
        )
    )


def tab_to(page: Page, name: str) -> None:
    for _ in range(30):
        if focused(page) == name:
            return
        page.keyboard.press("Tab")
    raise AssertionError(f"Tab does not reach {name}; the focus is on {focused(page)}")


def test_it_trains_by_keyboard_alone_until_it_is_stopped(page: Page) -> None:
    controls = cell(page, PANEL).locator("input, select, textarea, button.jupyter-button")
    unlabelled = controls.evaluate_all(
        """all => all.filter(e => !(e.labels && e.labels.length && e.labels[0].innerText.trim())
            && !e.innerText.trim()).map(e => e.outerHTML)"""
    )
    assert unlabelled == []
    controls.first.focus()
    tab_to(page, "async")
    page.keyboard.press("Space")
    tab_to(page, "epochs")
    page.keyboard.press("Control+A")
    page.keyboard.type("100000")
    tab_to(page, "as a magic")
    expect(page.get_by_label("as a magic")).to_have_value(
        "%ddp_start -n 2\n%ddp_compare ddp --task digits --epochs 100000 --batch-size 64"
    )
    tab_to(page, "Run")
    page.keyboard.press("Space")
    picture = cell(page, PANEL).locator(".jp-RenderedImage img")
    for _ in range(3):
        shown = str(picture.get_attribute("src", timeout=60_000))
        expect(picture).not_to_have_attribute("src", shown, timeout=30_000)
    assert focused(page) == "Run"
    screenshot(page, "panel-while-training")
    tab_to(page, "Stop")
    page.keyboard.press("Space")
    expect(cell(page, PANEL).locator("[role=status]")).to_contain_text("Stopped", timeout=20_000)
    expect(cell(page, PANEL).locator("table").first).to_contain_text("stopped")
    assert focused(page) == "Stop"
