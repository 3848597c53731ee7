"""A rank's death is reported with its cause, and the other ranks keep their variables."""

import os
import signal

import pytest

from ddpnb.cluster.cluster import Cluster
from ddpnb.cluster.group import ensure_group
from ddpnb.protocol.processes import process_log
from ddpnb.session.errors import failures_of
from tests.cluster.rig import begin, finish, run, wait_until

SAY = """
import ctypes, signal
from pathlib import Path
def say(words):
    os.write(2, words)
    deadline = time.monotonic() + 30
    while words not in Path({log!r}).read_bytes() and time.monotonic() < deadline:
        time.sleep(0.01)
"""
"""Writes like native code does, and returns when the words have reached the rank's log."""

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
    "preemption": ("os.kill(os.getpid(), signal.SIGTERM)", "was killed by SIGTERM", ""),
}


@pytest.mark.parametrize(("source", "cause", "words"), DEATHS.values(), ids=DEATHS)
def test_a_death_is_reported_with_its_cause_and_last_words(
    three: Cluster, source: str, cause: str, words: str
) -> None:
    run(three, "os.write(2, b'words of an older cell\\n')")
    say = SAY.format(log=str(process_log(three.folder, 1)))
    cell = run(three, f"{say}if rank == 1:\n    {source}\ndist.barrier()")
    assert cell.lost == {1: cause}
    assert {rank for rank, failure in cell.failures.items() if failure.is_consequence} == {0, 2}
    (found,) = (failure for failure in failures_of(cell.watch) if failure.rank == 1)
    said = "\n".join(found.traceback)
    assert words in said
    assert "older" not in said
    assert ("Segmentation" in said) == (cause == "was killed by SIGSEGV"), "only for this cause"
    assert cell.seconds < 20


PRINTING = "for i in range(20_000): print(i)"
HANDLED = """
import signal
signal.signal(signal.SIGTERM, lambda *_: print("saved"))
os.kill(os.getpid(), signal.SIGTERM)
print("went on")
signal.signal(signal.SIGTERM, signal.SIG_DFL)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("killed", [(1,), (0, 2), (0, 1, 2)])
def test_ranks_that_are_killed_while_they_print_are_all_named(three: Cluster, number, killed):
    cell = begin(three, PRINTING)
    for rank in killed:
        os.kill(three.states[rank].pid, number)
    finish(cell)
    assert cell.lost == dict.fromkeys(killed, f"was killed by {number.name}")


def test_a_handler_of_a_cell_takes_precedence(three: Cluster):
    cell = run(three, HANDLED, ranks=[1])
    assert (cell.lost, cell.printed) == ({}, {1: "saved\nwent on\n"})


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_rank_that_dies_while_a_call_is_sent_is_named(three: Cluster, monkeypatch, number):
    """The rank is alive when ddpnb looks, and dead before the call is noted."""
    submit = three.client.submit

    def submit_late(*arguments):
        os.kill(three.states[2].pid, number)
        wait_until(lambda: 2 in three.exits, "the rank's death")
        return submit(*arguments)

    ensure_group(three)
    monkeypatch.setattr(three.client, "submit", submit_late)
    cell = begin(three, "kept")
    monkeypatch.undo()
    assert finish(cell).lost == {2: f"was killed by {number.name}"}
