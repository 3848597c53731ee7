"""Do ranks in a job of Slurm, or started by MPI, work and end like those over ssh?"""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from ddpnb.cluster.cluster import Cluster
from ddpnb.cluster.placement import ClusterSpec, parse_slurm
from ddpnb.cluster.tunnels import Tunnels
from ddpnb.history.store import Store
from ddpnb.protocol.errors import UserError
from ddpnb.session.comparison import prepare
from ddpnb.session.status import status_table
from tests.cluster.rig import (
    DYNAMO,
    allow_mpi,
    begin,
    finish,
    knock,
    pull,
    run,
    shown,
    wait_until,
    wait_until_gone,
)
from tests.cluster.simulated_slurm import jobs, simulated_slurm
from tests.cluster.test_hosts import REDUCE_FOR_EVER, VARIABLES, a_comparison, total

KEPT_AWAY = "begin=now+1hour"
"""An option with which a job waits for longer than any test."""


@pytest.fixture(scope="module", autouse=True)
def home(tmp_path_factory) -> Iterator[None]:
    """A home that no other test puts keys into, for a moment."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(tmp_path_factory.mktemp("home")))
        yield


@pytest.fixture(scope="module")
def slurm() -> Iterator[None]:
    with simulated_slurm():
        yield


@pytest.fixture(scope="module")
def two_each(slurm) -> Iterator[Cluster]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DDPNB_PRELOAD", DYNAMO["DDPNB_PRELOAD"])
        cluster = Cluster.start(in_slurm(4, num_threads=1))
    try:
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture
def cluster(two_each) -> Cluster:
    """Four living ranks on two nodes."""
    if dead := two_each.dead:
        two_each.bring_back(dead)
    return two_each


def in_slurm(num_ranks: int, **options) -> ClusterSpec:
    options = {"ranks_per_host": num_ranks // 2, "device": "cpu"} | options
    return ClusterSpec(engines="slurm", num_ranks=num_ranks, **options)


def agents() -> list[psutil.Process]:
    """Agents in this Slurm's jobs, and their shells; other tests have agents here too."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if "ddpnb.launcher.agent" in " ".join(process.info["cmdline"] or []):
            with contextlib.suppress(psutil.Error):
                if process.environ().get("SLURM_CONF") == os.environ["SLURM_CONF"]:
                    found.append(process)
    return found


def test_ranks_are_laid_out_node_by_node(cluster):
    assert total(cluster) == [4.0] * 4
    found = pull(cluster, f"[__import__('os').environ[name] for name in {VARIABLES}]")
    address = "127.0.0.1"
    assert found == [
        ["0", "0", "0", "2", "2", address],
        ["1", "1", "0", "2", "2", address],
        ["2", "0", "1", "2", "2", address],
        ["3", "1", "1", "2", "2", address],
    ]
    table = status_table(cluster, ())
    assert [row[1].text for row in table.rows] == ["n1", "n1", "n2", "n2"]
    names = pull(cluster, "[n for n in __import__('os').environ if n.startswith('SLURM_PROC')]")
    assert names == [[]] * 4  # by which Lightning would number the ranks


def test_ddp_trains_in_slurm(cluster, tmp_path):
    (found,) = prepare(cluster, Store(tmp_path), a_comparison("ddp")).run().comparison.runs
    assert found.status == "finished"
    assert {*found.events["rank"]} == {0, 1, 2, 3}


def test_strangers_change_nothing_and_no_key_is_to_be_seen(cluster):
    assert total(cluster) == [4.0] * 4
    content = json.loads((cluster.profile / "security/ipcontroller-engine.json").read_text())
    address = content["interface"].removeprefix("tcp://")
    assert address == "127.0.0.1"
    ports = [value for value in content.values() if isinstance(value, int) and value > 1]
    knock([(address, port) for port in ports])
    assert total(cluster) == [4.0] * 4
    cluster.abort(cluster.ranks)  # which closes connections between hosts, not those to engines
    cluster.ensure_group()
    assert total(cluster) == [4.0] * 4
    keys = [v.encode() for name, v in content.items() if "key" in name and v]
    assert len(keys) >= 2
    server = psutil.Process(cluster.processes.pid)
    for process in [*psutil.Process().children(recursive=True), server, *agents()]:
        assert not any(key in shown(process) for key in keys), process
    assert not list(Path.home().glob(".ddpnb-*.json"))


