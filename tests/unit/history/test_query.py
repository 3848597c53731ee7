import pytest

from ddpnb.history.model import Status
from ddpnb.history.query import matching
from ddpnb.protocol.errors import UserError
from tests.unit.history.fake_runs import stored

RUNS = (
    stored("old/ddp", 1, status=Status.STOPPED),
    stored("race/single", 2),
    stored("race/ddp:hook=fp16", 2),
    stored("race/ddp:hook=fp16", 3, repeat=1),
    stored("New/async", 4, task="synthetic:samples=512"),
)


@pytest.mark.parametrize(
    ("text", "last", "found"),
    [
        ("/ddp", None, [0, 2, 3]),
        ("RACE", None, [1, 2, 3]),
        ("stopped", None, [0]),
        ("", 2, [2, 3, 4]),  # repeats are one line
    ],
)
def test_only_what_is_asked_for_is_found(text: str, last: int | None, found: list[int]):
    assert matching(RUNS, text, last) == tuple(RUNS[index] for index in found)
    with pytest.raises(UserError, match="--last must be"):
        matching(RUNS, text, last=0)
