from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import pytest

from ddpnb.cluster.cluster import Cluster
from ddpnb.cluster.link import Exit
from ddpnb.cluster.placement import ClusterSpec
from ddpnb.protocol.cell_messages import CellReport, Failure
from ddpnb.session.errors import (
    CellInterrupt,
    CellTimeoutError,
    RankError,
    render_error,
    render_failures,
    where_stopped,
)


def failure(
    rank: int, name: str = "ValueError", text: str = "bad", *, at: float = 0.0, **more: object
) -> Failure:
    trace = more.pop("traceback", (f"Cell In[3], line 2\n{name}: {text}",))
    return Failure(rank=rank, name=name, text=text, failed_at=at, traceback=trace, **more)


GLOO = "[gloo] Connection closed by peer [127.0.0.1]:4242"


def closed(rank: int, at: float) -> Failure:
    return failure(rank, "RuntimeError", GLOO, at=at, is_consequence=True)


def lost(rank: int, text: str = "was killed by SIGKILL", **more: object) -> Failure:
    return failure(rank, "RankLost", text, is_death=True, **more)


def remedy(dead: Collection[int]) -> str:
    """Return the advice of a cluster of eight ranks, some of which are dead."""
    cluster = Cluster(ClusterSpec(), Path("/"))
    cluster.is_over = True  # no process has created a run folder
    cluster._states = dict.fromkeys(range(8))
    cluster.exits = {rank: Exit(member=rank, code=-9) for rank in dead}
    return cluster.remedy(dead)


CANCELLED = "was lost with host n1: job 12 of Slurm has ended (CANCELLED)"
SENTENCES = [
    ([failure(1)], "rank 1 failed: ValueError: bad", "ValueError on rank 1 (bad)"),
    ([failure(0, text="")], "rank 0 failed: ValueError: ", "ValueError on rank 0"),
    (
        [failure(0), failure(1)],
        "ranks 0-1 failed: ValueError: bad",
        "ValueError on ranks 0-1 (bad)",
    ),
    (  # the root cause is named first, even if a consequence was earlier
        [closed(0, at=1.0), failure(2, at=2.0), closed(1, at=1.5)],
        "rank 2 failed first: ValueError: bad",
        "ValueError on rank 2 (bad)",
    ),
    (  # the earlier of two causes is named first
        [failure(0, text="late", at=2.0), failure(1, text="early", at=1.0)],
        "rank 1 failed first: ValueError: early",
        "ValueError on rank 1 (early)",
    ),
    (
        [lost(1), closed(0, 2)],
        "rank 1 was killed by SIGKILL. Run %ddp_restart --ranks 1 to restart it.",
        "rank 1 was killed by SIGKILL",
    ),
    (
        [lost(1), lost(0)],
        "ranks 0-1 were killed by SIGKILL. Run %ddp_restart --ranks 0-1 to restart them.",
        "rank 1 was killed by SIGKILL",
    ),
    (  # one job's end lost all its ranks
        [lost(0, CANCELLED), lost(1, CANCELLED)],
        f"ranks 0-1 were {CANCELLED.removeprefix('was ')}. ",
        f"rank 0 {CANCELLED}",
    ),
]
"""Failures, the beginning of their sentence, and the stored cause, which has no advice."""


@pytest.mark.parametrize(("failures", "sentence", "cause"), SENTENCES)
def test_the_sentence_names_the_cause(failures: list[Failure], sentence: str, cause: str):
    error = RankError(failures, remedy)
    assert str(error).startswith(sentence)
    assert error.cause == cause
    assert error._render_traceback_()[0].startswith(
        f"RankError: {sentence.replace(' first:', ':')}"
    )


