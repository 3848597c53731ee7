"""Collectives that do not match are refused before gloo ends a process; the others are not."""

import re
import time
from collections.abc import Iterator

import pytest

from ddpnb.cluster.call import Timeouts
from ddpnb.cluster.cluster import Cluster
from tests.cluster.rig import DYNAMO, EIGHTH, run, run_on_each, started

SETUP = """
import threading, time
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
x = torch.ones(3)
kept = 10 * rank
net = DDP(nn.Linear(3, 2))  # its first import takes a second
net(torch.ones(1, 3)).sum().backward()
"""

USABLE = """
assert kept == 10 * rank, kept
total = torch.full((5,), float(rank))
dist.all_reduce(total)
assert total.tolist() == [sum(range(world_size))] * 5
"""

WRONG = {
    "type": (
        "dist.all_reduce(torch.ones(3, dtype=torch.float64 if rank else torch.float32))",
        r"rank 0 calls all_reduce with Float \[3\] .*, but ranks? [12,]+ .* with Double \[3\]",
    ),
    "one rank skips an all_reduce": (
        "if rank: dist.all_reduce(x)\ndist.all_reduce(torch.ones(7))",
        r"rank 0 calls all_reduce with Float \[7\] \(line 2\), "
        r"but ranks? [12,]+ calls? all_reduce with Float \[3\] \(line 1\)",
    ),
    "three ranks in two calls and none": (
        "if rank == 0: dist.barrier()\nelif rank == 1: dist.all_reduce(x)",
        r"rank 0 calls barrier \(line 1\), but rank 1 calls all_reduce with Float \[3\] \(line 2\)",
    ),
    "asynchronous": (
        "work = dist.all_reduce(torch.ones(4 if rank else 3), async_op=True)\nwork.wait()",
        r"rank 0 calls all_reduce with Float \[3\] \(line 1\), but .* with Float \[4\] \(line 1\)",
    ),
}


@pytest.fixture(scope="module")
def both() -> Iterator[list[Cluster]]:
    """Two ranks and three, with something to lose."""
    with started(2, environment=DYNAMO) as two, started(3, environment=DYNAMO) as three:
        assert not any(cell.failures for cell in run_on_each([two, three], SETUP))
        yield [two, three]


@pytest.fixture
def quick(both: list[Cluster]) -> Iterator[list[Cluster]]:
    """The same, supervised with an eighth of the usual timeouts."""
    for cluster in both:
        cluster.timeouts = EIGHTH
    yield both
    for cluster in both:
        cluster.timeouts = Timeouts()


@pytest.mark.parametrize("case", WRONG)
def test_calls_that_do_not_match_are_refused_and_nothing_is_lost(
    quick: list[Cluster], case: str
) -> None:
    source, expected = WRONG[case]
    began = time.monotonic()
    for ended in run_on_each(quick, source):
        named = [f for f in ended.failures.values() if f.name == "CollectiveMismatchError"]
        assert any(re.search(expected, failure.text) for failure in named), ended.failures
        assert all(f in named or f.is_consequence for f in ended.failures.values())
        assert not ended.lost
        assert not ended.watch.hang
    assert time.monotonic() - began < 15, "found within 6 s; the rest is for a busy machine"
    assert not any(again.failures or again.lost for again in run_on_each(quick, USABLE))


def test_a_checked_cell_compares_exact_shapes_too(both: list[Cluster]) -> None:
    ended = run(
        both[1],
        "dist.all_reduce(torch.ones(2, 2) if rank else torch.ones(4))",
        is_checked=True,
    )
    expected = "calls of the ranks do not match|[Mm]ismatch between collectives on ranks"
    assert any(re.search(expected, failure.text) for failure in ended.failures.values())
    assert not ended.lost
    assert not run(both[1], USABLE, is_checked=True).failures
    assert not run(both[1], USABLE).failures


def test_a_group_is_compared_anew_after_it_was_destroyed(both: list[Cluster]) -> None:
    source = (
        "dist.all_reduce(x)\n"
        "dist.destroy_process_group()\n"
        "dist.init_process_group('gloo', rank=rank, world_size=world_size)\n"
        "dist.all_reduce(torch.ones(11))\ndist.barrier()\n"
    )
    assert not any(ended.failures or ended.lost for ended in run_on_each(both, source + USABLE))


def test_the_traceback_ends_at_the_users_line(both: list[Cluster]) -> None:
    ended = run(both[0], "mine = torch.ones(3 + rank)\ndist.all_reduce(mine)")
    (lines,) = {f.traceback for f in ended.failures.values() if not f.is_consequence}
    text = re.sub(r"\x1b\[[\d;]*m", "", "\n".join(lines))
    assert "----> 2 dist.all_reduce(mine)" in text
    assert "distributed_c10d.py" not in text
    assert "intercept.py" not in text


def test_ranks_go_on_where_there_is_no_room_to_compare(both: list[Cluster]) -> None:
    cluster = both[0]
    no_room = "import os\nreal, os.posix_fallocate = os.posix_fallocate, {0}\n"
    refuse = "lambda *_: (_ for _ in ()).throw(OSError(28, 'no space'))"
    source = no_room.format(refuse) + (
        "pair = dist.new_group([0, 1])\ndist.all_reduce(x, group=pair)\nos.posix_fallocate = real"
    )
    assert not run(cluster, source).failures
    assert not run(cluster, USABLE).failures
