"""Many ranks on few cores: a hang is found soon, and few of them are asked where they are."""

from collections.abc import Iterator

import pytest

from ddpnb.cluster.cluster import Cluster
from ddpnb.cluster.hangs import NUM_ASKED
from ddpnb.protocol.processes import RankCommand
from tests.cluster.rig import run, started

NUM_RANKS = 10


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
    ended = run(many, "if rank != 6: dist.barrier()")
    assert ended.watch.hang.startswith("ranks 0-5,7-9 wait in barrier (line 1)")
    assert ended.watch.hang.endswith("rank 6 finished the cell without calling it")
    assert not ended.lost
    assert set(asked) == set(range(NUM_RANKS)) - {6}
    assert not run(many, "dist.barrier()").failures


def test_of_many_ranks_that_wait_for_one_few_are_asked(many: Cluster, asked: list[int]):
    ended = run(many, "if rank == 6: time.sleep(3)\ndist.barrier()")
    assert not ended.watch.hang
    assert not ended.failures
    assert 6 in asked
    num_polls = 1 + ended.seconds / many.timeouts.poll_seconds
    assert NUM_ASKED < len(asked) <= NUM_ASKED * num_polls + 2 * NUM_RANKS
