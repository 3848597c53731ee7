"""Runs that an earlier version has stored are read and drawn.

``earlier_store.sql`` is the dump of a real comparison on two CPU ranks.  Its headers do not say
whether a strategy is emulated, and its marks have no kinds: both fields are younger.
"""

import sqlite3
from pathlib import Path

import pytest

from ddpnb.history.comparison import magic_of
from ddpnb.history.store import FILE_NAME, Store
from ddpnb.history.summary import summarise
from ddpnb.protocol.messages import MarkKind
from ddpnb.reports.listing import Details, runs_table
from ddpnb.reports.result import ComparisonResult

DUMP = Path(__file__).with_name("earlier_store.sql")
NAMES = ["single", "dp", "ddp", "async"]


@pytest.fixture
def store(tmp_path: Path):
    with sqlite3.connect(tmp_path / FILE_NAME) as connection:
        connection.executescript(DUMP.read_text())
    connection.close()
    opened = Store(tmp_path)
    yield opened
    opened.close()


def test_an_earlier_comparison_has_its_numbers(store: Store):
    single, dp, ddp, async_ = summarise(store.load("before"))
    assert [each.name for each in (single, dp, ddp, async_)] == NAMES
    assert [round(each.samples_per_second.middle) for each in (single, dp, ddp, async_)] == [
        6649,
        5012,
        4528,
        4614,
    ]
    assert (single.is_emulated, dp.is_emulated) == (False, True)
    assert (async_.staleness_median, async_.staleness_max) == (1, 2)
    assert ddp.held_out_accuracy.middle == pytest.approx(0.850, abs=5e-4)
    assert "Rank 1 is 2x slower on purpose." in ddp.notes


def test_an_earlier_mark_gets_a_kind(store: Store):
    (ddp,) = store.load("before/ddp").runs
    assert [(mark.rank, mark.text, mark.kind) for mark in ddp.marks] == [
        (1, "2x slower", MarkKind.OTHER)
    ]


def test_an_earlier_comparison_is_listed_drawn_and_saved(store: Store, tmp_path: Path):
    listed = runs_table(store.list()).text()
    assert all(f"before/{name}" in listed for name in NAMES)
    comparison = store.load("before")
    result = ComparisonResult(comparison)
    assert "dp (emulated)" in result.table().text()
    assert result.plot().png().startswith(b"\x89PNG")
    assert "before" in repr(Details(comparison))
    assert magic_of(comparison) == (
        "%ddp_compare dp ddp async --task digits --epochs 2 --batch-size 240 --lr 0.05"
        " --momentum 0.9 --seed 0 --slow 1:2x"
    )
    assert all(path.stat().st_size > 0 for path in result.save(tmp_path / "saved"))
