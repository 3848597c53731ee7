"""If calls in a group's log differ, at most one of them reaches the backend. A call that the
backend itself rejects does not make ddpnb reject other calls."""

import contextlib
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from ddpnb.rank.collectives import mismatch
from ddpnb.rank.collectives.mismatch import (
    CollectiveLog,
    CollectiveMismatchError,
    MismatchCheck,
    entry_of,
)
from ddpnb.rank.collectives.table import METHODS, NO_ROOT, CollectiveCall

RANKS = range(3)


def opened(path: Path) -> list[CollectiveLog]:
    return [CollectiveLog(path, place=rank, ranks=RANKS) for rank in RANKS]


def write(log: CollectiveLog, size: int) -> None:
    call = CollectiveCall(
        METHODS["allreduce"], None, [[torch.ones(size)]], NO_ROOT, is_blocking=True
    )
    log.write(entry_of(call, log.ranks))


def test_a_call_that_the_backend_refuses_is_not_held_against_others(tmp_path: Path) -> None:
    first, second, _ = opened(tmp_path / "log")
    write(first, 4)
    threading.Timer(0.01, first.take_back).start()
    write(second, 3)


def test_other_shapes_of_one_size_meet_with_a_warning(tmp_path: Path) -> None:
    for log, shape in zip(opened(tmp_path / "log"), [(2, 3), (2, 3), (3, 2)], strict=True):
        call = CollectiveCall(
            METHODS["allreduce"], None, [[torch.ones(shape)]], NO_ROOT, is_blocking=True
        )
        is_other = shape == (3, 2)
        with pytest.warns(match=r"\[2, 3\].*\[3, 2\]") if is_other else contextlib.nullcontext():
            log.write(entry_of(call, log.ranks))


def test_a_shape_that_becomes_visible_after_its_number_is_no_other_shape(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    """Some processors, such as aarch64, change the order of writes."""
    monkeypatch.setattr(mismatch, "CHECK_POLL_SECONDS", 0.5)
    first, second, _ = opened(tmp_path / "log")
    call = CollectiveCall(METHODS["allreduce"], None, [[ONE]], NO_ROOT, is_blocking=True)
    entry = entry_of(call, RANKS)

    def complete() -> None:
        first.take_back()
        first.write(entry)

    first.write(entry._replace(shape=entry.shape ^ 1))
    threading.Timer(0.02, complete).start()
    second.write(entry)
    assert not recwarn.list


def test_what_older_groups_have_written_is_removed(tmp_path: Path) -> None:
    for name in ("calls-0-a-1", "calls-1-a-1", "other"):
        (tmp_path / name).touch()
    MismatchCheck().start(tmp_path, 1)
    assert {path.name for path in tmp_path.iterdir()} == {"calls-1-a-1", "other"}


ONE, TWO = torch.ones(3), torch.ones(4)


@pytest.mark.parametrize(
    ("method", "given", "others", "expected"),
    [
        ("allreduce", [[ONE]], [[TWO]], False),
        ("allreduce", [[torch.ones(2, 2)]], [[TWO]], True),  # gloo sees flat memory
        ("allreduce", [[ONE]], [[ONE.double()]], False),
        ("broadcast", [[ONE]], [[TWO]], False),
        ("allgather", [[[ONE]], [ONE]], [[[TWO]], [TWO]], False),
        ("all_gather_single", [ONE, ONE], [TWO, TWO], False),
        ("gather", [[], [ONE]], [[], [TWO]], False),
        ("scatter", [[ONE], []], [[TWO], []], False),
        ("reduce_scatter", [[ONE], [[ONE, ONE]]], [[TWO], [[TWO, TWO]]], False),
        ("all_to_all_single", [ONE, ONE, [], []], [TWO, TWO, [], []], False),
        ("all_to_all_single", [ONE, ONE, [3], [3]], [TWO, TWO, [], []], True),
        ("alltoall", [[ONE], [ONE]], [[TWO], [TWO]], True),
        ("barrier", [], [], True),
    ],
)
def test_tensors_may_meet_if_the_backend_takes_them(method, given, others, expected):
    one, other = (
        entry_of(CollectiveCall(METHODS[method], None, each, NO_ROOT, is_blocking=True), RANKS)
        for each in (given, others)
    )
    assert one.matches(other) is expected


def test_of_calls_that_differ_at_most_one_reaches_the_backend(tmp_path: Path) -> None:
    """Two different calls in the backend would end the process. The ranks call in any order."""
    logs, chance = opened(tmp_path / "log"), random.Random(0)

    def reached(log: CollectiveLog, size: int, pause: float) -> int | None:
        time.sleep(pause)
        try:
            write(log, size)
        except CollectiveMismatchError:
            return None
        return size

    with ThreadPoolExecutor(len(logs)) as pool:
        for _ in range(30):
            sizes = [chance.choice([3, 4]) for _ in RANKS]
            pauses = [chance.choice([0.0, 0.0, 0.0005, 0.002]) for _ in RANKS]
            found = list(pool.map(reached, logs, sizes, pauses))
            assert len({*found} - {None}) <= 1, (sizes, pauses)
            assert None not in found or len({*sizes}) == 2
