"""Calls that differ in a group's log: at most one reaches the backend, and none is refused for
another that the backend refuses."""

import random
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from ddpnb.rank.collectives.log import (
    CollectiveLog,
    CollectiveMismatchError,
    is_match,
    settle_dispute,
    text_of,
)
from ddpnb.rank.collectives.table import METHODS, NO_ROOT, Call

RANKS = range(3)


def opened(path: Path) -> list[CollectiveLog]:
    return [CollectiveLog(path, place=rank, ranks=RANKS) for rank in RANKS]


def write(log: CollectiveLog, size: int) -> tuple[int, bool]:
    call = Call(METHODS["allreduce"], None, [[torch.ones(size)]], NO_ROOT, is_blocking=True)
    return log.write(*text_of(call), 0, False)


def in_threads(call: Callable[[int], None]) -> None:
    threads = [threading.Thread(target=call, args=(rank,)) for rank in RANKS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()


@pytest.mark.parametrize("refused", [0, 1, 2])
def test_calls_written_at_once_do_not_fail_for_one_that_the_backend_refuses(
    tmp_path: Path, refused: int
) -> None:
    logs = opened(tmp_path / "log")
    written = [write(log, 4 if log.place == refused else 3) for log in logs]
    assert [number for number, _ in written] == [1, 1, 1]
    ended = []

    def go(rank: int) -> None:
        log, number = logs[rank], 1
        if rank == refused:
            try:
                settle_dispute(log, number)
                time.sleep(0.1)  # the backend takes its time
            except CollectiveMismatchError:
                pass
            log.take_back()
            number, is_alike = write(log, 3)
            if not is_alike:
                settle_dispute(log, number)
        else:
            settle_dispute(log, number)
        log.accept(number)
        ended.append(rank)

    in_threads(go)
    assert sorted(ended) == list(RANKS)


def test_calls_are_counted_until_one_was_interrupted(tmp_path: Path) -> None:
    log, *_ = opened(tmp_path / "log")
    write(log, 3)
    write(log, 3)
    log.take_back()
    assert log.num_made == 1
    write(log, 3)
    log.take_back(is_certain=False)
    write(log, 3)
    assert log.num_made is None


ONE, TWO = torch.ones(3), torch.ones(4)


@pytest.mark.parametrize(
    ("method", "given", "others", "expected"),
    [
        ("allreduce", [[ONE]], [[TWO]], False),
        ("allreduce", [[torch.ones(2, 2)]], [[TWO]], True),  # as flat memory
        ("allreduce", [[ONE]], [[ONE.double()]], False),
        ("broadcast", [[ONE]], [[TWO]], False),
        ("reduce", [[ONE]], [[TWO]], False),
        ("allgather", [[[ONE]], [ONE]], [[[TWO]], [TWO]], False),
        ("all_gather_single", [ONE, ONE], [TWO, TWO], False),
        ("gather", [[], [ONE]], [[], [TWO]], False),
        ("scatter", [[ONE], []], [[TWO], []], False),
        ("all_to_all_single", [ONE, ONE, [], []], [TWO, TWO, [], []], False),
        ("all_to_all_single", [ONE, ONE, [3], [3]], [TWO, TWO, [], []], True),
        ("alltoall", [[ONE], [ONE]], [[TWO], [TWO]], True),
        ("barrier", [], [], True),
    ],
)
def test_tensors_may_meet_if_the_backend_takes_them(method, given, others, expected):
    texts = [
        text_of(Call(METHODS[method], None, each, NO_ROOT, is_blocking=True))[0]
        for each in (given, others)
    ]
    assert is_match(*texts) is expected


def test_of_calls_that_differ_one_alone_reaches_the_backend(tmp_path: Path) -> None:
    """In any order of the three: two that differ there at once would end the process."""
    logs, chance = opened(tmp_path / "log"), random.Random(0)
    for number in range(1, 30):
        sizes = [chance.choice([3, 4]) for _ in RANKS]
        pauses = [chance.choice([0.0, 0.0, 0.0005, 0.002]) for _ in RANKS]
        reached: set[int] = set()
        in_threads(partial(call_late, logs, number, sizes, pauses, reached))
        assert len(reached) == 1, (sizes, pauses)


def call_late(logs, number, sizes, pauses, reached, rank: int) -> None:
    time.sleep(pauses[rank])
    _, is_alike = write(logs[rank], sizes[rank])
    try:
        if not is_alike:
            settle_dispute(logs[rank], number)
    except CollectiveMismatchError:
        return
    reached.add(sizes[rank])
    time.sleep(0.001)
    logs[rank].accept(number)
