"""Central storage: one rank keeps the parameters on the host (every rank).

    w  <-  w - lr * sum over ranks i of (b_i / B) * g_i(w)        on rank 0's CPU

with g_i the gradient of the mean loss over rank i's b_i samples of the global batch of
B: the same update as ``ddp``, made once instead of on every rank.

Reference: ``tf.distribute.experimental.CentralStorageStrategy`` of TensorFlow: variables
are placed on the CPU, computation is replicated over the devices.

Messages per step: one reduce of all gradients to rank 0, one broadcast of all parameters
from there (one of each for each dtype).
Bytes sent per step: S by each rank but rank 0, its gradients; (N - 1) S by rank 0, the
parameters for each of the others; S is the bytes of all parameters.
"""

from typing import final

import torch.distributed as dist
from torch import Tensor, nn

from ddpnb.rank.collectives.flat import FlatBuffer, gradients
from ddpnb.rank.strategies.base import Strategy
from ddpnb.rank.worker import Batch, Worker


@final
class Central(Strategy):
    """Rank 0 updates the one copy of the parameters that counts, in the host's memory."""

    def setup(self, worker: Worker) -> None:
        """Make the flat messages and, on rank 0, the one copy and its optimizer."""
        self.worker = worker
        self.flat = FlatBuffer(worker.parameters)
        if worker.rank == 0:
            self.held = [nn.Parameter(p.detach().cpu().clone()) for p in worker.parameters]
            self.optimizer = worker.optimizer(self.held)

    def step(self, batch: Batch) -> Tensor:
        """Train on this rank's slice of one global batch; takes part: every rank."""
        worker, flat = self.worker, self.flat
        # forward, backward; with the weight in the loss, the mean is over samples
        loss = worker.compute_gradients(batch, weight=batch.weight)
        # agree: takes part: every rank; the sum arrives at rank 0
        flat.gather(gradients(worker.parameters))
        for buffer in flat.buffers:
            dist.reduce(buffer, dst=0)
        # update: on rank 0
        if worker.rank == 0:
            for parameter, view in zip(self.held, flat.views, strict=True):
                parameter.grad = view.cpu().clone()
            worker.update(self.optimizer)
            flat.gather(self.held)
        # agree: takes part: every rank; the parameters come from rank 0
        for buffer in flat.buffers:
            dist.broadcast(buffer, src=0)
        flat.scatter(worker.parameters)
        return loss
