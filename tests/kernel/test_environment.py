"""Hosts that are not as one would like: a port taken, no name."""

import contextlib
import json
import os
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddpnb.cluster.cluster import Cluster
from tests.cluster.rig import ALL_REDUCE, pull, run, started
from tests.system_packages import find_program

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Two ranks, started where the port of torchrun was taken."""
    with socket.socket() as taken:
        with contextlib.suppress(OSError):  # somebody else has it: as well
            taken.bind(("127.0.0.1", 29500))
            taken.listen()
        with started(2) as cluster:
            yield cluster


def test_the_port_of_torchrun_may_be_taken(cluster: Cluster) -> None:
    assert not run(cluster, ALL_REDUCE).failures
    assert pull(cluster, "total.item()") == [2.0, 2.0]
    assert "29500" not in pull(cluster, "__import__('os').environ['MASTER_PORT']")


ON_A_HOST = """
import json, socket
from tests.cluster.rig import ALL_REDUCE, pull, run, started
try:
    found = socket.gethostbyname(socket.gethostname())
except OSError:
    found = ""
with started(2) as cluster:
    failures = run(cluster, ALL_REDUCE).failures
    print(json.dumps([found, len(failures), pull(cluster, "total.item()")]))
"""


def test_the_host_name_need_not_resolve() -> None:
    """As on a laptop in a train; in a name space of its own, so that the host keeps its name."""
    for program in ("unshare", "hostname"):
        find_program([program], "a host name of its own needs unshare(1) and hostname(1)")
    named = ["unshare", "--uts", "sh", "-c", 'hostname nosuch.invalid && exec "$@"', "sh"]
    if subprocess.run([*named, "true"], check=False, capture_output=True).returncode != 0:
        pytest.skip("a host name of its own needs the right to unshare")
    ended = subprocess.run(
        [*named, sys.executable, "-c", ON_A_HOST],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    found, num_failures, totals = json.loads(ended.stdout.splitlines()[-1])
    if found:
        pytest.skip(f"here even nosuch.invalid resolves, to {found}")
    assert num_failures == 0
    assert totals == [2.0, 2.0]


def test_others_can_read_nothing_of_a_cluster(cluster: Cluster) -> None:
    """The folder is closed, so that what the files in it are does not matter; the keys are too."""
    assert stat.S_IMODE(cluster.folder.stat().st_mode) == 0o700
    files = [path for path in cluster.folder.rglob("*") if not path.is_symlink()]
    assert files
    assert {path.lstat().st_uid for path in files} == {os.getuid()}
    assert not [path for path in files if stat.S_IMODE(path.lstat().st_mode) & 0o022]
