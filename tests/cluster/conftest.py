from collections.abc import Iterator

import pytest

from ddpnb.cluster.cluster import Cluster
from tests.cluster.rig import DYNAMO, started


@pytest.fixture(scope="package")
def forked() -> Iterator[Cluster]:
    """Two forked ranks, for all tests."""
    with started(2, environment=DYNAMO) as cluster:
        yield cluster


@pytest.fixture(scope="package")
def spawned() -> Iterator[Cluster]:
    with started(2, method="spawn") as cluster:
        yield cluster


@pytest.fixture
def cluster(forked: Cluster) -> Cluster:
    """Two living ranks: one that a test killed is a new process."""
    if forked.dead:
        forked.bring_back(forked.dead)
    return forked


@pytest.fixture(params=["cluster", "spawned"])
def any_cluster(request: pytest.FixtureRequest) -> Cluster:
    """Two ranks, forked and spawned."""
    found: Cluster = request.getfixturevalue(request.param)
    return found