def test_a_killed_agent_is_replaced(cluster, tmp_path):
    run(cluster, "import torch, torch.distributed as dist\nkept = rank")
    cell = begin(cluster, REDUCE_FOR_EVER.format(sign=f"{tmp_path}/"))
    wait_until(lambda: len(list(tmp_path.iterdir())) == 4, "all ranks in the cell")
    parents = {psutil.Process(each.pid).ppid() for each in cluster.states[2:]}
    (agent,) = parents
    psutil.Process(agent).kill()
    finish(cell)
    assert set(cell.lost) == {2, 3}
    assert "was lost with host n2: its connection or its agent ended" in cell.lost[2]
    assert pull(cluster, "kept", ranks=[0, 1]) == ["of rank 0", "of rank 1"]
    cluster.bring_back([2, 3])
    assert total(cluster) == [4.0] * 4


def test_a_job_that_is_cancelled_is_named_and_nothing_is_left(slurm):
    earlier = {each.pid for each in agents()}
    cluster = Cluster.start(in_slurm(2, slurm="time=10 comment=mine"))
    try:
        job = newest_job()
        cell = begin(cluster, "import time\nwhile True: time.sleep(0.01)", timeout=None)
        subprocess.run(["scancel", job], check=True)
        finish(cell)
        assert set(cell.lost) == {0, 1}
        assert f"was lost with host n1: job {job} of Slurm has ended (CANCELLED)" in cell.lost[0]
        with pytest.raises(UserError, match=f"Job {job} of Slurm has ended .*%ddp_restart"):
            cluster.bring_back([0])
    finally:
        cluster.stop()
        cluster.stop()
    wait_until(lambda: job not in jobs(), "the job's end")
    wait_until_gone([each for each in agents() if each.pid not in earlier])


def test_stop_leaves_no_job(slurm):
    earlier = {each.pid for each in agents()}
    cluster = Cluster.start(in_slurm(2))
    run(cluster, "import subprocess\nsubprocess.Popen(['sleep', '600'])")
    found = [each for each in agents() if each.pid not in earlier]
    found += [child for each in found for child in each.children(recursive=True)]
    job = newest_job()
    cluster.stop()
    wait_until(lambda: job not in jobs(), "the job's end")
    wait_until_gone(found)


def test_a_killed_kernel_leaves_no_job(slurm):
    earlier = {each.pid for each in agents()}
    source = (
        "import ddpnb, time; ddpnb.start(2, engines='slurm', ranks_per_host=1, device='cpu');"
        "print('go', flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE) as kernel:
        assert kernel.stdout is not None
        assert kernel.stdout.readline() == b"go\n"
        found, job = [each for each in agents() if each.pid not in earlier], newest_job()
        assert found
        kernel.kill()
    wait_until(lambda: job not in jobs(), "the job's end", timeout=60)
    wait_until_gone(found)


def test_a_job_that_waits_for_ever_ends_at_the_timeout(slurm):
    said = []
    sentence = r"has waited for 2 s and is cancelled \(its reason to wait: BeginTime\).*--timeout"
    with pytest.raises(UserError, match=sentence):
        Cluster.start(in_slurm(2, slurm=KEPT_AWAY, timeout=2.0), said.append)
    assert "waiting in Slurm's queue: BeginTime" in said
    assert "PENDING" not in jobs()


def test_a_kernel_that_is_killed_while_its_job_waits_leaves_none_in_the_queue(slurm):
    spec = f"num_ranks=2, engines='slurm', slurm={KEPT_AWAY!r}, timeout=3.0"
    source = (
        "from ddpnb.cluster.cluster import Cluster, ClusterSpec\n"
        f"Cluster.start(ClusterSpec({spec}), lambda words: print('go', flush=True))"
    )
    with subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE) as kernel:
        assert kernel.stdout is not None
        assert kernel.stdout.readline() == b"go\n"
        wait_until(lambda: "PENDING" in jobs(), "the job")
        kernel.kill()
    wait_until(lambda: "PENDING" not in jobs(), "the job's end", timeout=60)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"slurm": "partition=nowhere"}, "Slurm gave no job: .*[Ii]nvalid partition"),
        ({"slurm": "colour=red"}, "Slurm gave no job: .*"),
        ({"python": "/nowhere/python"}, "Host n1 has no such Python"),
        ({"device": "cuda"}, "Host n1 has no GPU"),
    ],
)
def test_what_slurm_refuses_is_said(slurm, options, sentence):
    with pytest.raises(UserError, match=sentence):
        Cluster.start(in_slurm(2, **options))
    wait_until(lambda: len(jobs().splitlines()) <= 1, "only the shared cluster's job")


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("write_file", "/nowhere/key.json", "does not share your home folder: no file with keys"),
        ("address", "192.0.2.77", r"does not reach this one \(no answer at 192.0.2.77, port"),
    ],
)
def test_a_host_that_cannot_come_is_named(slurm, monkeypatch, name, value, sentence):
    write_file = Tunnels.write_file

    def written(tunnels: Tunnels, ports: Sequence[int], *, is_once: bool) -> Path:
        if name == "write_file":
            return Path(value)
        file = write_file(tunnels, ports, is_once=is_once)
        file.write_text(json.dumps(json.loads(file.read_text()) | {"address": value}))
        return file

    monkeypatch.setattr(Tunnels, "write_file", written)
    with pytest.raises(UserError, match=f"Host n1 {sentence}"):
        Cluster.start(in_slurm(2))


