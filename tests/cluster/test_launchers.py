"""Ranks that a launcher of ipyparallel starts work and end like ranks over ssh."""

import contextlib
import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from ddpnb.cluster.cluster import Cluster
from ddpnb.cluster.group import bring_back, ensure_group
from ddpnb.hosts.processes import start_cluster
from ddpnb.hosts.spec import HostsSpec
from ddpnb.protocol.errors import UserError
from ddpnb.session.status import status_table
from tests.cluster import rig
from tests.cluster.simulated_slurm import jobs, simulated_slurm
from tests.cluster.test_hosts import REDUCE_FOR_EVER, TRAINED, VARIABLES
from tests.cluster.two_hosts import two_hosts
from tests.programs import python

TWO_EACH = {"num_ranks": 4, "ranks_per_host": 2, "num_threads": 1}
TASK = "[n for n in __import__('os').environ if n.startswith(('SLURM_PROC', 'OMPI_COMM'))]"
"""Environment variables from which Lightning would derive the ranks' numbers."""


@pytest.fixture(scope="module", autouse=True)
def home(tmp_path_factory) -> Iterator[Path]:
    """A home folder that only this file's tests use for keys and profiles."""
    folder = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(folder))
        patch.setenv("IPYTHONDIR", str(folder / "ipython"))
        yield folder


@pytest.fixture
def profile(home) -> Callable[[str], str]:
    """A function that writes a profile of ipyparallel and returns the profile's name."""

    def write(config: str) -> str:
        place = home / "ipython/profile_site"
        place.mkdir(parents=True, exist_ok=True)
        (place / "ipcluster_config.py").write_text(f"c = get_config()\n{config}")
        return "site"

    return write


@pytest.fixture(scope="module")
def slurm() -> Iterator[None]:
    with simulated_slurm():
        yield


@pytest.fixture(scope="module")
def cluster(slurm) -> Iterator[Cluster]:
    """Two ranks on each of Slurm's two nodes."""
    with rig.started(environment=rig.DYNAMO, engines="slurm", **TWO_EACH) as cluster:
        yield cluster


def started() -> list[psutil.Process]:
    """Return the processes of ``ddpnb.hosts`` (holders, agents, relays) that use this home."""
    found = []
    for each in psutil.process_iter(["cmdline"]):
        with contextlib.suppress(psutil.Error):
            is_ours = each.environ().get("HOME") == str(Path.home())
            if is_ours and "ddpnb.hosts" in " ".join(each.info["cmdline"] or []):
                found.append(each)
    return found


def keys() -> list[Path]:
    return list(Path.home().glob(".ddpnb-*.json"))


def test_ranks_are_laid_out_node_by_node_and_train(cluster, tmp_path):
    assert rig.total(cluster) == [4.0] * 4
    found = rig.pull(cluster, f"[__import__('os').environ[name] for name in {VARIABLES}]")
    assert [each[:5] for each in found] == [
        ["0", "0", "0", "2", "2"],
        ["1", "1", "0", "2", "2"],
        ["2", "0", "1", "2", "2"],
        ["3", "1", "1", "2", "2"],
    ]
    table = status_table(cluster, ())
    assert [row[2].text for row in table.rows] == ["n1", "n1", "n2", "n2"]
    assert rig.pull(cluster, TASK) == [[]] * 4
    (run_,) = rig.prepared(cluster, tmp_path, "ddp", **TRAINED).run().comparison.runs
    assert run_.status == "finished"
    assert {*run_.events["rank"]} == {0, 1, 2, 3}


def test_strangers_change_nothing_and_no_key_is_to_be_seen(cluster):
    assert rig.total(cluster) == [4.0] * 4
    content = json.loads((cluster.folder / "profile/security/ipcontroller-engine.json").read_text())
    address = content["interface"].removeprefix("tcp://")
    ports = {value for value in content.values() if isinstance(value, int) and value > 1}
    listening = [
        each.laddr.port
        for each in psutil.Process().net_connections("tcp")
        if each.status == psutil.CONN_LISTEN and each.laddr.ip == address
    ]
    assert listening
    rig.knock([(address, port) for port in {*ports, *listening}], times=3000)
    assert rig.total(cluster) == [4.0] * 4
    cluster.abort(cluster.ranks)  # closes connections between hosts, but not to engines
    ensure_group(cluster)
    assert rig.total(cluster) == [4.0] * 4
    secrets = [v.encode() for name, v in content.items() if "key" in name and v]
    assert len(secrets) >= 2
    for process in [*psutil.Process().children(recursive=True), *started()]:
        assert not any(key in rig.shown(process) for key in secrets), process
    assert not keys()


def test_a_killed_kernel_leaves_no_job(slurm):
    earlier, before = started(), jobs()
    start = "import ddpnb; ddpnb.start(1, engines='slurm', ranks_per_host=1, device='cpu')"
    with python(f"{start}; print('go', flush=True); input()") as (kernel, line):
        assert line == "go\n"
        found = [each for each in started() if each not in earlier]
        assert len(found) >= 4  # a holder, a relay, an agent, a rank
        kernel.kill()
    rig.wait_until(lambda: jobs() <= before, "the job's end", timeout=60)
    rig.wait_until_gone(found)


