import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from ddpnb.cluster.cluster import Cluster
from ddpnb.cluster.placement import ClusterSpec, Placement
from ddpnb.cluster.run_folder import (
    ClusterRecord,
    choose,
    detached,
    find,
    name_of,
    remove_leftovers,
)
from ddpnb.protocol.errors import UserError
from ddpnb.session.background import orphaned_call
from tests.cluster.rig import (
    ALL_REDUCE,
    is_alive,
    processes_of,
    pull,
    run,
    wait_until,
    wait_until_gone,
)

OWNER = """
import json, sys
from ddpnb.cluster.call import Output
from ddpnb.cluster.cluster import Cluster
from ddpnb.cluster.placement import ClusterSpec
from tests.cluster.rig import begin, processes_of, run
spec = ClusterSpec(num_ranks=2, device="cpu", detach_seconds=float(sys.argv[1]))
cluster = Cluster.start(spec)
run(cluster, "kept = 7 + 10 * rank")
cell = begin(cluster, "print('begun')\\n" + sys.argv[2])
said = {}
while set(said) != {0, 1}:  # a cell that is sent at the very moment of the kill may never leave
    for event in cell.watch.call.events(30.0):
        if isinstance(event, Output):
            said[event.rank] = event
print(json.dumps([str(cluster.folder), [p.pid for p in processes_of(cluster)]]), flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def left_by_a_kill(
    seconds: float, source: str = "1"
) -> Iterator[tuple[Path, list[psutil.Process]]]:
    """A cluster without its kernel, which was killed while its ranks ran a cell."""
    with subprocess.Popen(
        [sys.executable, "-c", OWNER, str(seconds), source],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as owner:
        assert owner.stdout is not None
        folder, pids = json.loads(owner.stdout.readline())
        owner.kill()
    processes = [psutil.Process(pid) for pid in pids]
    assert len(processes) >= 4  # fork server, controller with its child, ranks
    try:
        yield Path(folder), processes
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            processes[0].terminate()
        wait_until_gone(processes, timeout=20)
        wait_until(lambda: not Path(folder).exists(), "the end of the run folder")


@contextlib.contextmanager
def detachable_cluster(method: str | None = None) -> Iterator[Cluster]:
    spec = ClusterSpec(num_ranks=2, device="cpu", method=method, detach_seconds=600)
    cluster = Cluster.start(spec)
    processes = processes_of(cluster)
    try:
        yield cluster
    finally:
        cluster.stop()
        with contextlib.suppress(psutil.NoSuchProcess):
            processes[0].terminate()  # where it was left
        wait_until_gone(processes, timeout=20)


def attach(folder: Path) -> Cluster:
    return Cluster.attach(find(name_of(folder), Path.cwd()))


def detach_and_attach(cluster: Cluster) -> Cluster:
    cluster.detach()
    return attach(cluster.folder)


def test_ranks_outlive_a_killed_owner_and_are_found_with_their_variables():
    with left_by_a_kill(600) as (folder, processes):
        assert folder not in remove_leftovers()
        cluster = attach(folder)
        assert cluster.living == (0, 1)
        assert pull(cluster, "kept") == [7, 17]
        again = run(cluster, f"{ALL_REDUCE}print(total.item())")
        assert not again.failures
        assert again.printed == {0: "2.0\n", 1: "2.0\n"}
        cluster.stop()
        assert not any(map(is_alive, processes))
        assert not folder.exists()


def test_when_the_time_is_over_nothing_is_left():
    with left_by_a_kill(10) as (folder, processes):
        assert all(map(is_alive, processes))
        wait_until_gone(processes, timeout=60)
        wait_until(lambda: not folder.exists(), "the end of the run folder")
        with pytest.raises(UserError, match="There is no cluster"):
            attach(folder)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_what_came_to_an_end_meanwhile_is_reported_and_can_be_brought_back(method: str):
    with detachable_cluster(method) as cluster:
        run(cluster, "kept = rank")
        cluster.detach()
        os.kill(cluster.states[1].pid, signal.SIGKILL)
        wait_until(lambda: not psutil.pid_exists(cluster.states[1].pid), "the end of rank 1")
        cluster = attach(cluster.folder)
        assert cluster.living == (0,)
        with pytest.raises(UserError, match=r"Rank 1 was killed by SIGKILL: %ddp_restart --ranks"):
            run(cluster, "1")
        cluster.bring_back([1])
        cluster = detach_and_attach(cluster)  # the rank's engine is another now
        assert cluster.living == (0, 1)
        assert run(cluster, f"{ALL_REDUCE}print(total.item())").printed == {0: "2.0\n", 1: "2.0\n"}
        assert pull(cluster, "kept", ranks=[0]) == [0]
        cluster.stop()


def test_a_group_that_was_cut_is_formed_anew_by_the_next_kernel():
    with detachable_cluster() as cluster:
        for generation in (1, 2):
            failed = run(cluster, f"1 / rank\n{ALL_REDUCE}")
            assert failed.failures[0].name == "ZeroDivisionError"
            cluster = detach_and_attach(cluster)
            assert run(cluster, f"{ALL_REDUCE}print(total.item())").printed[1] == "2.0\n"
            assert cluster.generation == generation
        cluster.stop()


def test_nothing_unusable_stays_behind():
    with detachable_cluster() as cluster:
        processes = processes_of(cluster)
        ranks = {state.pid for state in cluster.states}
        cluster.detach()
        next(p for p in processes[0].children() if p.pid not in ranks).kill()  # the controller
        wait_until_gone(processes, timeout=20)
        wait_until(lambda: not cluster.folder.exists(), "the end of the run folder")


def test_the_end_of_a_fork_server_that_was_taken_over_is_reported():
    with detachable_cluster() as cluster:
        processes = processes_of(cluster)
        cluster = detach_and_attach(cluster)
        processes[0].kill()
        wait_until_gone(processes, timeout=20)
        wait_until(lambda: cluster.lost is not None, "word of the fork server's end")
        assert cluster.lost == "the fork server has ended"
        cluster.stop()
        assert not cluster.folder.exists()


def test_only_one_kernel_at_a_time():
    with detachable_cluster() as cluster:
        record = next(record for record in detached() if record.folder == cluster.folder)
        with pytest.raises(UserError, match="is in use by another kernel: shut that kernel down"):
            Cluster.attach(record)
        with pytest.raises(UserError, match=f"is in use by another kernel, process {os.getpid()}"):
            attach(cluster.folder)
        assert not run(cluster, ALL_REDUCE).failures
        cluster.stop()
        with pytest.raises(UserError, match="has just ended: start anew with %ddp_start"):
            Cluster.attach(record)


def test_a_cell_left_running_can_be_interrupted(capsys: pytest.CaptureFixture[str]):
    with left_by_a_kill(600, "import time\nif rank: time.sleep(1000)") as (folder, _):
        cluster = attach(folder)
        cell = orphaned_call(cluster)
        assert cell is not None
        assert cell.ranks == (1,)
        assert "Rank 1 still runs a call of the earlier kernel" in capsys.readouterr().out
        cell.interrupt()
        wait_until(lambda: cell.done, "the end of the cell", timeout=20)
        assert orphaned_call(cluster) is None
        assert pull(cluster, "kept") == [7, 17]
        cluster.stop()


def test_ranks_left_in_a_collective_are_freed(capsys: pytest.CaptureFixture[str]):
    with left_by_a_kill(600, f"if rank:\n    1 / 0\n{ALL_REDUCE}") as (folder, _):
        cluster = attach(folder)
        cell = orphaned_call(cluster)
        assert cell is not None
        assert cell.ranks == (0,)
        wait_until(lambda: cell.done, "the end of the wait", timeout=30)
        cell.wait(10)
        assert re.search("hung: rank 0 waits in all_reduce", capsys.readouterr().out)
        assert run(cluster, f"{ALL_REDUCE}print(total.item())").printed == {0: "2.0\n", 1: "2.0\n"}
        assert pull(cluster, "kept") == [7, 17]
        cluster.stop()


def test_the_time_to_detach_may_be_changed_while_it_runs():
    with detachable_cluster() as cluster:
        processes = processes_of(cluster)
        cluster.allow_detach(0.5)
        assert next(s for s in detached() if s.folder == cluster.folder).spec.detach_seconds == 0.5
        cluster.detach()
        wait_until_gone(processes, timeout=20)


def record(name: str, home: str) -> ClusterRecord:
    return ClusterRecord(
        folder=Path(f"/dev/shm/ddpnb-{name}"),
        home=Path(home),
        began=time.time(),
        server=(1, 0.0),
        spec=ClusterSpec(num_ranks=2, detach_seconds=600),
        placement=Placement(devices=("cpu", "cpu"), backend="gloo", num_threads=1),
        master_port=1,
        states=(),
        engine_of={},
        generation=0,
        group_is_aborted=False,
        group_is_checked=False,
    )


def test_the_cluster_is_the_one_that_waits_or_the_one_started_here():
    a, b = record("a", "/here"), record("b", "/there")
    assert choose([a], {}, "", Path("/elsewhere")) is a
    assert choose([a, b], {"c": 1}, "", Path("/there")) is b
    assert choose([a, b], {}, "a", Path("/there")) is a


@pytest.mark.parametrize(
    ("homes", "held", "name", "sentence"),
    [
        ([], {}, "", r"There is no cluster to attach to: ranks .* %ddp_start --detach 600"),
        ([], {}, "x", r"There is no cluster x to attach to: ranks .* %ddp_start --detach 600"),
        (["/here"], {}, "x", r"There is no cluster 'x' to attach to; choose one of: c0"),
        (["/here", "/here"], {}, "", r"2 clusters wait .*--attach NAME: c0 \(.* in /here\); c1 \("),
        (["/a", "/b"], {}, "", r"2 clusters wait .* in /a\); c1 \("),
        ([], {"x": 12}, "", r"The cluster x is in use by another kernel, process 12: shut"),
        (["/here"], {"x": 12}, "x", r"The cluster x is in use by another kernel, process 12: shut"),
    ],
)
def test_where_there_is_doubt_one_sentence_names_the_choice(
    homes: list[str], held: dict[str, int], name: str, sentence: str
):
    waiting = [record(f"c{n}", home) for n, home in enumerate(homes)]
    with pytest.raises(UserError, match=sentence) as error:
        choose(waiting, held, name, Path("/here"))
    assert "\n" not in str(error.value)


def test_what_another_version_has_written_is_not_attached_to():
    with detachable_cluster() as cluster:
        assert cluster.folder in [record.folder for record in detached()]
        path = cluster.folder / "cluster.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"new": 1}))
        assert cluster.folder not in [record.folder for record in detached()]
        cluster.stop()
