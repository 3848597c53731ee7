"""Synchronous data parallelism in a few lines of code.  Every rank takes part.

    w  <-  w - lr * sum over ranks i of (b_i / B) * g_i(w)

g_i is the gradient of the mean loss over rank i's b_i samples. The global batch has B samples. The
update is the same as in ``ddp``, but without buckets. Each rank sends all gradients at once, after
the backward pass.

Reference: Goyal et al., "Accurate, Large Minibatch SGD", 2017 (arXiv:1706.02677), section 4; Li et
al., "PyTorch Distributed", PVLDB 13(12), 2020 (arXiv:2006.15704), section 3.2.1 (naive solution).

- Messages per step and dtype: one all-reduce of all gradients.
- Bytes sent per step and rank, with N ranks: 2 (N - 1) / N * S. S is the size of all gradients and
  of one flag per parameter. If no rank has a gradient for a parameter, the update skips it.
"""

import torch.distributed as dist
from torch import Tensor

from ddpnb.rank.collectives.flat import FlatBuffer
from ddpnb.rank.strategies.base import Strategy
from ddpnb.rank.worker import Batch, Worker


class DdpByHand(Strategy):
    """Data parallelism with one all-reduce of the flattened gradients in each step."""

    def setup(self, worker: Worker) -> None:
        """Create the optimizer and the flat buffer for the gradients."""
        super().setup(worker)
        self.flat = FlatBuffer(worker.parameters, has_flags=True)

    def step(self, batch: Batch) -> Tensor:
        """Train on this rank's slice of one global batch. Every rank takes part."""
        worker = self.worker
        worker.model.zero_grad()
        for micro_batch in worker.micro_batches(batch):
            loss = worker.loss(micro_batch)  # forward
            # backward; the weight b_i / B makes the sum over ranks a mean over samples
            (batch.weight * micro_batch.share * loss).backward()
        self.flat.pack_gradients()
        # communicate: every rank takes part
        for buffer in self.flat.buffers:
            self.all_reduce(buffer)
        self.flat.unpack_gradients(worker.parameters)
        # update: the same on every rank
        self.optimizer.step()
        return worker.mean_loss

    def all_reduce(self, buffer: Tensor) -> None:
        """Sum a buffer over all ranks. Every rank takes part."""
        dist.all_reduce(buffer)
