"""Central storage: one rank keeps the parameters in its host's memory.  Every rank takes part.

    w  <-  w - lr * sum over ranks i of (b_i / B) * g_i(w)        on rank 0's CPU

g_i is the gradient of the mean loss over rank i's b_i samples. The global batch has B samples. The
update is the same as in ``ddp``, but only rank 0 updates the parameters.

Reference: ``tf.distribute.experimental.CentralStorageStrategy``. With this strategy, TensorFlow
stores variables on the CPU and runs a copy of the computation on each device.

- Messages per step and dtype: one reduce of all gradients to rank 0, then one broadcast of all
  parameters from rank 0.
- Bytes sent per step, with N ranks: rank 0 sends (N - 1) S bytes of parameters to the other ranks.
  Each other rank sends S bytes of gradients. S is the size of all parameters and of one flag per
  parameter. If no rank has a gradient for a parameter, the update skips the parameter.
"""

from typing import final

import torch.distributed as dist
from torch import Tensor, nn

from ddpnb.rank.collectives.flat import FlatBuffer
from ddpnb.rank.strategies.base import Strategy
from ddpnb.rank.worker import Batch, Worker


@final
class Central(Strategy):
    """Data parallelism with a master copy of the parameters. Rank 0 keeps and updates the copy."""

    def setup(self, worker: Worker) -> None:
        """Create the flat buffer and, on rank 0, the master copy and its optimizer."""
        self.worker = worker
        self.flat = FlatBuffer(worker.parameters, has_flags=True)
        if worker.rank == 0:
            self.held = [nn.Parameter(p.detach().cpu().clone()) for p in worker.parameters]
            self.optimizer = worker.optimizer(self.held)

    def step(self, batch: Batch) -> Tensor:
        """Train on this rank's slice of one global batch. Every rank takes part."""
        worker, flat = self.worker, self.flat
        worker.model.zero_grad()
        for micro_batch in worker.micro_batches(batch):
            loss = worker.loss(micro_batch)  # forward
            # backward; the weight b_i / B makes the sum over ranks a mean over samples
            (batch.weight * micro_batch.share * loss).backward()
        # communicate: rank 0 gets the sum; every rank takes part
        flat.pack_gradients()
        for buffer in flat.buffers:
            dist.reduce(buffer, dst=0)
        # update: only rank 0
        if worker.rank == 0:
            flat.unpack_gradients(self.held)
            self.optimizer.step()
            flat.pack(self.held)
        # communicate: rank 0 sends the parameters; every rank takes part
        for buffer in flat.buffers:
            dist.broadcast(buffer, src=0)
        flat.unpack(flat.tensors)
        return worker.mean_loss
