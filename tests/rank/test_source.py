"""Is a strategy's file a page that one can start from?"""

import pytest

import ddpnb
from ddpnb.protocol.catalogue import STRATEGIES
from ddpnb.protocol.errors import UserError
from tests.rank.runs import losses, spec_of, train_job
from tests.rank.sources import CELL

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
