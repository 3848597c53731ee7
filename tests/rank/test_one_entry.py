"""Is a strategy one file, a page that one can start from, and one entry in the catalogue?"""

import subprocess
import sys

import pytest

import ddpnb
from ddpnb.protocol.catalogue import STRATEGIES
from ddpnb.protocol.errors import UserError
from ddpnb.rank.strategies import make_strategy
from tests.cells import CELL
from tests.rank.runs import losses, spec_of, train_job

ADDED = """
from ddpnb.protocol import catalogue
catalogue.STRATEGIES["added"] = catalogue.StrategyEntry(
    about="one that was added",
    import_path="added_strategy:Added",
    look=catalogue.Look("#123456", "long", "$a$"),
    is_asynchronous=True,
    may_be_emulated=True,
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

ON_A_RANK = """
from pathlib import Path
import torch
from ddpnb.rank.strategies import make_strategy
from tests.rank.fit import Problem, by_hand, distance, drive
from tests.rank.ranks import make_state

strategy = make_strategy("added:every=3", {})
assert strategy.every == 3
state = make_state(0, 1)
assert strategy.plan(state).num_workers == 1
torch.set_num_threads(1)
fit = drive(strategy, state, Path("."), Problem())
assert distance(fit, by_hand(Problem())) == 0
assert fit.memory.parameters > 0
"""

IN_THE_KERNEL = """
import sys
from ddpnb.magics.arguments import catalogue_text, choices
from ddpnb.reports.style import style_of
from ddpnb.reports.formatting import longest_label

assert "one that was added" in catalogue_text() and "added:every=2" in catalogue_text()
assert list(choices(catalogue.STRATEGIES, "added:")) == ["added:every="]
assert longest_label("added") == "added (emulated)"
assert (style_of("added").colour, style_of("added").marker) == ("#123456", "$a$")
assert "torch" not in sys.modules
"""


@pytest.mark.parametrize("side", [ON_A_RANK, IN_THE_KERNEL], ids=["rank", "kernel"])
def test_a_strategy_is_one_file_and_one_entry(tmp_path, side):
    (tmp_path / "added_strategy.py").write_text(FILE)
    code = f"import sys; sys.path[:0] = [{str(tmp_path)!r}, '.']\n{ADDED}{side}"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_each_alias_is_answered_with_the_name_here():
    for name, entry in STRATEGIES.items():
        capitals = [name.upper()] if name.isalpha() else []  # with a dash it is no class
        for alias in (*entry.aliases, *capitals):
            with pytest.raises(UserError, match=f"^{alias} is called {name} here"):
                make_strategy(alias, {})


MOST_LINES = {"ddp": 150, "dp": 150, "fsdp": 150, "async": 150, "ddp-overlap-by-hand": 150}


@pytest.mark.parametrize("name", ["ddp-overlap-by-hand", "local-sgd", "central", "zero", "diloco"])
def test_a_pasted_strategy_trains_as_the_built_in_one(ranks, name):
    found = STRATEGIES[name].import_path.partition(":")[2]
    pasted = ddpnb.source(name).data.replace(f"class {found}(", "class Mine(")
    own = spec_of("Mine", source=f"{pasted}\n{CELL}")
    built_in, mine = (ranks(2).call(train_job, spec) for spec in (spec_of(name), own))
    assert losses(mine[0]) == losses(built_in[0])
    assert len(losses(mine[0])) > 5


def test_a_strategy_is_a_page_that_measures_nothing():
    for name in STRATEGIES:
        text = ddpnb.source(name).data
        assert len(text.splitlines()) <= MOST_LINES.get(name, 110), name
        code = text.rpartition('"""\n\n')[2]
        assert "timer" not in code, name
        assert "perf_counter" not in code, name


@pytest.mark.parametrize("name", ["nothing", "ddp:hook=fp16", ""])
def test_what_has_no_file_is_refused(name):
    with pytest.raises(UserError):
        ddpnb.source(name)
