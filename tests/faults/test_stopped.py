"""Stopped processes: one rank stopped by SIGSTOP, or all processes of a laptop that sleeps."""

import threading
import time
from dataclasses import replace

import psutil
import pytest

from ddpnb.cluster.cluster import Cluster
from ddpnb.cluster.group import bring_back
from ddpnb.protocol.errors import UserError
from tests.cluster.rig import (
    ALL_REDUCE,
    begin,
    controller_of,
    finish,
    is_alive,
    processes_of,
    run,
    started,
    wait_until,
    wait_until_gone,
)
from tests.faults.conftest import SETUP
from tests.programs import python

LOOP = """
print("begun")
for _ in range({num}):
    dist.all_reduce(torch.ones(10))
    time.sleep(0.01)
"""


@pytest.fixture(autouse=True)
def named_early(three: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    early = replace(three.timeouts, silent_after_seconds=1.0)
    monkeypatch.setattr(three, "timeouts", early)


def test_a_rank_that_keeps_its_threads_waiting_is_named(three: Cluster):
    cell = run(three, "import ctypes\nif rank == 1: ctypes.PyDLL(None).sleep(4)\ndist.barrier()")
    (note,) = cell.notes
    assert note.startswith("Rank 1 ")
    assert not cell.failures
    assert not cell.hang


@pytest.mark.parametrize("is_interrupted", [False, True])
def test_a_cell_that_waits_for_a_stopped_rank_says_so_and_goes_on_or_is_interrupted(
    three: Cluster, is_interrupted: bool
) -> None:
    process = psutil.Process(three.states[1].pid)
    cell = begin(three, LOOP.format(num=10**6 if is_interrupted else 200))
    acted_at: list[float] = []

    def act() -> None:
        wait_until(lambda: len(cell.printed) == 3, "every rank to begin")
        process.suspend()
        wait_until(lambda: bool(cell.notes), "a note (usually 6 s)")
        acted_at.append(time.monotonic())
        if is_interrupted:
            cell.watch.stop_requested = True
        else:
            process.resume()

    threading.Thread(target=act).start()
    finish(cell)
    assert time.monotonic() - acted_at[0] < 20
    assert [note.startswith("Rank 1 ") for note in cell.notes] == [True]
    assert set(cell.failures) == (set(three.ranks) if is_interrupted else set())
    assert not cell.lost
    assert not cell.hang


def test_a_restart_of_a_stopped_rank_keeps_the_others(three: Cluster) -> None:
    process = psutil.Process(three.states[1].pid)
    process.suspend()
    wait_until(lambda: process.status() == psutil.STATUS_STOPPED, "the rank to stop")
    bring_back(three, [1])
    assert not process.is_running()
    assert not run(three, SETUP, ranks=[1]).failures


NOTEBOOK = f"""
from tests.cluster.rig import begin, finish, run, started
from tests.faults.conftest import SETUP, check_they_go_on
with started(2) as cluster:
    run(cluster, SETUP)
    cell = begin(cluster, {LOOP.format(num=100)!r}, timeout=60)
    print("begun", flush=True)
    finish(cell)
    assert not cell.hang, cell.hang
    assert not cell.failures, cell.failures
    assert not cell.notes, cell.notes
    check_they_go_on(cluster)
print("fine", flush=True)
"""


def test_all_processes_may_sleep_and_wake_up() -> None:
    """All processes sleep if you close a laptop while a cell runs."""
    with python(NOTEBOOK) as (notebook, line):
        assert line == "begun\n"
        time.sleep(0.4)  # the cell is running
        tree = [psutil.Process(notebook.pid)]
        tree += tree[0].children(recursive=True)
        assert len(tree) >= 5  # the notebook, the fork server, the controller, two ranks
        for process in tree:
            process.suspend()
        time.sleep(3)  # longer than ranks may wait for each other awake
        for process in tree:
            process.resume()
        assert notebook.stdout.readline() == "fine\n"


PROGRAM = "import subprocess; subprocess.Popen(['sleep', '1000'], start_new_session=True)"


def test_a_cluster_with_a_stopped_rank_can_be_stopped_even_if_its_fork_server_is_killed() -> None:
    with started(1) as cluster:
        run(cluster, PROGRAM)
        server, *others = processes_of(cluster)
        controller = controller_of(cluster)
        psutil.Process(cluster.states[0].pid).suspend()

        def kill() -> None:
            wait_until(lambda: not is_alive(controller), "the stop to begin")
            server.kill()

        threading.Thread(target=kill).start()
        cluster.stop()
        wait_until_gone(others, timeout=5)
        assert not cluster.folder.exists()


def test_a_cluster_with_a_stopped_service_names_the_restart_that_helps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ddpnb.cluster.supervision.END_TIMEOUT_SECONDS", 1.0)
    with started(3) as cluster:
        cluster.timeouts = replace(cluster.timeouts, kill_after_seconds=1.0)
        controller = controller_of(cluster)
        controller.suspend()
        with monkeypatch.context() as patch:
            patch.setattr("ddpnb.cluster.client.START_TIMEOUT_SECONDS", 1.0)
            advice = r"restart it again, or %ddp_restart to restart all"
            with pytest.raises(UserError, match=advice):
                bring_back(cluster, [2])
        controller.resume()
        wait_until(lambda: not cluster.starting, "rank 2")
        server, *others = processes_of(cluster)
        server.suspend()
        cell = begin(cluster, "import time; time.sleep(1000)")
        cell.watch.stop_requested = True
        finish(cell)
        with pytest.raises(UserError, match=r"ended: ranks 0-2 do not end,.* Run %ddp_restart to"):
            run(cluster, "1")
        server.resume()
        wait_until(lambda: cluster.dead == (0, 1, 2), "the end of the killed ranks")
        assert cluster.lost is None
        assert not bring_back(cluster, [0, 1, 2])
        assert not run(cluster, ALL_REDUCE).failures
        server.suspend()
        cluster.stop()
        assert not [process for process in (server, *others) if is_alive(process)]
