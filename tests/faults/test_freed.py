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
