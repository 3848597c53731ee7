import pytest

from ddpnb.history.model import Status
from ddpnb.history.query import StoredRun, matching
from ddpnb.protocol.errors import UserError


def stored(name: str, *, created: float, task: str = "digits", repeat: int = 0) -> StoredRun:
    comparison, _, strategy = name.partition("/")
    return StoredRun(
        run_id=f"{name}{repeat}",
        comparison_id=comparison,
        comparison=comparison,
        name=strategy,
        repeat=repeat,
        created=created,
        task=task,
        status=Status.STOPPED if created == 1 else Status.FINISHED,
    )


RUNS = (
    stored("old/ddp", created=1),
    stored("race/single", created=2),
    stored("race/ddp:hook=fp16", created=2),
    stored("race/ddp:hook=fp16", created=3, repeat=1),
    stored("New/async", created=4, task="synthetic:samples=512"),
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
