"""Is a strategy's file a page that one can start from?"""

from dataclasses import replace

import pytest

import ddpnb
from ddpnb.protocol.catalogue import STRATEGIES
from ddpnb.protocol.errors import UserError
from tests.rank.test_options import losses, spec_of, train_job

MOST_LINES = {"ddp": 180, "dp": 180, "fsdp": 180, "async": 180, "ddp-overlap-by-hand": 180}


@pytest.mark.parametrize("name", ["ddp-overlap-by-hand", "local-sgd", "central", "zero", "diloco"])
def test_a_pasted_strategy_trains_as_the_built_in_one(ranks, name):
    found = STRATEGIES[name].import_path.partition(":")[2]
    pasted = ddpnb.source(name).data.replace(f"class {found}(", "class Mine(")
    own = spec_of("Mine")
    own = replace(own, source=f"{pasted}\n{own.source}")
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
