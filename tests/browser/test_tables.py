"""Tables in a real Chromium: what fits, and what stays in sight where it does not."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
from playwright.sync_api import Browser, Page

from ddpnb.history.comparison import Comparison
from ddpnb.history.model import Status
from ddpnb.history.query import StoredRun
from ddpnb.protocol.memory import Memory
from ddpnb.protocol.notation import Target
from ddpnb.reports.export.report import report_html
from ddpnb.reports.findings import results_table
from ddpnb.reports.listing import runs_table
from tests.unit.history.fake_runs import fake_comparison, fake_run, header, spec

OUTPUT_PIXELS = 988
"""Width of an output in a JupyterLab of 1440 pixels, with the file browser open."""
TARGET = Target(value=0.3)
LOOK = "<meta charset=utf-8><style>body { margin: 0; font: 14px/1.4 sans-serif }</style>"

pytestmark = [pytest.mark.browser, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def page(chromium: Browser) -> Iterator[Page]:
    """An empty page as wide as an output."""
    page = chromium.new_page(viewport={"width": OUTPUT_PIXELS, "height": 900})
    yield page
    page.close()


def usual(repeats: int) -> Comparison:
    """Lesson 1's comparison: all columns that a CPU fills, with ranges."""
    runs = []
    for repeat in range(repeats):
        for name in ("single", "no-comm", "dp", "ddp", "async"):
            run = fake_run(name, repeat=repeat)
            report = replace(
                run.snapshot().reports[0],
                memory=Memory(
                    1_200_000, 1_200_000, 1_100_000, 900_000 if name == "dp" else 450_000
                ),
                final_loss=0.0539 + 0.001 * repeat,
                held_out_accuracy=0.9611 + 0.005 * repeat,
            )
            run.add_report(report)
            runs.append(run.snapshot())
    return fake_comparison().with_runs(runs)


@pytest.mark.parametrize("repeats", [1, 3])
def test_the_usual_comparison_fits_an_output(page: Page, repeats: int):
    table = results_table(usual(repeats), TARGET)
    page.set_content(LOOK + table.html())
    assert len(table.columns) == 11
    assert page.evaluate("document.querySelector('table').offsetWidth") <= OUTPUT_PIXELS


def test_the_usual_comparison_fits_the_report_html(page: Page):
    page.set_viewport_size({"width": 1440, "height": 900})
    page.set_content(report_html(usual(3), b"", TARGET))
    around = "document.querySelector('table').parentElement"
    assert page.evaluate(f"{around}.scrollWidth <= {around}.clientWidth")
    page.set_viewport_size({"width": OUTPUT_PIXELS, "height": 900})


def test_a_table_that_does_not_fit_scrolls_alone_and_keeps_its_names(page: Page):
    page.set_viewport_size({"width": 480, "height": 900})
    page.set_content(LOOK + results_table(usual(3), TARGET).html())
    page.evaluate("document.querySelector('table').parentElement.scrollLeft = 300")
    names = page.locator("tbody th")
    assert [round(name.bounding_box()["x"]) for name in names.all()] == [0] * 5
    assert page.evaluate("document.documentElement.scrollWidth") == 480
    page.set_viewport_size({"width": OUTPUT_PIXELS, "height": 900})


def test_one_long_name_or_failure_leaves_the_stored_runs_readable(page: Page):
    killed = "rank 1 was killed, which most often means that the memory was used up; " * 2
    runs = [
        StoredRun(
            run_id=f"{index}",
            comparison_id=f"{index}",
            comparison="a-comparison",
            name="ddp",
            repeat=0,
            created=1e9 + index,
            task=task,
            num_events=720,
            status=status,
            detail=detail,
            spec=spec("ddp"),
            header=header(spec("ddp"), 3),
        )
        for index, (task, status, detail) in enumerate(
            [
                ("digits", Status.FINISHED, ""),
                ("a_module.of_mine_with_a_very_long_name:build_task", Status.FINISHED, ""),
                ("digits", Status.FAILED, killed),
            ]
        )
    ]
    page.set_content(LOOK + runs_table(runs).html())
    assert page.evaluate("document.querySelector('table').offsetWidth") <= OUTPUT_PIXELS
    heights = [row.bounding_box()["height"] for row in page.locator("tbody tr").all()]
    assert max(heights[1:]) < 45, "those that have finished take one line"
