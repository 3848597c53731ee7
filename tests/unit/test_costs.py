"""The docs, the formulas and all collectives use the same table of costs."""

from pathlib import Path

import pytest

from ddpnb.protocol.costs import COLLECTIVES, DOUBLE_TREE, GLOO, algorithm_of, in_turn
from ddpnb.rank.collectives.table import METHODS
from ddpnb.scaling.model import bucket_sizes

LABORATORY = Path(__file__).parents[2] / "docs" / "emulated-devices.md"
TABLE = {
    **COLLECTIVES,
    **{f"{name}, by gloo": each for name, each in GLOO.items()},
    "all_reduce, by double-tree": DOUBLE_TREE,
}


def test_the_page_has_the_table():
    rows = [line for line in LABORATORY.read_text().splitlines() if line.startswith("| `")]
    cells = {
        name: (each.name, each.messages, each.num_bytes, each.sent) for name, each in TABLE.items()
    }
    shown = [f"| `{name}` | {' | '.join(row)} |" for name, row in cells.items()]
    assert [row for row in rows if row.removeprefix("| `").partition("`")[0] in TABLE] == shown


@pytest.mark.parametrize(
    ("name", "num", "cost", "sent"),
    [
        ("all_reduce", 3, (4, 1120), [1120] * 3),
        ("broadcast", 5, (3, 2520), [2520, 840, 0, 0, 0]),
        ("reduce, by gloo", 4, (6, 1260), [630, 840, 840, 840]),
        ("scatter", 3, (2, 1680), [1680, 0, 0]),
        ("all_reduce, by double-tree", 8, (6, 1680), [1470] * 8),
    ],
)
def test_formulas_are_what_is_computed(name, num, cost, sent):
    assert TABLE[name].cost(840, num) == cost
    assert [TABLE[name].bytes_sent(840, num, place) for place in range(num)] == sent


def test_every_call_of_torch_is_in_it():
    assert {algorithm_of(each.name) for each in METHODS.values()} == set(COLLECTIVES.values())


def test_buckets_use_one_link_in_turn():
    assert bucket_sizes(60 * 2**20, 25 * 2**20) == [2**20, 25 * 2**20, 25 * 2**20, 9 * 2**20]
    # the slower rank has the first of two parts ready at 3, and the second at 4
    assert in_turn(2.0, 2, [(0.0, 1.0), (2.0, 4.0)], 0.0) == [(3.0, 5.0), (5.0, 7.0)]
    assert in_turn(2.0, 1, [(1.0, 1.0)], 6.0) == [(6.0, 8.0)]
