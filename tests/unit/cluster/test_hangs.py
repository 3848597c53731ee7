from dataclasses import replace

from ddpnb.cluster.hangs import still_wait
from ddpnb.protocol.messages import RankStatus

WAITING = RankStatus(rank=0, is_busy=True, line=3, call="all_reduce", num_collectives=7)


def test_ranks_that_wait_at_the_same_place_still_wait():
    before = (WAITING, replace(WAITING, rank=1))
    assert still_wait(before, before, seconds=5.0)
    assert not still_wait(before, (), seconds=5.0)


def test_one_rank_that_goes_on_is_enough():
    before = (WAITING, replace(WAITING, rank=1))
    for change in (
        {"call": ""},
        {"line": 4},
        {"num_collectives": 8},
        {"num_bytes_between_hosts": 1},
        {"cpu_seconds": 4.0},  # it moves a large tensor
    ):
        assert not still_wait(before, (WAITING, replace(WAITING, rank=1, **change)), seconds=5.0)
