"""The hang detector finds hangs from the ranks' reports and a clock, without any process."""

from concurrent.futures import Future
from dataclasses import asdict, replace

import pytest

from ddpnb.cluster.call import Call, Timeouts
from ddpnb.cluster.hangs import HangDetector, describe_hang, still_wait
from ddpnb.protocol.processes import RankCommand, RankStatus

WAITING = RankStatus(rank=0, is_busy=True, line=3, call="all_reduce", num_collectives=7)
BOTH = (WAITING, replace(WAITING, rank=1))
COMPUTES = RankStatus(rank=1, is_busy=True, line=3)


def test_ranks_that_wait_at_the_same_place_still_wait():
    assert still_wait(BOTH, BOTH, seconds=5.0)
    assert not still_wait(BOTH, (), seconds=5.0)


@pytest.mark.parametrize(
    "change",
    [
        {"call": ""},
        {"line": 4},
        {"num_collectives": 8},
        {"num_bytes_between_hosts": 1},
        {"cpu_seconds": 4.0},  # rank 1 moves a large tensor
    ],
)
def test_one_rank_that_goes_on_is_enough(change: dict[str, object]):
    assert not still_wait(BOTH, (WAITING, replace(WAITING, rank=1, **change)), seconds=5.0)


class Reporting:
    """A cluster whose ranks answer with the reports in ``statuses``, or with an error."""

    def __init__(self, num_ranks: int) -> None:
        self.timeouts = Timeouts(hang_after_seconds=2, longest_gap_seconds=1, poll_seconds=-1)
        self.living, self.processes = tuple(range(num_ranks)), self
        self.statuses: tuple[RankStatus, ...] = ()

    def command(self, rank: int, command: RankCommand) -> "Future[object]":
        assert command is RankCommand.STATUS
        answer: Future[object] = Future()
        for status in self.statuses:
            if status.rank == rank:
                answer.set_result(asdict(status))
        if not answer.done():
            answer.set_exception(RuntimeError())
        return answer


def rounds(*reports: tuple[float, tuple[RankStatus, ...]], num_running: int = 2) -> list[bool]:
    cluster = Reporting(num_running)
    detector = HangDetector(cluster, Call(cluster.living))
    hangs = []
    for now, cluster.statuses in reports:
        assert not detector.poll(now)  # begins the round
        hangs.append(bool(detector.poll(now)))
    return hangs


def test_silent_ranks_are_named_once_per_round():
    cluster = Reporting(2)
    detector = HangDetector(cluster, Call(cluster.living))
    silent: Future[object] = Future()
    cluster.command = lambda rank, _: silent
    named = []
    for now in range(30):
        detector.poll(now)
        named += [(now, notice[:9])] if (notice := detector.notice()) else []
    assert named == [(11, "Ranks 0-1")]
    silent.set_exception(RuntimeError())
    assert not detector.poll(30)
    assert not detector.notice()


def test_a_hang_is_two_seconds_of_waiting_by_all_who_run():
    assert rounds((1, BOTH), (2, BOTH), (3, BOTH)) == [False, False, True]
    assert rounds((1, BOTH), (2, (WAITING, COMPUTES)), (3, BOTH), (4, BOTH)) == [False] * 4
    assert not any(rounds((1, BOTH), (2, BOTH), (3, BOTH), num_running=3))


def test_a_machine_that_slept_has_not_waited():
    assert rounds((1, BOTH), (900, BOTH), (901, BOTH)) == [False, False, True]


def test_a_hang_says_who_waits_where_and_for_whom():
    """tests/faults checks more hangs on real ranks."""
    assert describe_hang(BOTH, {2: 5, 3: 5}, [4]) == (
        "ranks 0-1 wait in all_reduce (line 3); ranks 2-3 finished the cell with 2 fewer calls; "
        "rank 4 does not run this cell"
    )
    other = replace(WAITING, rank=1, call="barrier", tensor="Float [3]")
    assert describe_hang((WAITING, other), {}, ()) == (
        "rank 0 waits in all_reduce (line 3), rank 1 waits in barrier (line 3, Float [3]); "
        "the ranks wait in different calls"
    )
