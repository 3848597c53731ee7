"""The docs, the formulas and all collectives use the same table of costs."""

import math
import re
from pathlib import Path

import pytest

from ddpnb.prediction.model import bucket_sizes
from ddpnb.protocol.costs import COLLECTIVES, DOUBLE_TREE, GLOO, NCCL, Cost, algorithm_of, in_turn
from ddpnb.rank.collectives.table import METHODS

PAGE = Path(__file__).parents[2] / "docs" / "emulated-devices.md"
TABLE = {
    **COLLECTIVES,
    **{f"{name}, by gloo": each for name, each in GLOO.items()},
    **{f"{name}, by NCCL": each for name, each in NCCL.items()},
    "all_reduce, by double-tree": DOUBLE_TREE,
}


def test_the_page_has_the_table():
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    cells = {
        name: (each.name, each.rounds, each.num_bytes, each.sent) for name, each in TABLE.items()
    }
    shown = [f"| `{name}` | {' | '.join(row)} |" for name, row in cells.items()]
    assert [row for row in rows if row.removeprefix("| `").partition("`")[0] in TABLE] == shown


def value(formula: str, num: int, place: int) -> float:
    """Return the value of a formula on the page, for B = 840."""
    first, *others = formula.split("; ")
    if others:  # "root: ...; other ranks: ...", or "last rank: ...; other ranks: ..."
        special = 0 if first.startswith("root") else num - 1
        formula = (first if place == special else others[0]).partition(": ")[2]
    depth = math.ceil(math.log2(num))
    below = sum(place < 2**k and place + 2**k < num for k in range(depth))
    written = re.sub(r"(?<=[\dNLBK)]) (?=[(NLBK])", "*", formula)
    return float(eval(written, {"N": num, "B": 840, "L": depth, "K": below}))


@pytest.mark.parametrize("num", [2, 3, 4, 7, 16])
def test_what_is_computed_is_the_formula_on_the_page(num):
    for name, algorithm in TABLE.items():
        costs = [algorithm.of(840, num, place) for place in range(num)]
        for place, cost in enumerate(costs):
            shown = (algorithm.rounds, algorithm.num_bytes, algorithm.sent)
            assert cost[:3] == pytest.approx([value(each, num, place) for each in shown]), name
        if name not in ("send", "recv"):  # each byte that is sent is received
            assert sum(c.sent for c in costs) == pytest.approx(sum(c.received for c in costs)), name
        assert algorithm.of(840, 1) == Cost(0)


def test_every_call_of_torch_is_in_it():
    assert {algorithm_of(each.name) for each in METHODS.values()} == set(COLLECTIVES.values())


def test_buckets_use_one_link_in_turn():
    assert bucket_sizes(60 * 2**20, 25 * 2**20) == [2**20, 25 * 2**20, 25 * 2**20, 9 * 2**20]
    # the slower rank has the first of two parts ready at 3, and the second at 4
    assert in_turn(2.0, 2, [(0.0, 1.0), (2.0, 4.0)], 0.0) == [(3.0, 5.0), (5.0, 7.0)]
    assert in_turn(2.0, 1, [(1.0, 1.0)], 6.0) == [(6.0, 8.0)]
