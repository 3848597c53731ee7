"""Tables fit an output in a real Chromium, and a wider table keeps its names visible."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
from playwright.sync_api import Browser, Page

from ddpnb.protocol.notation import Target
from ddpnb.reports.listing import runs_table
from ddpnb.reports.result import ComparisonResult
from ddpnb.reports.style import PlotOptions
from ddpnb.results.run import Status
from tests.unit.results.fake_runs import fake_comparison, header, spec, stored

OUTPUT_PIXELS = 828
"""Width of an output if JupyterLab is 1280 pixels wide and its file browser is open."""
LOOK = "<meta charset=utf-8><style>body { margin: 0; font: 14px/1.4 sans-serif }</style>"
TARGET = Target(value=0.3)
RESULT = ComparisonResult(
    fake_comparison(("single", "no-comm", "dp", "ddp", "async"), repeats=3),
    PlotOptions(target=TARGET),
)

pytestmark = [pytest.mark.browser, pytest.mark.timeout(120)]


@pytest.fixture
def page(chromium: Browser) -> Iterator[Page]:
    page = chromium.new_page(viewport={"width": OUTPUT_PIXELS, "height": 900})
    yield page
    page.close()


def test_five_columns_fit_an_output_and_the_rest_is_folded(page: Page):
    page.set_content(LOOK + RESULT.table_html())
    five, whole = page.locator("table").all()
    assert five.bounding_box()["width"] <= OUTPUT_PIXELS
    assert not whole.is_visible()
    page.get_by_text("How to read this").click()
    assert whole.is_visible()
    assert page.evaluate("document.documentElement.scrollWidth") == OUTPUT_PIXELS


def test_the_usual_comparison_fits_the_report_html(page: Page):
    page.set_viewport_size({"width": 1440, "height": 900})
    page.set_content(RESULT.content(".html").decode())
    around = "document.querySelector('table').parentElement"
    assert page.evaluate(f"{around}.scrollWidth <= {around}.clientWidth")


def test_a_table_that_does_not_fit_scrolls_alone_and_keeps_its_names(page: Page):
    page.set_viewport_size({"width": 480, "height": 900})
    page.set_content(LOOK + RESULT.table().html())
    page.evaluate("document.querySelector('table').parentElement.scrollLeft = 300")
    names = page.locator("tbody th")
    assert [round(name.bounding_box()["x"]) for name in names.all()] == [0] * 5
    assert page.evaluate("document.documentElement.scrollWidth") == 480


def test_one_long_name_or_failure_leaves_the_stored_runs_readable(page: Page):
    killed = "rank 1 was killed, which most often means that the memory was used up; " * 2
    fields = {"num_events": 720, "spec": spec("ddp"), "header": header(spec("ddp"), 3)}
    plain = stored("a-comparison/ddp", **fields)
    long = "a_module.of_mine_with_a_very_long_name:build_task"
    runs = [
        replace(plain, comparison_id="3", task=long),
        plain,
        replace(plain, comparison_id="2", status=Status.FAILED, detail=killed),  # shown first
    ]
    page.set_content(LOOK + runs_table(runs).html())
    assert page.evaluate("document.querySelector('table').offsetWidth") <= OUTPUT_PIXELS
    heights = [row.bounding_box()["height"] for row in page.locator("tbody tr").all()]
    assert max(heights[1:]) < 60, "a finished run takes at most two lines"
