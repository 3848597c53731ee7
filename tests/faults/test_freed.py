"""Ranks that wait for one that raised are freed: it is named, and nothing is lost."""

from collections.abc import Iterator

import pytest

from ddpnb.cluster.cluster import Cluster
from ddpnb.protocol.messages import StaleVariable
from tests.cluster.rig import DYNAMO, pull, run, started

SETUP = """
import time
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
kept = [rank, 0]
"""

WAITS = {
    "all_reduce": "dist.all_reduce(torch.ones(1000))",
    "broadcast": "dist.broadcast(torch.ones(1000), src=culprit)",
    "barrier": "dist.barrier()",
    "recv": "dist.recv(torch.ones(1000), src=culprit)",
    "sub-group all_reduce": "dist.all_reduce(torch.ones(1000), group=pair)",
    "DDP backward": "net(torch.ones(1, 9)).sum().backward()",
}
"""Calls that wait for ``culprit``; each rank that is not it makes the call."""

PREPARE = {
    "sub-group all_reduce": "pair = dist.new_group(list(range(world_size)))",
    "DDP backward": "net = DDP(nn.Linear(9, 9))",
}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Three ranks, supervised as a user's are."""
    with started(3, environment=DYNAMO) as cluster:
        yield cluster


@pytest.mark.parametrize("wait", WAITS)
def test_ranks_that_wait_for_one_that_raised_are_freed(cluster: Cluster, wait: str):
    run(cluster, SETUP)
    for culprit in (1, 0):
        raising = "if rank == culprit:\n    time.sleep(0.2)\n    raise ValueError('on purpose')"
        source = f"culprit = {culprit}\n{PREPARE.get(wait, '')}\n{raising}\n{WAITS[wait]}"
        ended = run(cluster, source)
        failures = dict(ended.failures)
        assert failures.pop(culprit).name == "ValueError"
        assert set(failures) == set(cluster.ranks) - {culprit}
        assert all(failure.is_consequence for failure in failures.values()), failures
        assert not ended.lost
        assert ended.seconds < 8
        assert not run(cluster, "total = torch.ones(1)\ndist.all_reduce(total)").failures
        assert pull(cluster, "total.item(), kept[0]") == [(3.0, rank) for rank in cluster.ranks]


def test_the_next_cell_does_not_receive_what_was_sent_to_one_that_raised(cluster: Cluster):
    """The sender has not waited for it."""
    run(cluster, "import torch, torch.distributed as dist")
    sent = "work = dist.broadcast(torch.ones(3), 0, async_op=True)"
    ended = run(cluster, f"if rank: raise ValueError\n{sent}")
    assert ended.failures.keys() == set(cluster.ranks[1:])
    ended = run(cluster, "got = torch.full((3,), 7.0)\ndist.broadcast(got, 0)")
    assert not ended.failures
    assert pull(cluster, "got.tolist()") == [[7.0] * 3] * len(cluster.ranks)


def test_what_nobody_will_receive_keeps_no_core_busy(cluster: Cluster):
    """Linux would wake gloo's thread for it without end, were its connection not shut down."""
    run(cluster, "import time, torch, torch.distributed as dist")
    sent = "dist.send(torch.ones(3_000_000), 1)"
    run(cluster, f"if rank: time.sleep(0.5); raise ValueError\n{sent}")
    used = "began = time.process_time(); time.sleep(1); used = time.process_time() - began"
    assert not run(cluster, used).failures
    assert max(pull(cluster, "used")) < 0.5


def test_a_default_timeout_of_the_users_sockets_costs_no_rank(cluster: Cluster):
    """Python makes the sockets that it is given by number non-blocking then, for all who use it."""
    run(cluster, "import socket\nsocket.setdefaulttimeout(10)\nkept = rank")
    ended = run(cluster, "import torch.distributed as dist\nif rank: dist.barrier()")
    assert "rank 0 finished the cell without calling it" in ended.watch.hang
    assert not ended.lost
    assert pull(cluster, "kept, socket.getdefaulttimeout()") == [(n, 10) for n in cluster.ranks]
    run(cluster, "socket.setdefaulttimeout(None)")


TIED = """
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP

class Trainer:
    def __init__(self):
        self.rate, self.model = 0.1, DDP(nn.Linear(2, 2))

plain = nn.Linear(2, 2)
trainer, nets = Trainer(), [DDP(nn.Linear(2, 2)), plain]
sharded = nn.Sequential(nn.Linear(2, 2), fully_shard(nn.Sequential(nn.Linear(2, 2))))
zero = ZeroRedundancyOptimizer(plain.parameters(), torch.optim.SGD, lr=0.1)
everyone = dist.new_group(list(range(world_size)))
alone = DDP(plain)
if rank: del alone
"""


def test_what_is_tied_to_a_group_that_was_cut_is_named(cluster: Cluster):
    assert not run(cluster, TIED).failures
    cluster.abort(cluster.ranks)
    everywhere = {
        ("trainer.model", "DistributedDataParallel"),
        ("nets[0]", "DistributedDataParallel"),
        ("sharded.1", "FSDPModule"),
        ("zero", "ZeroRedundancyOptimizer"),
        ("everyone", "ProcessGroup"),
    }
    found = cluster.ensure_group()
    assert {stale for stale, ranks in found.items() if ranks == list(cluster.ranks)} >= everywhere
    assert found[StaleVariable("alone", "DistributedDataParallel")] == [0]
    assert not {"plain", "nets[1]", "sharded.1.0"} & {stale.name for stale in found}


SLOW_CUT = """
from ddpnb.rank import group as groups
see = groups.own_connections
def look():
    if rank == slow: time.sleep(0.7)
    return see()
groups.own_connections = look
"""


@pytest.mark.parametrize("slow", [0, 2])
def test_a_rank_that_is_slow_to_cut_does_not_cut_the_next_group(cluster: Cluster, slow: int):
    """As on a busy machine: another rank's abort may have freed it before its own is done."""
    run(cluster, f"{SETUP}slow = {slow}{SLOW_CUT}")
    ended = run(cluster, "if rank == 1: 1/0\ndist.recv(torch.ones(1), 2 - rank)")
    assert sorted(ended.failures) == [0, 1, 2]
    assert not run(cluster, "time.sleep(3)\ndist.all_reduce(torch.ones(1))").failures
    run(cluster, "groups.own_connections = see")
