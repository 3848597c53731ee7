"""Is a strategy's file a page that one can start from?"""

from dataclasses import replace

import pytest

import ddpnb
from ddpnb.protocol.catalogue import STRATEGIES
from ddpnb.protocol.errors import UserError
from tests.rank.test_options import losses, spec_of, train_job

BY_HAND = ["ddp-by-hand", "ddp-overlap-by-hand", "ring-by-hand"]
PAGES = [*BY_HAND, "local-sgd", "central", "no-comm", "single", "zero", "diloco"]
MOST_LINES = {name: 110 for name in PAGES if name != "ddp-overlap-by-hand"}


@pytest.mark.parametrize("name", PAGES)
def test_a_pasted_strategy_trains_as_the_built_in_one(ranks, name):
    found = STRATEGIES[name].import_path.partition(":")[2]
    pasted = ddpnb.source(name).data.replace(f"class {found}(", "class Mine(")
    own = spec_of("Mine")
    own = replace(own, source=f"{pasted}\n{own.source}")
    built_in, mine = (ranks(2).call(train_job, spec) for spec in (spec_of(name), own))
    assert losses(mine[0]) == losses(built_in[0])
    assert len(losses(mine[0])) > 5


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_strategy_is_a_page(name):
    assert len(ddpnb.source(name).data.splitlines()) <= MOST_LINES.get(name, 180)


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_strategy_measures_nothing(name):
    text = ddpnb.source(name).data.rpartition('"""\n\n')[2]
    assert not [word for word in ("timer", "perf_counter") if word in text]


@pytest.mark.parametrize("name", ["nothing", "ddp:hook=fp16", ""])
def test_what_has_no_file_is_refused(name):
    with pytest.raises(UserError):
        ddpnb.source(name)
