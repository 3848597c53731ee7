"""Many ranks on few cores: a hang is found soon, and few of them are asked where they are."""

from collections.abc import Iterator

import pytest

from ddpnb.cluster.cluster import Cluster
from ddpnb.cluster.monitor import NUM_AT_FULL_RATE
from ddpnb.protocol.processes import RankCommand
from tests.cluster.rig import run, started

NUM_RANKS = 16


@pytest.fixture(scope="module")
def many() -> Iterator[Cluster]:
    with started(NUM_RANKS) as cluster:
        run(cluster, "import time, torch, torch.distributed as dist")
        yield cluster


@pytest.fixture
def asked(many: Cluster, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Which ranks were asked where they are."""
    found: list[int] = []
    command = many.processes.command

    def note(rank: int, kind: RankCommand) -> object:
        found.extend([rank] if kind is RankCommand.STATUS else [])
        return command(rank, kind)

    monkeypatch.setattr(many.processes, "command", note)
    return found


def test_a_rank_left_out_of_a_barrier_is_named_among_many(many: Cluster, asked: list[int]):
    ended = run(many, "if rank != 9: dist.barrier()")
    assert ended.hang.startswith("ranks 0-8,10-15 wait in barrier (line 1)")
    assert ended.hang.endswith("rank 9 finished the cell without calling it")
    assert not ended.lost
    assert set(asked) == set(range(NUM_RANKS)) - {9}
    assert not run(many, "dist.barrier()").failures


def test_many_ranks_are_asked_as_often_in_all_as_eight(many: Cluster, asked: list[int]):
    ended = run(many, "if rank == 9: time.sleep(5)\ndist.barrier()")
    assert not ended.hang
    assert not ended.failures
    assert 9 in asked
    num_polls = ended.seconds / many.timeouts.poll_seconds
    assert 2 * NUM_RANKS <= len(asked) <= NUM_AT_FULL_RATE * num_polls + NUM_RANKS
