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

from ddpnb.rank.comm.flat_buffers import FlatBuffer, all_reduce_bytes, gradients, num_bytes
from ddpnb.rank.strategies.base import SynchronousStrategy
from ddpnb.rank.strategies.replica import Batch, Replica, StepReport


class DdpByHand(SynchronousStrategy):
    """Flatten, all-reduce, step."""

    def setup(self, replica: Replica) -> None:
        """Make the optimizer and the flat gradients."""
        super().setup(replica)
        self._flat = FlatBuffer(replica.parameters)

    def step(self, batch: Batch) -> StepReport:
        """Train on this rank's part of one global batch; takes part: every rank."""
        replica = self._replica
        # forward, backward; with the weight in the loss, the mean is over samples
        loss = replica.compute_gradients(batch, weight=batch.weight)
        # agree: takes part: every rank
        replica.timer.begin("communication")
        mine = gradients(replica.parameters)
        self._flat.gather(mine)
        num_sent = sum(self.all_reduce(buffer) for buffer in self._flat.buffers)
        self._flat.scatter(mine)
        # update: every rank the same
        replica.update(self._optimizer)
        return batch.report(loss, num_bytes_sent=num_sent)

    def all_reduce(self, buffer: Tensor) -> int:
        """Sum a buffer over all ranks; takes part: every rank.  Return the bytes sent."""
        dist.all_reduce(buffer)
        return all_reduce_bytes(num_bytes([buffer]), self._replica.world_size)
