"""Processes that are stopped: one rank by SIGSTOP, or all of them as with a laptop that sleeps."""

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import psutil
import pytest

from ddpnb.cluster.cluster import Cluster
from ddpnb.session.status import status_table
from tests.cluster.rig import begin, finish, processes_of, pull, run, started, wait_until

SETUP = "import time, torch, torch.distributed as dist\nkept = rank + 10"
LOOP = """
print("begun")
for _ in range({num}):
    dist.all_reduce(torch.ones(10))
    time.sleep(0.01)
"""
ENDLESS = LOOP.format(num=1_000_000)


@pytest.fixture(scope="module")
def three() -> Iterator[Cluster]:
    with started(3) as cluster:
        run(cluster, SETUP)
        yield cluster


@pytest.fixture
def stopped(three: Cluster) -> Iterator[psutil.Process]:
    """Rank 1's process; it goes on at the end whatever a test has done."""
    process = psutil.Process(three.states[1].pid)
    yield process
    if process.is_running():
        process.resume()


def test_a_rank_that_keeps_its_threads_waiting_is_named(three: Cluster, monkeypatch):
    early = replace(three.timeouts, silent_after_seconds=1.0)
    monkeypatch.setattr(three, "timeouts", early)
    cell = run(three, "import ctypes\nif rank == 1: ctypes.PyDLL(None).sleep(4)\ndist.barrier()")
    (note,) = cell.notes
    assert note.startswith("Rank 1 ")
    assert not cell.failures
    assert not cell.watch.hang


def stop_once_begun(cell, process: psutil.Process) -> None:
    def stop() -> None:
        wait_until(lambda: len(cell.printed) == 3, "every rank to begin")
        process.suspend()

    threading.Thread(target=stop).start()


def do_once_notified(cell, do) -> list[float]:
    """Do something as soon as the user is notified; return when that was."""
    notified_at: list[float] = []

    def wait() -> None:
        wait_until(lambda: bool(cell.notes), "a note", timeout=60)
        notified_at.append(time.monotonic())
        do()

    threading.Thread(target=wait).start()
    return notified_at


def test_a_cell_that_waits_for_a_stopped_rank_says_so_and_goes_on_with_it(
    three: Cluster, stopped: psutil.Process
) -> None:
    cell = begin(three, LOOP.format(num=400))
    began = time.monotonic()
    stop_once_begun(cell, stopped)
    notified_at = do_once_notified(cell, stopped.resume)
    finish(cell)
    assert [f"kill -CONT {stopped.pid}" in note for note in cell.notes] == [True]
    assert notified_at[0] - began < 30, "found within 6 s; the rest is for a busy machine"
    assert not cell.failures
    assert not cell.watch.hang
    assert pull(three, "kept") == [10, 11, 12]


def test_an_interrupt_ends_a_cell_with_a_stopped_rank_and_keeps_its_variables(
    three: Cluster, stopped: psutil.Process
) -> None:
    cell = begin(three, ENDLESS)
    stop_once_begun(cell, stopped)
    interrupted_at = do_once_notified(cell, lambda: setattr(cell.watch, "stop_requested", True))
    finish(cell)
    assert time.monotonic() - interrupted_at[0] < 20
    assert set(cell.failures) == {0, 1, 2}
    assert not cell.lost
    assert not run(three, LOOP.format(num=2)).failures
    assert pull(three, "kept") == [10, 11, 12]


def test_a_restart_of_a_stopped_rank_keeps_the_others(
    three: Cluster, stopped: psutil.Process
) -> None:
    stopped.suspend()
    wait_until(lambda: three.processes.stopped_members == {1}, "the signal to be reported")
    (note,) = status_table(three, ()).notes
    assert f"kill -CONT {stopped.pid}" in note
    three.bring_back([1])
    assert not stopped.is_running()
    run(three, SETUP, ranks=[1])
    assert not run(three, LOOP.format(num=2)).failures
    assert pull(three, "kept") == [10, 11, 12]


NOTEBOOK = """
import sys, time
from tests.cluster.rig import begin, finish, pull, run, started
with started(2) as cluster:
    run(cluster, {setup!r})
    cell = begin(cluster, {source!r}, timeout=60)
    print("begun", flush=True)
    finish(cell)
    again = run(cluster, {source!r}, timeout=60)
    for one in (cell, again):
        assert not one.watch.hang, one.watch.hang
        assert not one.failures, one.failures
        assert not one.notes, one.notes
        assert not one.watch.timed_out
    assert pull(cluster, "kept") == [10, 11]
print("fine", flush=True)
"""


def test_all_processes_may_sleep_and_wake_up() -> None:
    """As when a laptop is closed in the midst of a cell."""
    script = NOTEBOOK.format(setup=SETUP, source=LOOP.format(num=100))
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True
    ) as notebook:
        assert notebook.stdout is not None
        assert notebook.stdout.readline() == "begun\n"
        time.sleep(0.4)  # in the midst of it
        tree = [psutil.Process(notebook.pid)]
        tree += tree[0].children(recursive=True)
        assert len(tree) >= 5  # the notebook, the fork server, the controller, two ranks
        for process in tree:
            process.suspend()
        time.sleep(5)  # longer than ranks may wait for each other
        for process in tree:
            process.resume()
        assert notebook.stdout.readline() == "fine\n"


def test_a_cluster_with_a_stopped_rank_can_be_stopped() -> None:
    with started(2) as cluster:
        processes = processes_of(cluster)
        psutil.Process(cluster.states[1].pid).suspend()
        cluster.stop()
        assert not [process for process in processes if process.is_running()]
