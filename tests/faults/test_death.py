"""A rank's death is reported with its cause, and the other ranks keep their variables."""

import pytest

from ddpnb.cluster.cluster import Cluster
from ddpnb.protocol.processes import process_log
from ddpnb.session.errors import failures_of
from tests.cluster.rig import run

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
    (found,) = (failure for failure in failures_of(three, cell.watch.outcome) if failure.rank == 1)
    said = "\n".join(found.traceback)
    assert words in said
    assert "older" not in said
    assert ("Segmentation" in said) == (cause == "was killed by SIGSEGV"), "only for this cause"
    assert cell.seconds < 20
