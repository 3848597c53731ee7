"""Train on one device. This run is the baseline for all other strategies.  Runs on rank 0.

    w  <-  w - lr * g(w),    g = gradient of the mean loss over the global batch

On a CPU, the device is one rank's share of the threads. With ``threads=all``, the device has the
threads of all ranks on its host. Other strategies should be faster than ``single:threads=all``.

Reference: Robbins and Monro, "A Stochastic Approximation Method", Annals of Mathematical Statistics
22(3), 1951.

Messages per step: 0. Bytes sent per step: 0.
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
    """Plain stochastic gradient descent on rank 0. The other ranks are idle."""

    def __init__(self, *, threads: str = "rank") -> None:
        self._takes_all = threads == "all"

    def plan(self, state: RankState) -> Plan:
        """Return a plan to train only on rank 0."""
        alone = Plan(num_ranks=1, num_workers=1, synchronous=True)
        num_ranks = state.local_world_size
        if self._takes_all:
            return replace(alone, num_devices=num_ranks)
        if state.device != "cpu" or num_ranks == 1:
            return alone
        num, num_all = state.num_threads, num_ranks * state.num_threads
        note = f"This run used {num} of {num_all} threads. single:threads=all uses all threads."
        return replace(alone, notes=(note,))

    def setup(self, worker: Worker) -> None:
        """If ``threads=all``, use all ranks' threads. ddpnb undoes this change after the run."""
        if self._takes_all:
            torch.set_num_threads(torch.get_num_threads() * worker.local_world_size)
        super().setup(worker)

    def step(self, batch: Batch) -> Tensor:
        """Train on one global batch."""
        worker = self.worker
        worker.model.zero_grad()
        for micro_batch in worker.micro_batches(batch):
            loss = worker.loss(micro_batch)  # forward
            (micro_batch.share * loss).backward()
        # communicate: nothing, because there is only one worker
        self.optimizer.step()
        return worker.mean_loss
