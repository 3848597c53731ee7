"""All collectives work the same with and without listeners."""

import contextlib

import pytest
import torch
import torch.distributed as dist

from ddpnb.rank.clock import MeasuredClock
from ddpnb.rank.collectives.intercept import listening
from ddpnb.rank.collectives.trace import TraceRecorder

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
}

LISTENERS = {
    "clock": lambda _: listening(MeasuredClock(torch.device("cpu"))),
    "trace": lambda rank: listening(TraceRecorder(rank)),
}


def in_a_cell(state, folder, source, names):
    namespace = {"rank": state.rank, "world_size": state.world_size}
    with contextlib.ExitStack() as opened:
        for name in names:
            opened.enter_context(LISTENERS[name](state.rank))
        exec(SETUP + source, namespace)
        backend = dist.get_backend(), dist.get_backend(dist.new_group())
        dist.barrier()
    return backend, namespace["x"].tolist(), namespace.get("found")


@pytest.mark.parametrize("case", RIGHT)
def test_calls_do_what_they_do_without_listeners(ranks, case):
    usual = ranks(3).call(in_a_cell, RIGHT[case], ())
    assert usual[0][0] == ("gloo", "gloo")
    assert ranks(3).call(in_a_cell, RIGHT[case], tuple(LISTENERS)) == usual
