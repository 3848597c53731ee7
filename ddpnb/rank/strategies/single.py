"""One device trains alone: the baseline of all others (rank 0).

    w  <-  w - lr * g(w),    g = gradient of the mean loss over the global batch

On a CPU a device is a rank's share of the threads.  With ``threads=all`` it has those of all ranks
of its host together: the whole machine in one process, which is what the others should beat.

Reference: Robbins and Monro, "A Stochastic Approximation Method", Annals of
Mathematical Statistics 22(3), 1951.

Messages per step: none.  Bytes sent per step: 0.
"""

from dataclasses import replace
from typing import final

import torch
from torch import Tensor

from ddpnb.protocol.messages import RankState
from ddpnb.rank.strategies.base import Plan, Strategy
from ddpnb.rank.worker import Batch, Worker


@final
class Single(Strategy):
    """Plain stochastic gradient descent; the other ranks rest."""

    def __init__(self, *, threads: str = "rank") -> None:
        self._takes_all = threads == "all"

    def plan(self, state: RankState) -> Plan:
        """Rank 0 alone."""
        alone = Plan(num_ranks=1, num_workers=1, synchronous=True)
        num_ranks = state.local_world_size
        if self._takes_all:
            return replace(alone, num_devices=num_ranks)
        if state.device != "cpu" or num_ranks == 1:
            return alone
        num, num_all = state.num_threads, num_ranks * state.num_threads
        note = f"It computes on {num} of {num_all} threads; single:threads=all: on all."
        return replace(alone, notes=(note,))

    def setup(self, worker: Worker) -> None:
        """Take the threads; they are given back when the run has ended."""
        if self._takes_all:
            torch.set_num_threads(torch.get_num_threads() * worker.local_world_size)
        super().setup(worker)

    def step(self, batch: Batch) -> Tensor:
        """Train on one global batch."""
        # forward, backward
        loss = self.worker.compute_gradients(batch)
        # agree: there is no other rank
        # update
        self.worker.update(self.optimizer)
        return loss
