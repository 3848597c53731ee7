"""A cluster of three ranks for tests that make ranks fail."""

from collections.abc import Iterator

import pytest

from ddpnb.cluster.cluster import Cluster
from ddpnb.cluster.group import bring_back
from tests.cluster.rig import DYNAMO, EIGHTH, run, started

SETUP = """
def synchronise(tensor):
    dist.all_reduce(tensor)
import os, time, torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
x = torch.ones(3)
kept = 10 * rank
"""
USABLE = """
assert kept == 10 * rank, kept
total = torch.full((5,), float(rank))
dist.all_reduce(total)
assert total.tolist() == [sum(range(world_size))] * 5
"""


@pytest.fixture(scope="package")
def three_ranks() -> Iterator[Cluster]:
    """Three ranks that hold variables, with the timeouts that users have."""
    with started(3, environment=DYNAMO) as cluster:
        assert not run(cluster, SETUP).failures
        yield cluster


@pytest.fixture
def three(three_ranks: Cluster) -> Iterator[Cluster]:
    """Like ``three_ranks``. After each test, all ranks must sum and live ranks keep variables."""
    yield three_ranks
    if dead := three_ranks.dead:
        bring_back(three_ranks, dead)
        assert not run(three_ranks, SETUP, ranks=dead).failures
    check_they_go_on(three_ranks)


@pytest.fixture
def quick(three: Cluster, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """Like ``three``, with an eighth of the usual timeouts."""
    monkeypatch.setattr(three, "timeouts", EIGHTH)
    return three


def check_they_go_on(cluster: Cluster, *, is_checked: bool = False) -> None:
    """Check that all ranks can sum in the next cell and have kept their variables."""
    ended = run(cluster, USABLE, is_checked=is_checked)
    assert not ended.failures, ended.failures
    assert not ended.lost
