"""A strategy is one file, which users can copy and change, and one entry in the catalogue."""

import sys

import pytest

import ddpnb
from ddpnb.protocol.catalogue import STRATEGIES
from ddpnb.protocol.errors import UserError
from ddpnb.rank.strategies import make_strategy
from tests.cells import CELL
from tests.programs import printed
from tests.rank.fit import Problem, by_hand, distance, drive
from tests.rank.runs import losses, spec_of, train_job

ADDED = """
from ddpnb.protocol import catalogue
catalogue.STRATEGIES["added"] = catalogue.Entry(
    about="one that was added",
    import_path="added_strategy:Added",
    look=catalogue.Style("#123456", "long", "$a$"),
    options={"every": catalogue.Option(default=2, about="steps", least=1)},
)
"""

FILE = """
from ddpnb.rank.strategies.base import Strategy

class Added(Strategy):
    def __init__(self, *, every=2):
        self.every = every

    def step(self, batch):
        loss = self.worker.compute_gradients(batch)
        self.worker.update(self.optimizer)
        return loss
"""

IN_THE_KERNEL = """
import sys
from ddpnb.magics.arguments import catalogue_text
from ddpnb.magics.completion import choices
from ddpnb.reports.style import style_of

assert "one that was added" in catalogue_text() and "added:every=2" in catalogue_text()
assert list(choices(catalogue.STRATEGIES, "added:")) == ["added:every="]
assert (style_of("added").colour, style_of("added").marker) == ("#123456", "$a$")
assert "torch" not in sys.modules
"""


def added_job(state, folder, path):
    """Train by the added strategy, and return the distance to plain torch."""
    sys.path.insert(0, str(path))
    exec(ADDED)
    strategy = make_strategy("added:every=3", {})
    assert (strategy.every, strategy.plan(state).num_workers) == (3, 1)
    return distance(drive(strategy, state, folder, Problem()), by_hand(Problem()))


def test_a_strategy_is_one_file_and_one_entry(fresh_ranks, tmp_path):
    (tmp_path / "added_strategy.py").write_text(FILE)
    assert fresh_ranks(1).call(added_job, tmp_path) == [0]
    assert printed(ADDED + IN_THE_KERNEL) == ""


def test_each_alias_is_answered_with_the_name_here():
    for name, entry in STRATEGIES.items():
        capitals = [name.upper()] if name.isalpha() else []  # no class name has a dash
        for alias in (*entry.aliases, *capitals):
            with pytest.raises(UserError, match=f"^{alias} is called {name} here"):
                make_strategy(alias, {})


@pytest.mark.parametrize("name", ["ddp-overlap-by-hand", "local-sgd", "central", "zero", "diloco"])
def test_a_pasted_strategy_trains_as_the_built_in_one(ranks, name):
    found = STRATEGIES[name].import_path.partition(":")[2]
    pasted = ddpnb.source(name).data.replace(f"class {found}(", "class Mine(")
    own = spec_of("Mine", source=f"{pasted}\n{CELL}")
    built_in, mine = (ranks(2).call(train_job, spec) for spec in (spec_of(name), own))
    assert losses(mine[0]) == losses(built_in[0])
    assert len(losses(mine[0])) > 5


@pytest.mark.parametrize("name", ["nothing", "ddp:hook=fp16", ""])
def test_what_has_no_file_is_refused(name):
    with pytest.raises(UserError):
        ddpnb.source(name)
