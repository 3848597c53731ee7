"""Ranks that wait for a failed rank are released and keep their variables."""

import pytest

from ddpnb.cluster.cluster import Cluster
from ddpnb.cluster.group import ensure_group
from ddpnb.protocol.cell_messages import StaleVariable
from tests.cluster.rig import pull, run

ONE_RAISES = """
pair, net = dist.new_group([0, 1, 2]), DDP(nn.Linear(9, 9))
if rank == {culprit}:
    time.sleep(0.2)
    raise ValueError('on purpose')
{wait}
"""
WAITS = [
    (0, "dist.all_reduce(torch.ones(1000))"),
    (0, "dist.broadcast(torch.ones(1000), src=0)"),
    (1, "dist.barrier()"),
    (1, "dist.recv(torch.ones(1000), src=1)"),
    (1, "dist.all_reduce(torch.ones(1000), group=pair)"),
    (0, "net(torch.ones(1, 9)).sum().backward()"),
]


@pytest.mark.parametrize(("culprit", "wait"), WAITS)
def test_ranks_that_wait_for_one_that_raised_are_freed(three: Cluster, culprit: int, wait: str):
    ended = run(three, ONE_RAISES.format(culprit=culprit, wait=wait))
    failures = dict(ended.failures)
    assert failures.pop(culprit).name == "ValueError"
    assert set(failures) == set(three.ranks) - {culprit}
    assert all(failure.is_consequence for failure in failures.values()), failures
    assert not ended.lost
    assert ended.seconds < 8


def test_the_next_cell_does_not_receive_what_was_sent_to_one_that_raised(three: Cluster):
    """The sender did not wait for its message to be received."""
    sent = "work = dist.broadcast(torch.ones(3), 0, async_op=True)"
    ended = run(three, f"if rank: raise ValueError\n{sent}")
    assert ended.failures.keys() == set(three.ranks[1:])
    ended = run(three, "got = torch.full((3,), 7.0)\ndist.broadcast(got, 0)")
    assert not ended.failures
    assert pull(three, "got.tolist()") == [[7.0] * 3] * len(three.ranks)


TIED = """
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer

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


def test_what_is_tied_to_a_group_that_was_cut_is_named(three: Cluster):
    assert not run(three, TIED).failures
    three.abort(three.ranks)
    everywhere = {
        ("trainer.model", "DistributedDataParallel"),
        ("nets[0]", "DistributedDataParallel"),
        ("sharded.1", "FSDPModule"),
        ("zero", "ZeroRedundancyOptimizer"),
        ("everyone", "ProcessGroup"),
    }
    found = ensure_group(three)
    assert {stale for stale, ranks in found.items() if ranks == list(three.ranks)} >= everywhere
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
def test_a_rank_that_is_slow_to_cut_does_not_cut_the_next_group(three: Cluster, slow: int):
    """On a busy machine another rank's abort may release a rank before its own abort is done."""
    run(three, f"slow = {slow}{SLOW_CUT}")
    ended = run(three, "if rank == 1: 1/0\ndist.recv(torch.ones(1), 2 - rank)")
    assert sorted(ended.failures) == [0, 1, 2]
    assert not run(three, "groups.own_connections = see\ntime.sleep(3)").failures
