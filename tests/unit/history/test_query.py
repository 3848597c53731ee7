import time

import pytest

from ddpnb.history.model import Status
from ddpnb.history.query import Search, StoredRun
from ddpnb.protocol.errors import UserError

HOUR = 3600.0


def stored(name: str, *, hours_ago: float, task: str = "digits", repeat: int = 0) -> StoredRun:
    comparison, _, strategy = name.partition("/")
    return StoredRun(
        run_id=f"{name}{repeat}",
        comparison_id=comparison,
        comparison=comparison,
        name=strategy,
        repeat=repeat,
        created=time.time() - hours_ago * HOUR,
        task=task,
        status=Status.STOPPED if hours_ago > 40 else Status.FINISHED,
    )


RUNS = (
    stored("old/ddp", hours_ago=72),
    stored("race/single", hours_ago=30),
    stored("race/ddp:hook=fp16", hours_ago=30, repeat=0),
    stored("race/ddp:hook=fp16", hours_ago=29, repeat=1),
    stored("New/async", hours_ago=1, task="synthetic:samples=512"),
)


@pytest.mark.parametrize(
    ("search", "found"),
    [
        (Search(), [0, 1, 2, 3, 4]),
        (Search(strategy="ddp"), [0, 2, 3]),
        (Search(strategy="ddp:hook=fp16"), [2, 3]),
        (Search(task="synthetic"), [4]),
        (Search(since="2d"), [1, 2, 3, 4]),
        (Search(since="90m"), [4]),
        (Search(text="RACE"), [1, 2, 3]),
        (Search(text="stopped"), [0]),
        (Search(last=1), [4]),
        (Search(last=2), [2, 3, 4]),
        (Search(task="digits", strategy="ddp", since="2d", last=20, text="hook"), [2, 3]),
        (Search(text="nothing like it"), []),
    ],
)
def test_only_what_is_asked_for_is_found(search: Search, found: list[int]):
    assert search.among(RUNS) == tuple(RUNS[index] for index in found)


@pytest.mark.parametrize(
    ("given", "message"),
    [({"since": "yesterday"}, "Write --since as 90m, 12h"), ({"last": 0}, "--last must be")],
)
def test_a_wrong_search_is_one_sentence(given: dict[str, object], message: str):
    with pytest.raises(UserError, match=message):
        Search(**given)  # type: ignore[arg-type]
