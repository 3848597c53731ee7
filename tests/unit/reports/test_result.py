import csv
import re
from dataclasses import replace
from pathlib import Path

import pytest
from IPython.core.interactiveshell import InteractiveShell

from ddpnb.protocol.errors import UserError
from ddpnb.reports.result import ComparisonResult
from ddpnb.results.comparison import Comparison
from tests.unit.reports.test_tables import EVIL, check_html
from tests.unit.results.fake_runs import KeptRun, batch, fake_comparison, step


@pytest.fixture
def result() -> ComparisonResult:
    comparison = fake_comparison(num_steps=60)
    cell = {"task": "cell", "source": f"def model(): ...  # {EVIL}"}
    specs = tuple(replace(spec, **cell) for spec in comparison.specs)
    return ComparisonResult(replace(comparison, specs=specs))


def test_a_result_is_saved_as_page_picture_and_numbers(result: ComparisonResult, tmp_path: Path):
    folder = tmp_path / "build" / "demo"
    for name in ("it.html", "it.png", "it.csv", "it.runs.csv", "it.txt", "it.svg"):
        assert result.save(folder / name).startswith(f"{folder / name}: ")
    html = (folder / "it.html").read_text()
    check_html(html.removeprefix("<!doctype html>"))
    assert all(piece in html for piece in ("data:image/png;base64,", "@media print"))
    assert not re.search(r'(?:src|href)="(?!data:)', html), "the page must need no other file"
    assert "def model(): ...  # &lt;script&gt;" in html
    assert "2.13.0" in html
    assert result.sentence() in html
    rows = list(csv.DictReader((folder / "it.runs.csv").open()))
    assert [row["strategy"] for row in rows] == ["single", "dp", "ddp", "async"]
    assert len((folder / "it.csv").read_text().splitlines()) == 361
    with pytest.raises(UserError, match="cannot be written"):
        result.save(folder / "it.html" / "it.png")
    with pytest.raises(UserError, match=r"one of \.csv, \.html"):
        result.save(folder / "it.json")


def test_a_saved_notebook_holds_sentence_picture_table_and_text(result: ComparisonResult):
    bundle = result._repr_mimebundle_()
    html = bundle["text/html"]
    check_html(html)
    places = [html.index(part) for part in (result.sentence(), "<img", "<table", "<details>")]
    assert places == sorted(places)
    assert html.count("<table") == 2
    assert "<script" not in html
    assert bundle["text/plain"].startswith(result.sentence())
    assert list(bundle) == ["text/plain", "text/html"], "the figure is stored once"
    assert html.count("<img") == 1


def test_a_result_is_not_shown_twice_in_one_cell(result: ComparisonResult):
    shell = InteractiveShell.instance()
    try:
        assert "text/html" in shell.display_formatter.format(result)[0]
        result.shown_in_cell = shell.execution_count
        assert shell.display_formatter.format(result)[0] == {}
        result.shown_in_cell -= 1
        assert "text/html" in shell.display_formatter.format(result)[0]
    finally:
        InteractiveShell.clear_instance()


def test_metrics_of_ones_own_are_columns():
    run = KeptRun(run_id="m", name="mine")
    steps = [step(0, 1.0, 1.0), step(1, 2.0, 1.0)]
    run.add(batch("m", steps, metrics=[(0, "grad", 0.5), (1, "loss", 9.0)]))
    mine = Comparison(comparison_id="c", name="c", runs=(run.snapshot(),))
    found = ComparisonResult(mine).steps()
    assert found["grad"].fillna(-1).tolist() == [0.5, -1]
    assert found["metric_loss"].tolist()[1] == 9.0
    assert found["loss"].tolist() == [1.0, 1.0]
