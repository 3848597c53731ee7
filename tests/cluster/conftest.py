from collections.abc import Iterator

import pytest

from ddpnb.cluster.cluster import Cluster
from ddpnb.cluster.group import bring_back
from tests.cluster.rig import DYNAMO, started
from tests.cluster.two_hosts import TwoHosts, two_hosts


@pytest.fixture(scope="package")
def forked() -> Iterator[Cluster]:
    """Two ranks that all tests of the package share."""
    with started(2, environment=DYNAMO) as cluster:
        yield cluster


@pytest.fixture
def cluster(forked: Cluster) -> Cluster:
    """Two living ranks. Ranks that an earlier test killed are restarted first."""
    if forked.dead:
        bring_back(forked, forked.dead)
    return forked


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoHosts]:
    with two_hosts(tmp_path_factory.mktemp("hosts")) as found:
        yield found