def test_a_job_that_is_cancelled_ends_its_ranks_and_stop_leaves_nothing(cluster):
    """After this test, the file's cluster has ended."""
    (job,) = jobs()
    cell = rig.begin(cluster, "import time\nwhile True: time.sleep(0.01)", timeout=None)
    subprocess.run(["scancel", job], check=True)
    rig.finish(cell)
    assert set(cell.lost) == {0, 1, 2, 3}
    with pytest.raises(UserError, match="%ddp_restart"):
        bring_back(cluster, [0])
    cluster.stop()
    rig.wait_until_gone(started())


SLURM = '''
c.Cluster.engine_launcher_class = "slurm"
c.SlurmEngineSetLauncher.batch_template = """#!/bin/sh
#SBATCH --job-name site --begin now+1hour --nodes {n} --ntasks-per-node 1 --output /dev/null
srun --mem=0 --cpu-bind=none --mpi=none {program_and_args}
"""
'''


def test_a_job_that_waits_for_ever_ends_at_the_timeout(slurm, profile):
    before, said = jobs(), []
    with pytest.raises(UserError, match="0 of 2 hosts of profile site connected within 2 s"):
        start_cluster(HostsSpec(profile=profile(SLURM), timeout=2.0, **TWO_EACH), said.append)
    assert "waiting for the hosts of profile site: 0 of 2" in said
    rig.wait_until(lambda: jobs() <= before, "the job's end")
    assert not keys()


def test_a_kernel_that_is_killed_while_a_job_is_submitted_leaves_none(profile, tmp_path):
    asked, deleted = tmp_path / "asked", tmp_path / "deleted"
    launcher = "c.SlurmEngineSetLauncher"
    name = profile(
        f'{launcher}.submit_command = ["sh", "-c", "touch {asked}; sleep 2; echo 7"]\n'
        f'{launcher}.delete_command = ["sh", "-c", "touch {deleted}"]\n'
    )
    options = f"engines='slurm', profile={name!r}, ranks_per_host=1, device='cpu', timeout=60"
    with python(f"print(flush=True); import ddpnb; ddpnb.start(2, {options})") as (it, _):
        rig.wait_until(asked.exists, "the job")
        left = psutil.Process(it.pid).children(recursive=True)
        it.kill()
    rig.wait_until(deleted.exists, "the job's end")
    rig.wait_until_gone(left)
    assert not keys()


def test_mpi_starts_ranks_on_both_hosts_and_a_host_without_power_is_lost(
    tmp_path_factory, tmp_path, monkeypatch
):
    rig.allow_mpi(monkeypatch)
    with two_hosts(tmp_path_factory.mktemp("hosts")) as hosts:
        (tmp_path / "hosts").write_text("".join(f"{hosts.address(host)}\n" for host in "ab"))
        monkeypatch.setenv("OMPI_MCA_orte_default_hostfile", str(tmp_path / "hosts"))
        with rig.started(engines="mpi", **TWO_EACH) as cluster:
            assert rig.total(cluster) == [4.0] * 4
            assert rig.pull(cluster, TASK) == [[]] * 4
            first = rig.pull(cluster, "__import__('os').environ['MASTER_ADDR']")[0]
            lost, kept = ((0, 1), (2, 3)) if first == hosts.address("a") else ((2, 3), (0, 1))
            rig.run(cluster, "import torch, torch.distributed as dist")
            cell = rig.begin(cluster, REDUCE_FOR_EVER.format(sign=f"{tmp_path}/in-"))
            rig.wait_until(lambda: len(list(tmp_path.glob("in-*"))) == 4, "all ranks in the cell")
            with hosts.unplugged("a"):
                rig.finish(cell)
                assert all("was lost with host" in cell.lost[rank] for rank in lost)
                freed = list(cluster.living)  # except ranks with half a message
                assert set(freed) <= set(kept)
                assert rig.pull(cluster, "kept", ranks=freed) == [
                    f"of rank {rank}" for rank in freed
                ]
                left = hosts.processes("a")
                rig.wait_until_gone([p for p in left if p.name() != "orted"], timeout=60)
        rig.wait_until_gone(hosts.processes("b"))
        for each in hosts.processes("a"):
            each.kill()  # mpiexec's processes do not notice the end


NOWHERE = "c.Cluster.engine_launcher_class = 'nowhere'\n"


@pytest.mark.parametrize(
    ("config", "spec", "sentence"),
    [
        ("", {"profile": "site"}, "names no launcher; set c.Cluster.engine_launcher_class"),
        (NOWHERE, {"profile": "site"}, "profile site ended when 0 of 2"),
        ("1 / 0\n", {"profile": "site"}, "were connected: ZeroDivisionError: division by zero"),
        ("", {"profile": "other"}, "ipyparallel has no profile other, only .*site. Create"),
        ("", {"engines": "local", "python": "/usr/bin/python3"}, "0 of 2.*No module named"),
        ("", {"engines": "slurm", "python": "/nowhere/python"}, "when 0 of 2.*/nowhere/python"),
        ("", {"engines": "local", "interface": "net7"}, "This host has no interface net7"),
    ],
)
def test_what_a_launcher_cannot_start_is_said(slurm, profile, config, spec, sentence):
    profile(config)
    with pytest.raises(UserError, match=sentence):
        start_cluster(HostsSpec(**(TWO_EACH | spec)))
    assert not keys()
