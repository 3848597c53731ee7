from collections.abc import Iterator

import pytest

from ddpnb.cluster.cluster import Cluster
from tests.cluster.rig import started


@pytest.fixture(scope="package")
def cluster() -> Iterator[Cluster]:
    """Two forked ranks, for tests that leave them alive."""
    with started(2, method="fork") as cluster:
        yield cluster


@pytest.fixture(scope="package", params=["fork", "spawn"])
def any_cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """Two ranks, forked and spawned."""
    if request.param == "fork":
        yield request.getfixturevalue("cluster")
    else:
        with started(2, method="spawn") as cluster:
            yield cluster
