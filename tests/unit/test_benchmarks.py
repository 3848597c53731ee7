"""Can every benchmark still be begun, and is the table that of the figures?"""

import importlib
from pathlib import Path

import pytest

import benchmarks
from benchmarks import table, versus

NAMES = sorted(path.stem for path in Path(benchmarks.__file__).parent.glob("[a-z]*.py"))


@pytest.mark.parametrize("name", NAMES)
def test_what_a_benchmark_calls_is_there(name: str):
    importlib.import_module(f"benchmarks.{name}")


def test_the_table_is_what_the_newest_figures_make():
    text = table.README.read_text()
    assert table.with_table(text) == text


@pytest.mark.parametrize(
    "readme", [versus.README, versus.OVERVIEW], ids=lambda path: path.parent.name
)
def test_the_tables_beside_other_tools_are_those_of_the_stored_rows(readme: Path):
    assert versus.with_table(readme) == readme.read_text()
