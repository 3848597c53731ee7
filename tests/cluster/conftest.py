from collections.abc import Iterator

import pytest

from ddpnb.cluster.cluster import Cluster
from tests.cluster.rig import started


@pytest.fixture(scope="package")
def cluster() -> Iterator[Cluster]:
    """Two forked ranks, for tests that leave them alive."""
    with started(2) as cluster:
        yield cluster