def test_slurms_options_are_read_as_in_a_magic():
    words = parse_slurm("\"partition=gpu time=1:00:00 exclusive comment='two words'\"")
    assert words == ["--partition=gpu", "--time=1:00:00", "--exclusive", "--comment=two words"]


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ({"engines": "pbs"}, "--engines is slurm or mpi, not 'pbs': .*--profile NAME"),
        ({"slurm": "time=1"}, "--slurm is for --engines slurm"),
        ({"engines": "mpi", "timeout": 5.0}, "--timeout is for --engines slurm"),
        ({"engines": "slurm"}, "--engines slurm needs -n"),
        ({"engines": "slurm", "hosts": "a:2"}, "Slurm chooses the hosts"),
        ({"engines": "slurm", "num_ranks": 2, "timeout": 0.0}, "seconds above 0, not 0"),
        ({"engines": "slurm", "num_ranks": 3, "ranks_per_host": 2}, "-n 3 is no multiple"),
        ({"num_ranks": 4, "ranks_per_host": 2}, "--ranks-per-host is for --engines"),
        ({"engines": "slurm", "num_ranks": 2, "slurm": "gpu please!"}, "not 'please!'"),
        ({"engines": "slurm", "num_ranks": 2, "slurm": "nodes=3"}, "--slurm nodes: leave it out"),
    ],
)
def test_options_that_do_not_go_together(spec, sentence):
    with pytest.raises(UserError, match=sentence):
        ClusterSpec(**spec)


@pytest.mark.parametrize(
    ("engines", "sentence"),
    [("slurm", "There is no salloc on this host"), ("mpi", "There is no mpiexec on this host")],
)
def test_a_launcher_that_is_not_installed_is_named(monkeypatch, tmp_path, engines, sentence):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match=sentence):
        Cluster.start(ClusterSpec(engines=engines, num_ranks=2))


def test_mpi_starts_trains_and_stops(monkeypatch, tmp_path):
    allow_mpi(monkeypatch)
    cluster = Cluster.start(ClusterSpec(engines="mpi", num_ranks=2, device="cpu", num_threads=1))
    try:
        assert total(cluster) == [2.0] * 2
        (found,) = prepare(cluster, Store(tmp_path), a_comparison("ddp")).run().comparison.runs
        assert found.status == "finished"
        names = pull(cluster, "[n for n in __import__('os').environ if n.startswith('OMPI_COMM')]")
        assert names == [[]] * 2
        below = psutil.Process().children(recursive=True)
        (mpiexec,) = [each for each in below if each.name() == "mpiexec"]
        left = [mpiexec, *mpiexec.children(recursive=True)]
        assert len(left) >= 5  # a shell, the agent and two ranks
    finally:
        cluster.stop()
    wait_until_gone(left)


def newest_job() -> str:
    """The number of the job that was submitted last."""
    return max(jobs().splitlines(), key=lambda line: int(line.split()[0])).split()[0]
