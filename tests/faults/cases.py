"""Rounds in which one rank raises while the others wait for it, timed."""

import time
from dataclasses import dataclass

from ddpnb.cluster.call import CallEvent, Returned
from ddpnb.cluster.cluster import Cluster
from ddpnb.cluster.supervision import failure_in
from tests.cluster.rig import Ended, begin, finish, pull, run

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


@dataclass(frozen=True, kw_only=True)
class Round:
    """What one round showed."""

    wait: str
    named_after: float
    """Seconds from the exception on the rank until the notebook knew of it."""
    freed_after: float
    """Seconds from the exception until every rank had ended the cell."""
    next_is_right: bool
    """Whether the next cell's all-reduce gave the right sum everywhere."""
    is_kept: bool
    """Whether all variables are as before."""
    ended: Ended


def one_raises(cluster: Cluster, wait: str, culprit: int, num_before: int = 0) -> Round:
    """Have one rank raise while the others wait for it in a call.

    Args:
        cluster: on which ``SETUP`` has run.
        wait: one of ``WAITS``.
        culprit: the rank that raises.
        num_before: rounds before this one; counted in a variable on the ranks.
    """
    named: list[float] = []

    def note(event: CallEvent) -> None:
        if isinstance(event, Returned) and event.rank == culprit:
            failure = failure_in(event.value)
            assert failure is not None
            named.append(time.time() - failure.failed_at)
            began.append(failure.failed_at)

    began: list[float] = []
    cell = begin(
        cluster,
        f"culprit = {culprit}\n{PREPARE.get(wait, '')}\n"
        f"if rank == culprit:\n    time.sleep(0.2)\n    raise ValueError('on purpose')\n"
        f"{WAITS[wait]}",
        on_event=note,
    )
    finish(cell)
    freed_after = time.time() - began[0]
    again = run(
        cluster,
        "total = torch.full((1000,), rank + 1.0)\ndist.all_reduce(total)\nkept[1] += 1",
    )
    num_ranks = len(cluster.ranks)
    expected = num_ranks * (num_ranks + 1) / 2
    totals = [] if again.failures else pull(cluster, "total.min().item(), total.max().item()")
    return Round(
        wait=wait,
        named_after=named[0],
        freed_after=freed_after,
        next_is_right=totals == [(expected, expected)] * num_ranks,
        is_kept=pull(cluster, "kept") == [[rank, num_before + 1] for rank in cluster.ranks],
        ended=cell,
    )
