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

RIGHT = {
    "uneven all_to_all_single": (
        "give = [rank + 1] * world_size\ntake = [other + 1 for other in range(world_size)]\n"
        "out = torch.empty(sum(take))\n"
        "dist.all_to_all_single(out, torch.ones(sum(give)), take, give)"
    ),
    "objects": (
        "found = [None] * world_size\n"
        "dist.all_gather_object(found, 'a' * 100 * rank)\n"
        "dist.broadcast_object_list([rank] if rank == 0 else [None], src=0)\n"
        "dist.gather_object([rank] * rank, found if rank == 0 else None)\n"
        "dist.scatter_object_list([None], found if rank == 0 else None)"
    ),
    "far ahead": (
        "if rank: time.sleep(0.5)\n"
        "works = [dist.all_reduce(torch.ones(1 + n), async_op=True) for n in range(150)]\n"
        "for work in works: work.wait()"
    ),
    "groups in different order in threads": (
        "one, two = [dist.new_group(list(range(world_size))) for _ in range(2)]\n"
        "def call(group, size):\n"
        "    for _ in range(50): dist.all_reduce(torch.ones(size), group=group)\n"
        "threads = [threading.Thread(target=call, args=(one, 3)),\n"
        "           threading.Thread(target=call, args=(two, 5))]\n"
        "for t in threads[::-1] if rank else threads: t.start()\n"
        "for t in threads: t.join()"
    ),
    "sub-groups with different numbers of calls": (
        "alone = [dist.new_group([other]) for other in range(world_size)]\n"
        "for _ in range(rank + 1): dist.all_reduce(torch.ones(1 + rank), group=alone[rank])\n"
        "pair = dist.new_group([0, 1])\n"
        "if rank < 2: dist.all_reduce(x, group=pair)"
    ),
    "Join": (
        "from torch.distributed.algorithms.join import Join\n"
        "net = DDP(nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2)))\n"
        "with Join([net]):\n"
        "    for _ in range(3 + rank): net(torch.ones(1, 3)).sum().backward()"
    ),
    "SyncBatchNorm's kin and hooks": (
        "from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook\n"
        "net = DDP(nn.Linear(3, 2))\n"
        "net.register_comm_hook(None, default_hooks.fp16_compress_hook)\n"
        "for _ in range(2): net(torch.ones(1, 3)).sum().backward()\n"
        "net = DDP(nn.Linear(30, 20))\n"
        "state = powerSGD_hook.PowerSGDState(None, 1, start_powerSGD_iter=2)\n"
        "net.register_comm_hook(state, powerSGD_hook.powerSGD_hook)\n"
        "for _ in range(4): net(torch.ones(1, 30)).sum().backward()"
    ),
    "the group, destroyed and formed again": (
        "dist.all_reduce(x)\n"
        "dist.destroy_process_group()\n"
        "dist.init_process_group('gloo', rank=rank, world_size=world_size)\n"
        "dist.all_reduce(torch.ones(11))\ndist.barrier()\n"
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


@pytest.mark.parametrize("case", RIGHT)
def test_calls_that_may_differ_are_let_through(both: list[Cluster], case: str) -> None:
    for ended in run_on_each(both, RIGHT[case]):
        assert not ended.failures, ended.failures
        assert not ended.lost
    assert not any(again.failures or again.lost for again in run_on_each(both, USABLE))


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
