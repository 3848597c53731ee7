"""Synchronous data parallelism written out (every rank).

    w  <-  w - lr * sum over ranks i of (b_i / B) * g_i(w)

with g_i the gradient of the mean loss over rank i's b_i samples of the global batch of
B: the same update as ``ddp``, without its buckets: everything is sent at once, after the
backward pass.

Reference: Goyal et al., "Accurate, Large Minibatch SGD", 2017, section 4; Li et al.,
"PyTorch Distributed", PVLDB 13(12), 2020, section 3.2.1 (the naive solution).

Messages per step: one all-reduce of all gradients (one for each dtype).
Bytes sent per step and rank: 2 (N - 1) / N * S, with S the bytes of all gradients.
"""

import torch.distributed as dist
from torch import Tensor

from ddpnb.rank.collectives.flat import FlatBuffer, gradients
from ddpnb.rank.strategies.base import Strategy
from ddpnb.rank.worker import Batch, Worker


class DdpByHand(Strategy):
    """Flatten, all-reduce, step."""

    def setup(self, worker: Worker) -> None:
        """Make the optimizer and the flat gradients."""
        super().setup(worker)
        self.flat = FlatBuffer(worker.parameters)

    def step(self, batch: Batch) -> Tensor:
        """Train on this rank's slice of one global batch; takes part: every rank."""
        worker = self.worker
        # forward, backward; with the weight in the loss, the mean is over samples
        loss = worker.compute_gradients(batch, weight=batch.weight)
        # agree: takes part: every rank
        mine = gradients(worker.parameters)
        self.flat.gather(mine)
        for buffer in self.flat.buffers:
            self.all_reduce(buffer)
        self.flat.scatter(mine)
        # update: every rank the same
        worker.update(self.optimizer)
        return loss

    def all_reduce(self, buffer: Tensor) -> None:
        """Sum a buffer over all ranks; takes part: every rank."""
        dist.all_reduce(buffer)
