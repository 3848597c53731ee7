"""If gloo cannot end a wait, as on macOS, ddpnb kills the waiting ranks and says so."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddpnb.cluster.cluster import Cluster
from ddpnb.cluster.group import bring_back
from ddpnb.session.errors import error_of, render_error
from tests.cluster.rig import EIGHTH, run, started
from tests.faults.conftest import SETUP, check_they_go_on

HERE = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    paths = f"{HERE / 'portable'}:{HERE.parent}"
    with started(3, environment={"PYTHONPATH": paths, "DDPNB_TEST_WITHOUT": "epoll"}) as cluster:
        cluster.timeouts = EIGHTH
        yield cluster


def test_it_is_said(cluster: Cluster) -> None:
    assert not cluster.can_release
    assert any("ddpnb kills ranks that wait" in each for each in cluster.missing)


@pytest.mark.parametrize(
    ("source", "hang", "failed"),
    [
        ("if rank: dist.all_reduce(x)\nelse: 1 / 0", "", [0]),
        ("dist.recv(x, 1) if rank == 2 else x.sum()", "rank 2 waits in recv from rank 1", []),
    ],
)
def test_ranks_that_wait_are_killed_and_the_others_go_on(
    cluster: Cluster, source: str, hang: str, failed: list[int]
) -> None:
    run(cluster, SETUP)
    ended = run(cluster, source)
    assert re.search(hang, ended.hang)
    assert list(ended.failures) == failed
    assert sorted(ended.lost) == ([2] if "recv" in source else [1, 2])
    assert any("killed" in note for note in ended.notes)
    lines = render_error(error_of(ended.watch)).splitlines()
    assert lines[0].startswith("RankError: rank 0 failed: ZeroDivisionError") == (failed == [0])
    assert "killed" in lines[-1]
    assert "Run %ddp_restart --ranks" in lines[-1]
    bring_back(cluster, cluster.dead)
    run(cluster, SETUP)
    check_they_go_on(cluster)
