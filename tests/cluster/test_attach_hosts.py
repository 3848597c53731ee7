"""Do ranks on several hosts outlive their kernel, and does another one find them?"""

import contextlib
import json
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from ddpnb.cluster.cluster import Cluster
from ddpnb.cluster.run_folder import find, name_of, remove_leftovers
from ddpnb.protocol.errors import UserError
from tests.cluster.rig import pull, wait_until, wait_until_gone
from tests.cluster.simulated_slurm import jobs, simulated_slurm
from tests.cluster.test_hosts import total
from tests.cluster.test_profiles import LOCAL, write_profile
from tests.cluster.two_hosts import TwoHosts, two_hosts

OWNER = """
import json, sys
import psutil
from ddpnb.cluster.cluster import Cluster
from ddpnb.cluster.placement import ClusterSpec
from tests.cluster.rig import run
cluster = Cluster.start(ClusterSpec(device="cpu", num_threads=1, **json.loads(sys.argv[1])))
run(cluster, "import os; kept = 7 + 10 * rank; os.write(2, f'last words of {rank}'.encode())")
pids = [each.pid for each in psutil.Process().children(recursive=True)]
pids += [state.pid for state in cluster.states]
print(json.dumps([str(cluster.folder), pids]), flush=True)
sys.stdin.read()
"""
SSH = {"hosts": "a:2,b:2"}
PROFILE = {"profile": "site", "num_ranks": 4, "ranks_per_host": 2}
SLURM = {"engines": "slurm", "num_ranks": 2, "ranks_per_host": 1}


@pytest.fixture(scope="module")
def hosts(tmp_path_factory) -> Iterator[TwoHosts]:
    with two_hosts(tmp_path_factory.mktemp("hosts")) as found:
        yield found


@contextlib.contextmanager
def left_by_a_kill(where: dict[str, object], seconds: float = 60) -> Iterator[Path]:
    """The run folder of a cluster whose kernel was killed; in the end all of it must be gone."""
    options = json.dumps(where | {"detach_seconds": seconds})
    with subprocess.Popen(
        [sys.executable, "-c", OWNER, options],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as owner:
        assert owner.stdout is not None
        folder, pids = json.loads(owner.stdout.readline())
        processes = [psutil.Process(pid) for pid in pids]
        owner.kill()
    yield Path(folder)
    wait_until_gone(processes, timeout=30)
    assert not Path(folder).exists()


@contextlib.contextmanager
def attached(folder: Path) -> Iterator[Cluster]:
    cluster = Cluster.attach(find(name_of(folder), Path.cwd()))
    try:
        yield cluster
    finally:
        cluster.stop()


def test_ranks_over_ssh_are_found_with_their_variables_and_can_be_replaced(hosts):
    with left_by_a_kill(SSH) as folder:
        with attached(folder) as cluster:
            assert folder not in remove_leftovers()
            assert cluster.living == (0, 1, 2, 3)
            assert pull(cluster, "kept") == [7, 17, 27, 37]
            assert total(cluster) == [4.0] * 4
            psutil.Process(cluster.states[1].pid).kill()
            wait_until(lambda: cluster.dead == (1,), "the end of rank 1")
            cluster.bring_back([1])
            (agent,) = hosts.agents("b")
            agent.kill()
            wait_until(lambda: cluster.dead == (2, 3), "the end of host b's ranks")
            cluster.bring_back([2, 3])
            assert total(cluster) == [4.0] * 4
            with pytest.raises(UserError, match=f"{cluster.folder.name[6:]} is in use by another"):
                Cluster.attach(find(name_of(folder), Path.cwd()))
            cluster.detach()
        with attached(folder) as cluster:
            assert pull(cluster, "kept", ranks=[0]) == [7]
            assert total(cluster) == [4.0] * 4
    assert not [*hosts.processes("a"), *hosts.processes("b")]


def test_what_ended_meanwhile_is_reported(hosts):
    with left_by_a_kill(SSH) as folder:
        (agent,) = hosts.agents("b")
        ranks = agent.children()
        agent.kill()
        wait_until_gone(ranks)
        (agent,) = hosts.agents("a")
        one = agent.children()[0]
        one.kill()
        wait_until_gone([one])
        with attached(folder) as cluster:
            wait_until(lambda: len(cluster.dead) == 3, "their ends")
            (left,) = cluster.living
            assert left in (0, 1)
            assert pull(cluster, "kept", ranks=[left]) == [7 + 10 * left]
            log = cluster.folder / f"rank-{1 - left}.log"
            assert f"last words of {1 - left}" in log.read_text()
            cluster.bring_back(cluster.dead)
            assert total(cluster) == [4.0] * 4


def test_when_the_time_is_over_nothing_is_left_on_any_host(hosts):
    with left_by_a_kill(SSH, seconds=1):
        wait_until(lambda: not [*hosts.processes("a"), *hosts.processes("b")], "the end of all")


def test_ranks_of_a_profile_are_found_with_their_variables(monkeypatch, tmp_path):
    write_profile(monkeypatch, tmp_path, LOCAL)
    with left_by_a_kill(PROFILE) as folder, attached(folder) as cluster:
        assert pull(cluster, "kept") == [7, 17, 27, 37]
        (agent,) = {psutil.Process(each.pid).ppid() for each in cluster.states[2:]}
        psutil.Process(agent).kill()
        wait_until(lambda: cluster.dead == (2, 3), "the end of the second host's ranks")
        lost = re.escape(f"Host {socket.gethostname()}-2 was lost, and its job is another kernel's")
        with pytest.raises(UserError, match=lost):
            cluster.bring_back([2, 3])
        assert pull(cluster, "kept", ranks=[0, 1]) == [7, 17]


def test_slurms_job_lasts_as_long_as_its_ranks(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))  # where keys are for a moment
    with simulated_slurm():
        with left_by_a_kill(SLURM) as folder, attached(folder) as cluster:
            assert total(cluster) == [2.0] * 2
            assert len(jobs().splitlines()) == 1
        wait_until(lambda: not jobs(), "the job's end")
        with left_by_a_kill(SLURM, seconds=1):
            assert len(jobs().splitlines()) == 1
            wait_until(lambda: not jobs(), "the job's end")
