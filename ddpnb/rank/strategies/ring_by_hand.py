"""A ring all-reduce in a few lines of code: each rank sends only to the next rank.

    w  <-  w - lr * sum over ranks i of (b_i / B) * g_i(w)

g_i is the gradient of the mean loss over rank i's b_i samples. The global batch has B samples. The
gradients are cut into N chunks. In each of the first N - 1 rounds, each rank sends a chunk to the
next rank, and the next rank adds its own values. After these rounds, each rank has the sum of one
chunk. In N - 1 more rounds, each sum is sent once around the ring. Every rank takes part.

Reference: Patarasuk and Yuan, "Bandwidth Optimal All-reduce Algorithms for Clusters of
Workstations", Journal of Parallel and Distributed Computing 69(2), 2009.

- Messages per step, rank and dtype: 2 (N - 1), all of them to the next rank.
- Bytes sent per step and rank, with N ranks: 2 (N - 1) / N * S. S is the size of all gradients and
  of one flag per parameter. If N does not divide their number evenly, chunks differ by one element.
"""

from typing import final

import torch
import torch.distributed as dist
from torch import Tensor

from ddpnb.rank.strategies.ddp_by_hand import DdpByHand


@final
class RingByHand(DdpByHand):
    """The strategy ``ddp-by-hand`` with an all-reduce made of sends and receives."""

    def all_reduce(self, buffer: Tensor) -> None:
        """Sum a buffer around the ring. Every rank takes part."""
        ring_all_reduce(buffer, rank=self.worker.rank, world_size=self.worker.world_size)


def ring_all_reduce(flat: Tensor, *, rank: int, world_size: int) -> None:
    """Sum a tensor of shape (n,) over all ranks, in place. Every rank takes part."""
    chunks = flat.tensor_split(world_size)
    arrived = torch.empty_like(chunks[0])  # no chunk is larger than the first
    # reduce-scatter: at the end, this rank has the sum of chunk rank + 1
    for shift in range(world_size - 1):
        mine, theirs = chunks[(rank - shift) % world_size], chunks[(rank - shift - 1) % world_size]
        _exchange(mine, arrived[: len(theirs)], rank, world_size)
        theirs += arrived[: len(theirs)]
    # all-gather: each sum is sent once around the ring
    for shift in range(world_size - 1):
        mine, theirs = chunks[(rank + 1 - shift) % world_size], chunks[(rank - shift) % world_size]
        _exchange(mine, theirs, rank, world_size)


def _exchange(sent: Tensor, received: Tensor, rank: int, world_size: int) -> None:
    """Send to the next rank and receive from the previous rank. Every rank takes part."""
    after, before = (rank + 1) % world_size, (rank - 1) % world_size
    both = [dist.P2POp(dist.isend, sent, after), dist.P2POp(dist.irecv, received, before)]
    for work in dist.batch_isend_irecv(both):
        work.wait()
