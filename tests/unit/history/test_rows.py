import json

from ddpnb.history import database
from ddpnb.protocol.messages import Mark, MarkKind, RunHeader
from tests.unit.history.fake_runs import batch, header, spec


def test_a_mark_keeps_its_kind_and_an_old_one_gets_it():
    marks = (
        Mark(rank=1, seconds=2.0, kind=MarkKind.CAME_BACK),
        Mark(rank=0, seconds=0.0, text="3x slower"),
    )
    row = database.batch_row(batch("r", [], marks=marks))
    assert database.batch_of(row, None).marks == marks
    before = json.dumps([[mark.rank, mark.seconds, mark.text] for mark in marks])
    assert database.batch_of((*row[:-1], before), None).marks == marks


def test_an_old_header_still_says_that_its_strategy_was_emulated():
    for strategy, is_emulated in (("dp", True), ("ddp", False)):
        written = header(spec(strategy), 1)
        fields = json.loads(database.to_text(written))
        assert fields.pop("is_emulated") is is_emulated
        assert database.from_text(RunHeader, json.dumps(fields)) == written
