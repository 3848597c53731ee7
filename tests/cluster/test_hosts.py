"""Ranks on two hosts, started over ssh, work and end like ranks on one host."""

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from ddpnb.cluster.cluster import Cluster
from ddpnb.cluster.group import bring_back, ensure_group
from ddpnb.hosts import processes, ssh
from ddpnb.protocol.errors import UserError
from ddpnb.results.run import RunSnapshot
from ddpnb.session.status import status_table
from ddpnb.session.training import RunningComparison
from tests.cells import CELL
from tests.cluster import rig
from tests.cluster.two_hosts import TwoHosts, files_of
from tests.programs import python

SECONDS = 30.0
"""The longest wait on a busy machine. On an idle machine the wait takes 5 s."""

VARIABLES = [
    "RANK",
    "LOCAL_RANK",
    "GROUP_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_WORLD_SIZE",
    "MASTER_ADDR",
]

REDUCE_FOR_EVER = """
from pathlib import Path
kept = f"of rank {{rank}}"
Path({sign!r} + str(rank)).touch()
big = torch.ones(1_000_000)
while True:
    dist.all_reduce(big)
"""

STEP_FOR_EVER = """
from pathlib import Path
from torch import nn
from torch.nn.parallel import DistributedDataParallel
kept = f"of rank {{rank}}"
ddp = DistributedDataParallel(nn.Linear(1000, 2000), bucket_cap_mb=2)
Path({sign!r} + str(rank)).touch()
while True:
    ddp(torch.ones(1, 1000)).sum().backward()
"""

DIFFERENT = {
    "call": "dist.all_reduce(torch.ones(3)) if rank < 2 else dist.broadcast(torch.ones(3), 0)",
    "a call left out": "if rank < 2: dist.barrier()\ndist.all_reduce(torch.ones(7))",
    "long tensors": "dist.all_reduce(torch.ones(100_000 if rank < 2 else 300_000))",
}
"""Cells in which the ranks on host a and the ranks on host b make different calls."""


@pytest.fixture(scope="module")
def two_each(hosts) -> Iterator[Cluster]:
    with rig.started(environment=rig.DYNAMO, hosts="a:2,b:2", num_threads=1) as cluster:
        yield cluster


@pytest.fixture
def cluster(two_each) -> Iterator[Cluster]:
    """Four ranks on two hosts. After each test, dead ranks' logs are printed and all ranks sum."""
    yield two_each
    for rank in two_each.dead:
        print(f"rank {rank}:", two_each.exits[rank].log)
    if two_each.dead:
        bring_back(two_each, two_each.dead)
    assert rig.total(two_each) == [4.0] * 4


def test_ranks_are_laid_out_host_by_host(cluster, hosts):
    found = rig.pull(cluster, f"[__import__('os').environ[name] for name in {VARIABLES}]")
    address = hosts.address("a")
    assert found == [
        ["0", "0", "0", "2", "2", address],
        ["1", "1", "0", "2", "2", address],
        ["2", "0", "1", "2", "2", address],
        ["3", "1", "1", "2", "2", address],
    ]
    table = status_table(cluster, ())
    assert [row[2].text for row in table.rows] == ["a", "a", "b", "b"]


