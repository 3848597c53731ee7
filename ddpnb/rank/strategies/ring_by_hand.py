"""A ring all-reduce written out: each rank talks only to its neighbours (every rank).

    w  <-  w - lr * sum over ranks i of (b_i / B) * g_i(w)

with g_i the gradient of the mean loss over rank i's b_i samples of the global batch of
B.  The gradients are cut into N chunks.  In N - 1 rounds each rank sends a chunk to the
next one, which adds its own: then each rank holds the sum of one chunk.  In N - 1 more
rounds the sums go once around.

Reference: Patarasuk and Yuan, "Bandwidth Optimal All-reduce Algorithms for Clusters of
Workstations", Journal of Parallel and Distributed Computing 69(2), 2009.

Messages per step and rank: 2 (N - 1), to the next rank (for each dtype).
Bytes sent per step and rank: 2 (N - 1) / N * S, with S the bytes of all gradients; where N
does not divide them, chunks differ by one element.
"""

from typing import final

import torch
import torch.distributed as dist
from torch import Tensor

from ddpnb.rank.strategies.ddp_by_hand import DdpByHand


@final
class RingByHand(DdpByHand):
    """``ddp-by-hand`` with an all-reduce from sends and receives."""

    def all_reduce(self, buffer: Tensor) -> None:
        """Sum a buffer around the ring; takes part: every rank."""
        ring_all_reduce(buffer, rank=self.worker.rank, world_size=self.worker.world_size)


def ring_all_reduce(flat: Tensor, *, rank: int, world_size: int) -> None:
    """Sum a tensor of shape (n,) over all ranks, in place; takes part: every rank."""
    chunks = flat.tensor_split(world_size)
    arrived = torch.empty_like(chunks[0])  # the first chunk is a largest one
    # reduce-scatter: at the end this rank holds the sum of chunk rank + 1
    for shift in range(world_size - 1):
        mine, theirs = chunks[(rank - shift) % world_size], chunks[(rank - shift - 1) % world_size]
        _exchange(mine, arrived[: len(theirs)], rank, world_size)
        theirs += arrived[: len(theirs)]
    # all-gather: the sums go around
    for shift in range(world_size - 1):
        mine, theirs = chunks[(rank + 1 - shift) % world_size], chunks[(rank - shift) % world_size]
        _exchange(mine, theirs, rank, world_size)


def _exchange(sent: Tensor, received: Tensor, rank: int, world_size: int) -> None:
    """Send to the next rank and receive from the one before; takes part: every rank."""
    after, before = (rank + 1) % world_size, (rank - 1) % world_size
    both = [dist.P2POp(dist.isend, sent, after), dist.P2POp(dist.irecv, received, before)]
    for work in dist.batch_isend_irecv(both):
        work.wait()
