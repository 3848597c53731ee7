"""Ranks that wait for one that raised are freed: it is named, and nothing is lost."""

from collections.abc import Iterator

import pytest

from ddpnb.notebook.cluster.cluster import Cluster
from tests.cluster.rig import run, started
from tests.faults.cases import SETUP, WAITS, one_raises


@pytest.fixture(scope="module", params=[2, 3])
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    with started(request.param) as cluster:
        yield cluster


@pytest.mark.parametrize("wait", WAITS)
def test_ranks_that_wait_for_one_that_raised_are_freed(cluster: Cluster, wait: str):
    run(cluster, SETUP)
    for num_before, culprit in enumerate((1, 0)):
        done = one_raises(cluster, wait, culprit, num_before)
        failures = dict(done.ended.failures)
        assert failures.pop(culprit).name == "ValueError"
        assert set(failures) == set(cluster.ranks) - {culprit}
        assert all(failure.is_consequence for failure in failures.values()), failures
        assert not done.ended.lost
        assert done.next_is_right
        assert done.is_kept
        assert done.named_after < 3
        assert done.freed_after < 6


SLOW_CUT = """
import psutil
see = psutil.Process.net_connections
def look(process, kind):
    if rank == slow: time.sleep(0.7)
    return see(process, kind)
psutil.Process.net_connections = look
"""


@pytest.mark.parametrize("slow", [0, 2])
def test_a_rank_that_is_slow_to_cut_does_not_cut_the_next_group(slow: int):
    """As on a busy machine: another rank's cut may have freed it before its own is done."""
    with started(3) as cluster:
        run(cluster, SETUP + f"slow = {slow}" + SLOW_CUT)
        ended = run(cluster, "if rank == 1: 1/0\ndist.recv(torch.ones(1), 2 - rank)")
        assert sorted(ended.failures) == [0, 1, 2]
        assert not run(cluster, "time.sleep(3)\ndist.all_reduce(torch.ones(1))").failures
