import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from ddpnb.cluster.call import CallEvent, Lost, Output
from ddpnb.cluster.cluster import Cluster
from ddpnb.protocol.errors import UserError
from tests.cluster import rig

IMPORTS = """
import time, torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
"""


@pytest.fixture
def unharmed(cluster: Cluster) -> Iterator[Cluster]:
    """Two ranks that must still sum and must have kept their variables after the test."""
    rig.run(cluster, f"{IMPORTS}\nkept = rank")
    yield cluster
    assert rig.total(cluster) == [2.0, 2.0]
    assert rig.pull(cluster, "kept") == [0, 1]


def test_a_rank_that_only_computes_goes_on_when_another_has_failed(cluster: Cluster):
    cell = rig.run(
        cluster, "if rank == 1: 1/0\nimport time\nfor _ in range(50): time.sleep(.1)\nx = 5"
    )
    assert set(cell.failures) == {1}
    assert cell.notes == [
        "Rank 1 failed: ZeroDivisionError: division by zero; rank 0 is still running. "
        "Interrupt the cell to stop it."
    ]
    assert rig.pull(cluster, "x", ranks=[0]) == [5]


def test_a_failure_of_some_ranks_alone_leaves_the_group(cluster: Cluster):
    rig.run(cluster, rig.ALL_REDUCE + "generation = id(dist.group.WORLD)")
    assert set(rig.run(cluster, "1/0", ranks=[0]).failures) == {0}
    assert set(rig.run(cluster, "1/0").failures) == {0, 1}
    rig.run(cluster, rig.ALL_REDUCE)
    assert rig.pull(cluster, "id(dist.group.WORLD) == generation") == [True, True]


LOOP = "print('begun')\nwhile True: time.sleep(0.01)"
STUBBORN = "print('begun')\ntry: time.sleep(1000)\nexcept KeyboardInterrupt: time.sleep(1000)"


@pytest.mark.parametrize("source", [LOOP, STUBBORN], ids=["loop", "caught once"])
def test_an_interrupt_reaches_every_rank(unharmed: Cluster, source: str):
    cell = rig.begin(unharmed, source)
    rig.stop_when(lambda: len(cell.printed) == 2, cell)
    assert set(cell.failures) == {0, 1}
    assert "KeyboardInterrupt" in {failure.name for failure in cell.failures.values()}
    assert cell.seconds < 20


@pytest.mark.parametrize("part", ["handle", "tick"])
def test_what_fails_in_the_kernel_stops_the_ranks_and_is_raised(unharmed: Cluster, part: str):
    def fail(*_: object) -> None:
        raise ZeroDivisionError

    cell = rig.begin(unharmed, LOOP)
    setattr(cell.watch, part, fail)
    with pytest.raises(ZeroDivisionError):
        rig.finish(cell)
    assert cell.watch.call.done
    assert {failure.name for failure in cell.failures.values()} == {"KeyboardInterrupt"}


def test_an_interrupt_also_stops_what_the_cell_waits_behind(unharmed: Cluster):
    first = rig.begin(unharmed, LOOP, ranks=[0])
    second = rig.stop_when(lambda: first.watch.call.inbox.qsize() > 0, rig.begin(unharmed, LOOP))
    rig.finish(first)
    assert set(first.failures) == {0}
    assert set(second.failures) == {0, 1}
    assert second.seconds < 20


def test_an_interrupt_loses_no_message_at_whatever_moment_it_comes(unharmed: Cluster):
    for _ in range(10):
        unharmed.interrupt(unharmed.ranks)
    for delay_ms in range(30):
        cell = rig.begin(unharmed, "x = 1")
        time.sleep(delay_ms / 4000)  # each interrupt comes at another moment
        unharmed.interrupt(unharmed.ranks)
        cell.watch.timeout = 30.0
        rig.finish(cell)
        assert not cell.lost
        assert not cell.watch.timed_out
        assert {failure.name for failure in cell.failures.values()} <= {"KeyboardInterrupt"}


WITHOUT_LINE = """def between(): {statement}
between.__code__ = between.__code__.replace(co_linetable=b"\\xff" * 9)
if rank: between()"""
"""Fails at an instruction without a line number. An interrupt can come at such a moment."""