BAD, LINE = "rank 1 failed: ValueError: bad", "Cell In[3], line 2"
RELEASED = "released from a collective that needs the failed rank)"
STOPPED = "stopped because another rank had failed)"
BACK = "The other ranks keep their variables."
MISMATCH = "CollectiveMismatchError"
LAYOUTS = [
    (  # identical failures are shown once, even if their colours differ
        [
            failure(0, traceback=("\x1b[31mline 2\x1b[39m", "bad")),
            failure(1, traceback=("line 2", "bad")),
            failure(3, traceback=("line 2", "\x1b[0mbad")),
        ],
        ["ranks 0-1,3 failed: ValueError: bad", "\x1b[31mline 2\x1b[39m", "bad"],
    ),
    (
        [failure(0, text="a"), failure(1, text="b"), failure(2, text="a")],
        [
            "ranks 0,2 failed: ValueError: a",
            LINE,
            "",
            "RankError: rank 1 failed: ValueError: b",
            LINE,
        ],
    ),
    (  # the sentence replaces the traceback's last line
        [failure(1, traceback=("line 2", "", "\x1b[31mValueError\x1b[39m: bad"))],
        [BAD, "line 2"],
    ),
    (
        [failure(1), closed(0, 2), closed(2, 3)],
        [BAD, LINE, "", f"(ranks 0,2 were {RELEASED}"],
    ),
    (
        [failure(1), closed(0, 2), replace(closed(2, 3), was_waiting=False)],
        [BAD, LINE, "", f"(rank 0 was {RELEASED}", f"(rank 2 was {STOPPED}"],
    ),
    (  # if all failures are consequences, one is shown in full
        [closed(0, 1), closed(1, 2)],
        [f"rank 0 failed: RuntimeError: {GLOO}", LINE, "", f"(rank 1 was {RELEASED}"],
    ),
    (
        [
            lost(1, traceback=("log of 1",)),
            lost(0, "has ended with code 3", traceback=("log of 0",)),
        ],
        [
            "rank 1 was killed by SIGKILL; rank 0 has ended with code 3. "
            f"Run %ddp_restart --ranks 0-1 to restart them. {BACK}",
            *("log of 1", "log of 0"),
        ],
    ),
    (
        [failure(rank, MISMATCH, f"{rank} and 1", breaks_group=True) for rank in (0, 2)],
        [f"ranks 0,2 failed: {MISMATCH}: 0 and 1", LINE],
    ),
]


@pytest.mark.parametrize(("failures", "lines"), LAYOUTS)
def test_each_failure_is_shown_once_and_what_followed_is_a_line(failures, lines):
    assert render_failures(failures, remedy) == [f"RankError: {lines[0]}", *lines[1:]]


def test_a_timeout_and_an_interrupt_are_one_line():
    found = [
        failure(0, "KeyboardInterrupt", line=4),
        failure(1, "RuntimeError", line=6, is_consequence=True),
        None,
        failure(3, "KeyboardInterrupt", line=4),
        failure(4, "KeyboardInterrupt"),
        failure(5, "ZeroDivisionError", line=2),
    ]
    stopped = {rank: CellReport(failure=each) for rank, each in enumerate(found)}
    where = where_stopped(stopped)
    assert where == (
        " (ranks 0,3 in line 4, rank 1 in line 6, rank 2 had finished, "
        "rank 5 had failed: ZeroDivisionError)"
    )
    assert where_stopped({rank: stopped[rank] for rank in (2, 4)}) == ""
    (line,) = CellTimeoutError(2.5, where, lambda: "Kept.")._render_traceback_()
    assert "2.5 s" in line
    assert where in line
    error = CellInterrupt(lambda: "Kept.")
    assert isinstance(error, KeyboardInterrupt)
    assert render_error(OSError("plain")) == "OSError('plain')"
    assert error._render_traceback_() == ["KeyboardInterrupt: The ranks have stopped. Kept."]


def test_advice_is_for_the_ranks_that_are_dead_when_it_is_shown():
    dead: list[int] = [2]
    error = RankError([lost(2)], lambda _: remedy(dead))
    assert "Run %ddp_restart --ranks 2 to restart it. The other" in str(error)
    dead.append(5)
    assert "Run %ddp_restart --ranks 2,5 to restart them. The other" in str(error)
    dead.clear()
    assert "ddpnb has restarted" in str(error)
    dead += range(8)
    assert str(error).endswith("Run %ddp_restart --ranks 0-7 to restart them.")
