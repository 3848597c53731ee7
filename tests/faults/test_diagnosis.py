"""ddpnb names and releases ranks that would wait forever, and leaves slow cells running."""

import re
from dataclasses import replace

import pytest

from ddpnb.cluster.cluster import Cluster
from tests.cluster.rig import FORKS, run

HANGS = {
    "a rank skips an all_reduce": (
        "if rank != 1: dist.all_reduce(x)",
        r"ranks 0,2 wait in all_reduce \(line 1.*rank 1 finished the cell without making this call",
    ),
    "a rank is left out of a barrier": (
        "if rank != 2: dist.barrier()",
        r"ranks 0-1 wait in barrier \(line 1\); rank 2 finished the cell without making this call",
    ),
    "recv without send": (
        "if rank == 1: dist.recv(x, 0)",
        r"rank 1 waits in recv from rank 0 \(line 1\); rank 0 has finished .* without sending",
    ),
    "recv from a rank that receives": (
        "if rank < 2: dist.recv(x, 1 - rank)",
        r"rank 0 waits in recv from rank 1.*rank 1 waits in recv from rank 0.*is not sending",
    ),
    "send of what nobody takes": (
        "if rank == 0: dist.send(torch.ones(30_000_000), 2)",
        r"rank 0 waits in send to rank 2 \(line 1\); rank 2 has finished .* without receiving",
    ),
    "one batch fewer": (
        "net = DDP(nn.Linear(3, 2))\n"
        "for batch in range(4 if rank else 3): net(torch.ones(1, 3)).sum().backward()",
        r"ranks 1-2 wait in all_reduce of the backward pass \(line 2.*rank 0 .* fewer batches",
    ),
    "a function of an earlier cell": (
        "synchronise(x) if rank else None",
        r"ranks 1-2 wait in all_reduce \(line 2.*rank 0 finished",
    ),
    "a sub-group that one member does not use": (
        "pair = dist.new_group([0, 1])\nif rank == 0: dist.all_reduce(x, group=pair)",
        r"rank 0 waits in all_reduce \(line 2.*ranks 1-2 finished",
    ),
}

HONEST = {
    "sleeps before the call": "if rank == 0: time.sleep(1)\ndist.all_reduce(x)",
    "computes before the call": (
        "end = time.monotonic() + 1\n"
        "while rank == 1 and time.monotonic() < end: torch.ones(300, 300) @ torch.ones(300, 300)\n"
        "dist.barrier()"
    ),
    "loads data slowly": (
        "class Slow(torch.utils.data.Dataset):\n"
        "    def __len__(self): return 4\n"
        "    def __getitem__(self, i): time.sleep(.25 if rank == 0 else 0); return i\n"
        "for _ in torch.utils.data.DataLoader(Slow(), num_workers=1): dist.all_reduce(x)"
    ),
    "an open asynchronous call while it sleeps": (
        "work = dist.all_reduce(x, async_op=True) if rank else None\n"
        "time.sleep(1)\n"
        "work = work or dist.all_reduce(x, async_op=True)\n"
        "work.wait()"
    ),
    "many small calls": (
        "end = time.monotonic() + 1\n"
        "go_on = torch.ones(1)\n"
        "while go_on.item():\n"
        "    go_on.fill_(float(time.monotonic() < end))\n"
        "    dist.broadcast(go_on, 0)"
    ),
}

LARGE_CALLS = "big = torch.ones(20_000_000)\nfor _ in range(6): dist.all_reduce(big)"
"""On a busy machine these ranks look idle for longer than an eighth of the usual timeout."""


@pytest.mark.parametrize("case", HANGS)
def test_a_cell_that_would_wait_for_ever_is_named_and_freed(quick: Cluster, case: str) -> None:
    check_is_named_and_freed(quick, *HANGS[case])


def test_with_the_usual_timeouts_too(three: Cluster) -> None:
    check_is_named_and_freed(three, *HANGS["a rank skips an all_reduce"])
    check_is_left_alone(three, "if rank == 0: time.sleep(4)\ndist.all_reduce(x)")
    check_is_left_alone(three, LARGE_CALLS)


def check_is_named_and_freed(cluster: Cluster, source: str, expected: str) -> None:
    ended = run(cluster, source)
    assert re.search(expected, ended.hang, re.DOTALL), ended.hang
    assert not ended.lost
    assert ended.seconds < 15, "usually 6 s, longer on a busy machine"


def test_a_rank_that_cannot_be_freed_is_ended_and_brought_back(quick: Cluster) -> None:
    ended = run(quick, "if rank == 1: dist.new_group([0, 1])")
    assert re.search(r"rank 1 waits in new_group \(line 1.*ranks 0,2 fini", ended.hang)
    assert list(ended.lost) == [1]


SLOW_TO_LEAVE = """
import sys
def be_slow(frame, event, _):
    if event == "return" and frame.f_code.co_name == "all_reduce":
        sys.setprofile(None)
        time.sleep(.625)
sys.setprofile(be_slow if rank else None)
if rank: dist.all_reduce(x)
"""


def test_a_freed_rank_that_is_slow_to_leave_its_call_lives_on(quick: Cluster) -> None:
    """A rank can be this slow on a busy machine."""
    ended = run(quick, SLOW_TO_LEAVE)
    assert not ended.lost
    assert sorted(ended.failures) == [1, 2]
    assert ended.seconds > 0.625


@pytest.mark.parametrize(
    "case", [pytest.param(each, marks=FORKS if "data" in each else ()) for each in HONEST]
)
def test_a_slow_cell_is_left_alone(quick: Cluster, case: str, monkeypatch) -> None:
    patient = replace(quick.timeouts, hang_after_seconds=0.6)  # for a busy machine
    monkeypatch.setattr(quick, "timeouts", patient)
    check_is_left_alone(quick, HONEST[case])


def check_is_left_alone(cluster: Cluster, source: str) -> None:
    ended = run(cluster, source)
    assert not ended.hang
    assert not ended.failures, ended.failures
