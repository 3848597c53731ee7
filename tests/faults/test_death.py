"""Ranks that die, and mistakes that look like it: named rightly, at once; the others keep all."""

import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest

from ddpnb.cluster.cluster import Cluster
from ddpnb.session.cells import failures_of
from tests.cluster.rig import begin, finish, pull, run, started, wait_until

SETUP = "import ctypes, os, time\nimport torch, torch.distributed as dist\nkept = rank + 10"
SAY = """
from pathlib import Path
def say(words):
    os.write(2, words)
    deadline = time.monotonic() + 30
    while words not in Path({log!r}).read_bytes() and time.monotonic() < deadline:
        time.sleep(0.01)
"""
"""Writes as native code does; returns when the words have reached the rank's log."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with started(3) as cluster:
        yield cluster


DEATHS = {
    "segmentation fault": ("ctypes.string_at(0)", "was killed by SIGSEGV", "in string_at"),
    "abort in native code": (
        "say(b'terminate called: what() 7\\n'); ctypes.CDLL(None).abort()",
        "was killed by SIGABRT",
        "terminate called: what() 7",
    ),
    "exit": (
        "say(b'out of licences\\n'); os._exit(3)",
        "ended with exit code 3",
        "out of licences",
    ),
    "out of memory": ("os.kill(os.getpid(), signal.SIGKILL)", "was killed by SIGKILL", ""),
}


@pytest.mark.parametrize("death", DEATHS)
def test_a_death_is_reported_with_its_cause_and_last_words(cluster: Cluster, death: str) -> None:
    source, cause, words = DEATHS[death]
    run(cluster, SETUP + SAY.format(log=str(cluster.folder / "rank-1.log")))
    cell = run(cluster, f"import signal\nif rank == 1:\n    {source}\ndist.barrier()")
    assert cell.lost == {1: cause}
    assert {rank for rank, failure in cell.failures.items() if failure.is_consequence} == {0, 2}
    (found,) = (failure for failure in failures_of(cell.watch) if failure.rank == 1)
    said = "\n".join(found.traceback)
    assert words in said
    assert ("Segmentation" in said) == (cause == "was killed by SIGSEGV"), "of this death alone"
    assert cell.seconds < 20
    cluster.bring_back([1])
    assert pull(cluster, "kept", ranks=[0, 2]) == [10, 12]
    assert not run(cluster, "import torch.distributed as dist\ndist.barrier()").failures


def test_a_killed_rank_is_reported_at_once(cluster: Cluster) -> None:
    """While the others wait for it and it computes: its end is seen, not a missing answer."""
    run(cluster, SETUP)
    cell = begin(
        cluster,
        "print('begun')\nif rank == 2:\n    while True: sum(range(1000))\n"
        "dist.all_reduce(torch.ones(1))",
    )
    killed: list[float] = []

    def kill() -> None:
        wait_until(lambda: len(cell.printed) == 3, "every rank to begin")
        killed.append(time.monotonic())
        os.kill(cluster.states[2].pid, signal.SIGKILL)

    threading.Thread(target=kill).start()
    finish(cell)
    assert cell.lost == {2: "was killed by SIGKILL"}
    assert time.monotonic() - killed[0] < 10
    cluster.bring_back([2])
    assert pull(cluster, "kept", ranks=[0, 1]) == [10, 11]
    assert not run(cluster, "import torch.distributed as dist\ndist.barrier()").failures


def test_too_little_memory_is_an_ordinary_error(cluster: Cluster) -> None:
    run(cluster, SETUP)
    cell = run(cluster, "if rank == 1: torch.empty(10**15)\ndist.barrier()")
    assert not cell.lost
    assert not cell.failures[1].is_consequence
    assert not run(cluster, "dist.barrier()").failures
    assert pull(cluster, "kept") == [10, 11, 12]