def test_an_error_between_two_lines_is_shown_as_any_other(cluster: Cluster):
    cell = rig.run(cluster, WITHOUT_LINE.format(statement="raise KeyboardInterrupt"))
    assert not cell.lost  # although IPython cannot format the traceback
    (failure,) = cell.failures.values()
    assert (failure.name, failure.line) == ("KeyboardInterrupt", 3)
    assert failure.traceback[-1] == failure.name
    assert not cell.printed


@pytest.fixture
def mortal(cluster: Cluster) -> Iterator[Cluster]:
    """Two living ranks for a test that ends rank 1."""
    yield cluster
    assert cluster.living == (0,)


def test_a_killed_rank_is_reported_at_once_and_the_others_keep_their_state(
    mortal: Cluster, tmp_path: Path
):
    sign = tmp_path / "sign"
    rig.run(mortal, f"{IMPORTS}\nkept = rank + 10")
    seen: list[CallEvent] = []

    def take(event: CallEvent) -> None:
        seen.append(event)
        if isinstance(event, Lost):  # while rank 0 still runs
            sign.touch()

    cell = rig.begin(
        mortal,
        f"print('begun')\nif rank: time.sleep(1000)\n{rig.waits_for(sign)}after = 'went on'",
        on_event=take,
    )

    def kill() -> None:
        rig.wait_until(lambda: len(cell.printed) == 2, "both ranks to begin")
        os.kill(mortal.states[1].pid, signal.SIGKILL)

    threading.Thread(target=kill).start()
    rig.finish(cell)
    lost = next(event for event in seen if isinstance(event, Lost))
    assert (lost.rank, lost.cause) == (1, "was killed by SIGKILL")
    assert cell.seconds < 40, "the death was reported only after the wait"
    assert not cell.failures
    assert rig.pull(mortal, "kept, after", ranks=[0]) == [(10, "went on")]


@pytest.mark.parametrize(
    ("source", "kinds"),
    [
        ("x = 1", set()),
        ("print('here', end='')", {"stream"}),
        ("import sys; _ = sys.stderr.write('here')", {"stream"}),
        ("1 + 1", {"execute_result"}),
        ("display(1)", {"display_data"}),
        ("import contextlib, io\nwith contextlib.redirect_stdout(io.StringIO()): print(1)", set()),
    ],
)
def test_no_output_is_lost(cluster: Cluster, source: str, kinds: set[str]):
    for _ in range(10):
        found: dict[int, set[str]] = {rank: set() for rank in cluster.ranks}

        def note(event: CallEvent, found: dict[int, set[str]] = found) -> None:
            if isinstance(event, Output):
                found[event.rank].add(event.kind)

        rig.run(cluster, source, on_event=note)
        assert found == dict.fromkeys(cluster.ranks, kinds)


def test_what_is_printed_comes_while_the_cell_runs_and_none_of_it_is_lost(
    cluster: Cluster, tmp_path: Path
):
    sign, seen = tmp_path / "sign", set()

    def take(event: CallEvent) -> None:
        if isinstance(event, Output):
            seen.add(event.rank)
            if seen == {0, 1}:  # both ranks wait for this file
                sign.touch()

    cell = rig.begin(
        cluster,
        f"print('first')\n{rig.waits_for(sign)}print('x' * 400_000)\nprint('last')",
        on_event=take,
    )
    rig.finish(cell)
    assert cell.seconds < 40, "the output arrived only after the wait"
    for text in cell.printed.values():
        assert text == "first\n" + "x" * 400_000 + "\nlast\n"


def test_a_rank_that_dies_before_a_new_group_is_formed_costs_the_others_nothing(mortal: Cluster):
    rig.run(mortal, "import torch, torch.distributed as dist\nkept = rank + 10")
    assert rig.run(mortal, "if rank != 1: dist.barrier()").hang
    stopped = psutil.Process(mortal.states[1].pid)
    stopped.suspend()  # the rank dies while the other rank forms the group
    threading.Timer(1.0, stopped.kill).start()
    began = time.monotonic()
    with pytest.raises(UserError, match=r"killed by SIGKILL\. Run %ddp_restart --ranks 1"):
        rig.run(mortal, rig.ALL_REDUCE)
    assert time.monotonic() - began < 10
    assert rig.pull(mortal, "kept", ranks=[0]) == [10]