def test_nothing_listens_beyond_the_interface_and_no_key_is_to_be_seen(cluster, hosts):
    assert rig.total(cluster) == [4.0] * 4
    for host in "ab":
        lines = hosts.call(host, "ss", "-Hltn").splitlines()
        places = {line.split()[3].rsplit(":", 1)[0] for line in lines}
        assert places <= {hosts.address(host), "127.0.0.1"}
    here = psutil.Process(cluster.processes.server.pid)
    own = [here, *here.children(recursive=True)]
    for process in own:
        listening = [c for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
        assert not listening
    content = json.loads((cluster.folder / "profile/security/ipcontroller-engine.json").read_text())
    keys = [v.encode() for name, v in content.items() if "key" in name and v]
    assert len(keys) >= 2
    over_ssh = psutil.Process().children(recursive=True)
    for process in [*own, *over_ssh, *hosts.processes("a"), *hosts.processes("b")]:
        assert not any(key in rig.shown(process) for key in keys), process


def test_strangers_change_nothing(cluster, hosts):
    assert rig.total(cluster) == [4.0] * 4
    lines = hosts.call("a", "ss", "-Hltn").splitlines()
    ports = {int(line.split()[3].rsplit(":", 1)[1]) for line in lines} - {22}
    rig.knock([(hosts.address("a"), port) for port in ports], times=1000)
    assert rig.total(cluster) == [4.0] * 4
    cluster.abort(cluster.ranks)
    ensure_group(cluster)  # the store still answers too


TRAINED = {"source": CELL, "num_epochs": 2, "batch_size": 40}


def test_strategies_train_across_hosts(cluster, tmp_path):
    names = "ddp", "fsdp", "async", "gossip", "single:threads=all"
    comparison = rig.prepared(cluster, tmp_path, *names, **TRAINED).run().comparison
    *found, single = comparison.runs
    assert [each.status for each in comparison.runs] == ["finished"] * 5
    assert all({*each.events["rank"]} == {0, 1, 2, 3} for each in found)
    assert single.header.num_devices == 2
    assert single.header.num_threads == 2  # the threads of all ranks on its host
    assert comparison.environment["hosts"] == "a:2,b:2"


@pytest.mark.parametrize("strategy", ["ddp", "async"])
def test_a_run_that_is_stopped_is_judged(cluster, tmp_path, strategy, monkeypatch):
    training = rig.prepared(cluster, tmp_path, strategy, **TRAINED | {"num_epochs": 100_000})
    monkeypatch.setattr("ddpnb.session.training.FAILURE_SECONDS", SECONDS)
    found = trained(training, training.interrupt)
    assert (found.status, found.detail) == ("stopped", "stopped by the user")
    assert strategy == "async" or len({report.num_steps for report in found.reports}) == 1
    assert any(report.held_out_accuracy > 0 for report in found.reports)


def test_shared_memory_is_refused_across_hosts(cluster, tmp_path):
    with pytest.raises(UserError, match=r"dp .*Instead, compare ddp"):
        rig.prepared(cluster, tmp_path, "dp", "hogwild", "ddp", "central", **TRAINED)


def test_a_rank_that_leaves_a_call_out_is_named(cluster):
    rig.run(cluster, "import torch, torch.distributed as dist")
    ended = rig.run(cluster, "mine = rank\nif rank != 3:\n    dist.all_reduce(torch.ones(1000))")
    assert "rank 3 finished the cell without making this call" in ended.hang
    assert rig.pull(cluster, "mine") == [0, 1, 2, 3]


@pytest.mark.parametrize("case", DIFFERENT)
def test_the_ranks_are_of_use_after_calls_that_do_not_match_across_hosts(cluster, case):
    rig.run(cluster, "import torch, torch.distributed as dist")
    if case == "call":  # --check finds the mismatch before the call runs
        ended = rig.run(cluster, DIFFERENT[case], is_checked=True)
        assert not ended.lost
        assert any("mismatch between collectives" in f.text for f in ended.failures.values())
    rig.run(cluster, DIFFERENT[case])  # gloo ends a rank that receives more than it expects


def test_a_rank_that_is_stopped_on_another_host_is_named(cluster, tmp_path, monkeypatch):
    monkeypatch.setattr(cluster, "timeouts", replace(cluster.timeouts, silent_after_seconds=1.0))
    cell = reducing(cluster, tmp_path)
    stopped = psutil.Process(cluster.states[3].pid)
    stopped.suspend()
    try:
        rig.stop_when(lambda: bool(cell.notes), cell)
    finally:
        stopped.resume()
    assert "Rank 3 " in cell.notes[0]
    assert rig.pull(cluster, "kept") == [f"of rank {rank}" for rank in range(4)]


def test_a_rank_that_dies_is_replaced_and_its_log_is_here(cluster):
    rig.run(cluster, "kept = rank")
    ended = rig.run(cluster, "import os, sys\nif rank == 2: os.abort()\ndist.barrier()")
    assert "SIGABRT" in ended.lost[2]
    assert "Fatal Python error: Aborted" in cluster.exits[2].last_words
    bring_back(cluster, [2])
    assert rig.pull(cluster, "kept", ranks=[0, 1, 3]) == [0, 1, 3]


def test_a_host_without_power_is_lost_and_the_others_are_freed(cluster, hosts, tmp_path):
    """A rank on host a may wait for the rest of a message. ddpnb kills such a rank."""
    cell = reducing(cluster, tmp_path)
    with hosts.unplugged("b"):
        assert rig.finish(cell).seconds < 2 * SECONDS
        freed = sorted(cell.failures)
        assert freed
        assert set(cell.lost) == {0, 1, 2, 3} - set(freed)
        assert "was lost with host b" in cell.lost[2]
        assert rig.pull(cluster, "kept", ranks=freed) == [f"of rank {rank}" for rank in freed]
        left = hosts.processes("b")
    rig.wait_until_gone(left)  # they would also end without the network, a little later


def test_ranks_of_hosts_that_lose_each_other_are_freed_or_killed(cluster, hosts, tmp_path):
    """ddpnb kills the ranks that wait for the rest of a message. Chance decides which ranks."""
    cell = reducing(cluster, tmp_path)
    with hosts.parted():
        rig.finish(cell)
        assert cell.hang
        left = list(cluster.living)
        assert rig.pull(cluster, "kept", ranks=left) == [f"of rank {rank}" for rank in left]


def test_ranks_that_a_cut_within_a_message_leaves_waiting_are_killed(cluster, hosts, tmp_path):
    """Gloo waits forever for the rest of a message."""
    cell = reducing(cluster, tmp_path, STEP_FOR_EVER)
    with hosts.slow("50mbit"):
        time.sleep(3.0)  # a step takes 2.6 s, so each connection is in the middle of a message
        with hosts.parted():
            assert rig.finish(cell).seconds < 2 * SECONDS
    assert set(cell.failures) | set(cell.lost) == {0, 1, 2, 3}


def test_a_network_that_is_gone_for_some_seconds_loses_nothing(cluster, hosts):
    rig.run(cluster, "kept = rank")
    cell = rig.begin(cluster, "import time\nfor _ in range(45): time.sleep(0.1)", timeout=None)
    with hosts.unplugged("b"):
        time.sleep(2.0)  # a host may be silent for five seconds
    rig.finish(cell)
    assert not cell.lost
    assert not cell.failures
    assert rig.pull(cluster, "kept") == [0, 1, 2, 3]


HELD = (
    CELL
    + """
import time
from pathlib import Path
class Held(nn.Linear):
    num_calls = 0
    def forward(self, x):
        Held.num_calls += self.training
        deadline = time.monotonic() + 60
        while Held.num_calls > 50 and Path({hold!r}).exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        return super().forward(x)
def model(): return Held(4, 2)
"""
)
"""The ranks wait in a step as long as the file ``hold`` exists."""


def test_an_asynchronous_run_goes_on_when_a_killed_relay_takes_a_hosts_ranks_and_files_along(
    cluster, hosts, tmp_path, capsys
):
    hold = tmp_path / "hold"
    hold.touch()
    options = TRAINED | {"source": HELD.format(hold=str(hold)), "num_epochs": 60}
    training = rig.prepared(cluster, tmp_path, "async", **options)
    left = [each for each in hosts.processes("b") if "ddpnb.hosts.agent" in each.cmdline()]
    (name,) = hosts.names("b")
    (relay,) = hosts.running("relay", "b")

    def kill() -> None:
        relay.kill()
        rig.wait_until_gone(left)
        rig.wait_until(lambda: not files_of(name), "the agent's files are gone")
        hold.unlink()

    found = trained(training, kill)
    assert not hold.exists()
    assert found.status == "finished"
    assert {mark.rank for mark in found.marks} == {2, 3}
    assert "anks 2-3 died, and ddpnb restarted them" in capsys.readouterr().err


def test_a_killed_kernel_leaves_nothing(hosts):
    earlier, names = everything(hosts)
    start = "import ddpnb; ddpnb.start(hosts='b:1', device='cpu')"
    with python(f"{start}; print('go', flush=True); input()") as (kernel, line):
        assert line == "go\n"
        found, new = everything(hosts, earlier, names)
        found += psutil.Process(kernel.pid).children(recursive=True)
        kernel.kill()
    rig.wait_until_gone(found)
    assert len(new) == 1
    assert not any(map(files_of, new))


def test_a_slow_network_is_no_hang(cluster, hosts):
    """Each host sends 9 MB in 4.5 s. All ranks are idle during this time."""
    with hosts.slow("16mbit"):
        ended = rig.run(cluster, f"{rig.ALL_REDUCE}\nx = torch.ones(1_500_000)\ndist.all_reduce(x)")
    assert not ended.hang
    assert rig.pull(cluster, "x.sum().item()") == [6e6] * 4


def test_an_interrupt_leaves_no_rank_a_call_ahead(cluster, tmp_path, monkeypatch):
    """Ranks 1 to 3 wait for rank 0. They have time to end before ddpnb releases them."""
    late = replace(cluster.timeouts, abort_after_interrupt_seconds=1.5)
    monkeypatch.setattr(cluster, "timeouts", late)
    cell = rig.begin(
        cluster,
        "import time, torch, torch.distributed as dist\nfrom pathlib import Path\n"
        f"Path({str(tmp_path)!r}, str(rank)).touch()\nif rank == 0: time.sleep(600)\n"
        "dist.all_reduce(torch.full((1,), 100.0))",
        timeout=None,
    )
    rig.stop_when(lambda: len([*tmp_path.iterdir()]) == 4, cell)
    assert {failure.name for failure in cell.failures.values()} == {"KeyboardInterrupt"}


def test_stop_leaves_nothing_on_either_host_not_even_of_a_stopped_agent(
    two_each, hosts, monkeypatch
):
    """This test comes last, because it ends the ranks that all tests of this file share."""
    monkeypatch.setattr(processes, "STOP_TIMEOUT_SECONDS", 1.0)
    monkeypatch.setattr(ssh, "SSH_END_SECONDS", 1.0)
    rig.run(two_each, "import subprocess\nsubprocess.Popen(['sleep', '600'])")
    found, names = everything(hosts)
    assert len(found) >= 14  # on each host a shell, a relay, an agent, two ranks, two sleeps
    assert all(map(files_of, names))
    clients = [each for each in psutil.Process().children() if each.name() == "ssh"]
    assert len(clients) >= 2
    here = rig.processes_of(two_each) + clients
    (agent,) = hosts.running("agent", "b")
    agent.suspend()
    two_each.stop()
    rig.wait_until_gone(here, timeout=1)
    rig.wait_until_gone(found)
    assert not any(map(files_of, names))


def everything(
    hosts: TwoHosts, processes: Sequence[psutil.Process] = (), names: Sequence[str] = ()
) -> tuple[list[psutil.Process], list[str]]:
    """Return the processes on both hosts and their agents' tokens, except the given ones."""
    found = [process for host in "ab" for process in hosts.processes(host)]
    new = [name for host in "ab" for name in hosts.names(host)]
    return [each for each in found if each not in processes], [n for n in new if n not in names]


def reducing(cluster: Cluster, folder: Path, source: str = REDUCE_FOR_EVER):
    """Begin a cell in which all ranks repeat an all-reduce forever."""
    rig.run(cluster, "import torch, torch.distributed as dist")
    cell = rig.begin(cluster, source.format(sign=f"{folder}/"))
    rig.wait_until(lambda: len(list(folder.iterdir())) == 4, "all ranks in the cell")
    return cell


def trained(training: RunningComparison, act: Callable[[], object]) -> RunSnapshot:
    """Train one strategy, and call ``act`` after some steps."""

    def has_begun() -> bool:
        return any(len(run.events) > 40 for run in training.recorder.comparison.runs)

    def act_later() -> None:
        try:
            rig.wait_until(has_begun, "some steps", timeout=60)
        finally:
            act()

    thread = threading.Thread(target=act_later)
    thread.start()
    (found,) = training.run().comparison.runs
    thread.join()
    return found
