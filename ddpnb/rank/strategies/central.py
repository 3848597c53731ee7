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
from torch import nn

from ddpnb.rank.comm.flat_buffers import FlatBuffer, gradients
from ddpnb.rank.strategies.base import SynchronousStrategy
from ddpnb.rank.strategies.replica import Batch, Memory, Replica, StepReport


@final
class Central(SynchronousStrategy):
    """Rank 0 updates the one copy of the parameters that counts, in the host's memory."""

    def setup(self, replica: Replica) -> None:
        """Make the flat messages and, on rank 0, the one copy and its optimizer."""
        self._replica = replica
        self._flat = FlatBuffer(replica.parameters)
        self._held: list[nn.Parameter] = []
        if replica.rank == 0:
            self._held = [nn.Parameter(p.detach().cpu().clone()) for p in replica.parameters]
            self._optimizer = replica.optimizer(self._held)

    def step(self, batch: Batch) -> StepReport:
        """Train on this rank's part of one global batch; takes part: every rank."""
        replica, flat = self._replica, self._flat
        # forward, backward; with the weight in the loss, the mean is over samples
        loss = replica.compute_gradients(batch, weight=batch.weight)
        # agree: takes part: every rank; the sum arrives at rank 0
        replica.timer.begin("communication")
        flat.gather(gradients(replica.parameters))
        for buffer in flat.buffers:
            dist.reduce(buffer, dst=0)
        # update: on rank 0
        if replica.rank == 0:
            for parameter, view in zip(self._held, flat.views, strict=True):
                parameter.grad = view.cpu().clone()
            replica.update(self._optimizer)
            replica.timer.begin("communication")
            flat.gather(self._held)
        # agree: takes part: every rank; the parameters come from rank 0
        for buffer in flat.buffers:
            dist.broadcast(buffer, src=0)
        flat.scatter(replica.parameters)
        num_times = replica.world_size - 1 if replica.rank == 0 else 1
        return batch.report(loss, num_bytes_sent=num_times * flat.num_bytes)

    def memory(self) -> Memory:
        """The copy to compute with; on rank 0 also the one that counts, and the optimizer."""
        held = [*self._replica.model.parameters(), *self._held]
        return Memory.of(held, *([self._optimizer] if self._replica.rank == 0 else []))
