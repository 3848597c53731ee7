import ipaddress
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import ipyparallel as ipp
import psutil
import pytest

import ddpnb
from ddpnb.cluster.client import EngineClient
from ddpnb.cluster.cluster import Cluster
from ddpnb.cluster.group import bring_back
from ddpnb.cluster.placement import ClusterSpec
from ddpnb.compat import ipyparallel_internals
from ddpnb.protocol.calls import calls
from ddpnb.protocol.cores import num_cores
from ddpnb.protocol.errors import UserError
from ddpnb.protocol.processes import VERSION, private_folder
from tests.cluster import rig
from tests.programs import find_program

THREADS = max(1, int(num_cores()) // 2)


def test_a_folder_that_was_removed_is_named(tmp_path, monkeypatch, folders: list[Path]):
    monkeypatch.chdir(tmp_path)
    tmp_path.rmdir()
    with pytest.raises(UserError, match=r"folder no longer exists\. Change .* with %cd"):
        Cluster.start(ClusterSpec(num_ranks=1, device="cpu"))
    assert not folders


def test_another_ddpnb_that_the_ranks_would_find_is_named(
    tmp_path, monkeypatch, folders: list[Path]
):
    """For example a clone in the notebook's folder, or a version that was installed just now."""
    other = tmp_path / "ddpnb"
    shutil.copytree(Path(ddpnb.__file__).parent, other)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as error:
        Cluster.start(ClusterSpec(num_ranks=1, device="cpu"))
    here, there = (f"ddpnb {VERSION} in {each}" for each in (Path(ddpnb.__file__).parent, other))
    said = f"The notebook has {here}, but ranks find {there}. Restart the kernel."
    assert str(error.value) == said
    assert not any(folder.exists() for folder in folders)


def test_a_call_on_a_rank_without_an_engine_reaches_no_rank(cluster: Cluster, monkeypatch):
    sent = []
    monkeypatch.setattr(
        ipyparallel_internals, "start_call", lambda *arguments: sent.append(arguments)
    )
    with pytest.raises(UserError, match="%ddp_restart --ranks 999"):
        cluster.client.submit(calls.state(), [0, 999])
    assert not sent


def test_ranks_find_what_torchrun_gives_a_group_and_the_notebooks_folder(cluster: Cluster):
    for rank, env in enumerate(rig.pull(cluster, "dict(__import__('os').environ)")):
        assert env["RANK"] == env["LOCAL_RANK"] == str(rank)
        assert env["WORLD_SIZE"] == env["LOCAL_WORLD_SIZE"] == "2"
        assert ipaddress.ip_address(env["MASTER_ADDR"]).is_loopback
        assert 1024 <= int(env["MASTER_PORT"]) < 65536
        assert env["OMP_NUM_THREADS"] == str(THREADS)
    assert not rig.run(cluster, rig.ALL_REDUCE).failures
    names = "total.item(), dist.get_rank(), dist.get_world_size(), torch.get_num_threads()"
    assert rig.pull(cluster, names) == [(2.0, 0, 2, THREADS), (2.0, 1, 2, THREADS)]
    names = "rank, local_rank, world_size, str(device), dist.is_torchelastic_launched()"
    assert rig.pull(cluster, names) == [(0, 0, 2, "cpu", True), (1, 1, 2, "cpu", True)]
    rig.run(cluster, "import os, sys\nfound = os.getcwd(), sys.argv, hasattr(sys, 'ps1')")
    # sys.argv as in an interpreter without a script, but without a prompt (sys.ps1)
    assert rig.pull(cluster, "found") == [(os.getcwd(), [""], False)] * 2


DRAW = """
import random, numpy, torch
drawn = random.random(), numpy.random.rand(), torch.rand(1).item()
"""


def test_every_rank_draws_other_random_numbers(cluster: Cluster):
    assert not rig.run(cluster, DRAW).failures
    numbers = rig.pull(cluster, "drawn")
    bring_back(cluster, [1])
    assert not rig.run(cluster, DRAW, ranks=[1]).failures
    numbers += rig.pull(cluster, "drawn", ranks=[1])
    assert [len(set(drawn)) for drawn in zip(*numbers, strict=True)] == [3, 3, 3]


def test_a_rank_that_dies_again_at_its_restart_is_named(cluster: Cluster, monkeypatch):
    restart_alone = cluster.restart_alone

    def restart_and_kill(rank: int) -> None:
        restart_alone(rank)
        cluster.kill([rank])
        rig.wait_until(lambda: rank in cluster.exits, "the rank's end")

    with monkeypatch.context() as patch:
        patch.setattr(Cluster, "restart_alone", lambda _, rank: restart_and_kill(rank))
        with pytest.raises(UserError, match=r"SIGKILL\. Run %ddp_restart --ranks 1"):
            bring_back(cluster, [1])
    bring_back(cluster, [1])
    assert rig.total(cluster) == [2.0] * 2


def test_no_key_stands_in_the_environment_or_command_line_of_a_process(cluster: Cluster):
    secrets = [
        value
        for path in (cluster.folder / "profile/security").glob("*.json")
        for name, value in json.loads(path.read_text()).items()
        if name in ("key", "curve_serverkey") and value
    ]
    assert len(secrets) >= 3  # messages are signed; CurveZMQ is on for engines and client
    seen = json.dumps(rig.pull(cluster, "dict(__import__('os').environ)"))
    for process in rig.processes_of(cluster):
        seen += json.dumps(process.environ()) + json.dumps(process.cmdline())
    assert not [secret for secret in secrets if secret in seen]
    assert "IPP_CONNECTION_INFO" not in seen


def test_the_run_folder_is_closed_to_others(cluster: Cluster):
    assert stat.S_IMODE(cluster.folder.stat().st_mode) == 0o700
    files = [path for path in cluster.folder.rglob("*") if not path.is_symlink()]
    assert {path.lstat().st_uid for path in files} == {os.getuid()}
    assert not [path for path in files if stat.S_IMODE(path.lstat().st_mode) & 0o022]
    keys = list((cluster.folder / "profile/security").iterdir())
    assert keys
    assert {stat.S_IMODE(path.stat().st_mode) & 0o077 for path in keys} == {0}


def test_nothing_listens_outside_loopback(cluster: Cluster):
    rig.run(cluster, rig.ALL_REDUCE)
    listening = {
        (process.pid, connection.laddr.ip)
        for process in rig.processes_of(cluster)
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }
    assert all(ipaddress.ip_address(ip).is_loopback for _, ip in listening), listening
    ranks = {state.pid for state in cluster.states}
    assert {pid for pid, _ in listening} <= ranks  # only gloo; ipyparallel's sockets are files


@pytest.fixture
def unusual(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """An environment in which the fork server fails if it looks for GPUs, and SIGINT is ignored.

    ``nohup jupyter lab &`` starts such a kernel, and its children would ignore SIGINT too.
    """
    source = "import __main__\n__main__.may_have_gpus = lambda: 1 / 0"
    (tmp_path / "no_driver.py").write_text(source)
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    yield {
        "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path]),
        "DDPNB_PRELOAD": "no_driver",
    }
    signal.signal(signal.SIGINT, handler)


def test_a_start_survives_lost_messages_and_stop_leaves_nothing(
    unusual: dict[str, str], monkeypatch: pytest.MonkeyPatch
):
    """A busy controller loses messages, or connects to an engine later than the engine to it."""
    asked, sent = [], []
    connect, send = ipp.Client._connect, ipyparallel_internals.start_call

    def leave_the_first_unanswered(client: ipp.Client, *args: object) -> None:
        asked.append(client)
        if len(asked) == 1:
            raise TimeoutError("Hub connection request timed out")
        connect(client, *args)

    def lose_the_first(*arguments) -> None:
        sent.append(arguments)
        if len(sent) > 1:
            send(*arguments)

    monkeypatch.setattr(ipp.Client, "_connect", leave_the_first_unanswered)
    monkeypatch.setattr(ipyparallel_internals, "start_call", lose_the_first)
    with rig.started(2, environment=unusual) as cluster:
        assert [state.rank for state in cluster.states] == [0, 1]
        assert len(asked) >= 2
        assert len(sent) > 2
        client, states = EngineClient(cluster.folder / "profile", lambda: None), {}
        client._client._ids.remove(1)  # as if the controller's notice was lost

        def are_both_there() -> bool:
            states.update(client.new_states(2 - len(states)))
            return len(states) == 2

        client.wait_for(are_both_there)
        assert {state.rank for state in states.values()} == {0, 1}
        client.close((), "")
        rig.run(
            cluster,
            f"{rig.ALL_REDUCE}import subprocess; child = subprocess.Popen(['sleep', '1000'])",
        )
        assert rig.pull(cluster, "total.item()") == [2.0] * 2
        cell = rig.run(cluster, "import time\nwhile True: time.sleep(0.01)", timeout=0.5)
        assert [each.name for each in cell.failures.values()] == ["KeyboardInterrupt"] * 2
        processes = rig.processes_of(cluster)
        assert "sleep" in {process.name() for process in processes}
        cluster.stop()
        assert not [process for process in processes if rig.is_alive(process)]
        assert not cluster.folder.exists()
        cluster.stop()
    with pytest.raises((UserError, AssertionError)):
        rig.run(cluster, "1")


@pytest.fixture
def folders(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """A list that collects the run folders that this process makes."""
    made: list[Path] = []

    def make() -> Path:
        made.append(private_folder())
        return made[-1]

    monkeypatch.setattr("ddpnb.cluster.cluster.private_folder", make)
    return made


def test_a_wish_that_cannot_be_met_leaves_nothing(folders: list[Path]):
    children = set(psutil.Process().children(recursive=True))
    with pytest.raises(UserError, match="This machine has 0 GPUs"):
        Cluster.start(ClusterSpec(num_ranks=2, backend="nccl"))
    assert len(folders) == 1
    assert not folders[0].exists()
    assert set(psutil.Process().children(recursive=True)) <= children


@pytest.mark.parametrize("moment", [0, 1])
def test_an_interrupt_while_starting_leaves_nothing(moment: int, folders: list[Path]):
    children = set(psutil.Process().children(recursive=True))
    started_processes: list[psutil.Process] = []
    phases: list[str] = []

    def interrupt(text: str) -> None:
        phases.append(text)
        if len(phases) > moment:
            found = set(psutil.Process().children(recursive=True)) - children
            started_processes.extend(found)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Cluster.start(ClusterSpec(num_ranks=2), progress=interrupt)
    assert started_processes
    rig.wait_until_gone(started_processes, timeout=5)
    assert not folders[0].exists()


def test_a_second_cluster_of_another_size_disturbs_the_first_in_nothing(cluster: Cluster):
    rig.run(cluster, "kept = rank + 100")
    with rig.started(3) as second:
        assert second.folder != cluster.folder
        assert {s.num_threads for s in second.states} == {max(1, int(num_cores()) // 3)}
        both = [
            threading.Thread(target=rig.run, args=(one, rig.ALL_REDUCE + f"mine = {mine}"))
            for mine, one in enumerate((cluster, second))
        ]
        for thread in both:
            thread.start()
        for thread in both:
            thread.join(30)
        assert rig.pull(second, "mine, total.item()") == [(1, 3.0)] * 3
        ports = [
            rig.pull(one, "__import__('os').environ['MASTER_PORT']") for one in (cluster, second)
        ]
        assert ports[0][0] != ports[1][0]
        assert not set(rig.processes_of(second)) & set(rig.processes_of(cluster))
        rig.run(second, "big = torch.ones(5_000_000)")
        for _ in range(12):
            assert len(rig.pull(second, "big.numpy()", ranks=[0, 1])) == 2  # 40 MB
        # 12 pulls of 40 MB went through the controller, which must keep none of the data.
        assert rig.controller_of(second).memory_info().rss < 300e6
    assert rig.pull(cluster, "kept, mine, total.item()") == [(100, 0, 2.0), (101, 0, 2.0)]
    assert not rig.run(cluster, rig.ALL_REDUCE).failures


ON_A_HOST = """
import contextlib, json, socket
from tests.cluster.rig import ALL_REDUCE, pull, run, started
try:
    found = socket.gethostbyname(socket.gethostname())
except OSError:
    found = ""
taken = socket.socket()
with contextlib.suppress(OSError):  # somebody else has it: as well
    taken.bind(("127.0.0.1", 29500))
    taken.listen()
with started(2) as cluster:
    failures = run(cluster, ALL_REDUCE).failures
    seen = pull(cluster, "total.item(), __import__('os').environ['MASTER_PORT']")
    print(json.dumps([found, len(failures), seen]))
"""


def test_the_hosts_name_need_not_resolve_and_torchruns_port_may_be_taken() -> None:
    """A laptop without a network has such a name. The test uses a separate UTS name space."""
    for program in ("unshare", "hostname"):
        find_program([program], "changing the host name needs unshare(1) and hostname(1)")
    named = ["unshare", "--uts", "sh", "-c", 'hostname nosuch.invalid && exec "$@"', "sh"]
    if subprocess.run([*named, "true"], check=False, capture_output=True).returncode != 0:
        pytest.skip("changing the host name needs the right to unshare")
    ended = subprocess.run(
        [*named, sys.executable, "-c", ON_A_HOST],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    found, num_failures, seen = json.loads(ended.stdout.splitlines()[-1])
    if found:
        pytest.skip(f"nosuch.invalid resolves to {found} on this machine")
    assert num_failures == 0
    assert [total for total, _ in seen] == [2.0, 2.0]
    assert "29500" not in [port for _, port in seen]
