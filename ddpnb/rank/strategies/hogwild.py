"""Hogwild: workers train on the same memory without locks (every rank, of one host, on CPUs).

    worker i:  w  <-  w - (b_i / B) * lr * g_i(w_old)     w: the one copy, in shared memory

Each worker reads the parameters while others write them, and updates them without asking;
w_old may be a mixture of states.  Each has its own optimizer: momentum is local.  Staleness
comes from a shared counter of updates: those by others between the forward pass and the update.
The weight b_i / B, a share of the global batch of B, is that of ``async``.

Reference: Niu, Recht, Re and Wright, "Hogwild!: A Lock-Free Approach to Parallelizing
Stochastic Gradient Descent", NeurIPS 2011.

Messages per step: none.  Workers take the next shard and count updates in shared memory, under
a file lock; a faster worker takes more shards.  Bytes sent per step: P for parameters of P
bytes, written to the memory of all.

A worker that dies costs the shards it holds; it may join anew.  GPUs cannot share such memory.
"""

from typing import final

from torch import nn

from ddpnb.protocol.errors import UserError
from ddpnb.protocol.messages import RankState
from ddpnb.rank.comm.flat_buffers import num_bytes
from ddpnb.rank.comm.parameter_store import ScaledStep
from ddpnb.rank.strategies.base import Batch, Plan, Replica, StepReport
from ddpnb.rank.strategies.shared_memory_workers import SharedMemoryStrategy


@final
class Hogwild(SharedMemoryStrategy):
    """Asynchronous SGD on shared memory."""

    def plan(self, state: RankState) -> Plan:
        """Every rank trains.

        Raises:
            UserError: the ranks are on GPUs.
        """
        if not state.device.startswith("cpu"):
            raise UserError(
                "hogwild needs ranks on CPUs, whose memory processes can share: "
                "%ddp_start --device cpu, or compare async."
            )
        return super().plan(state)

    def setup(self, replica: Replica) -> None:
        """Move the parameters to shared memory and wait for all; takes part: every rank.

        A rank that joins takes part alone.

        Raises:
            UserError: the ranks share no memory.
            RunOverError: there is no run to join.
        """
        self.open(replica, refusal="hogwild needs all ranks on one host; compare async.")
        self._num_bytes = num_bytes(replica.parameters)
        for tensor, parameter in zip(self.copies[0].tensors, replica.parameters, strict=True):
            parameter.data = tensor
        self._make_step = ScaledStep(replica.optimizer(replica.parameters))
        self.enter()

    def step(self, batch: Batch) -> StepReport:
        """Train on one shard, on parameters that others change meanwhile."""
        self.queue.check()
        version_read = self.queue.num_updates
        self.log_access(is_write=False, version=version_read)
        # forward, backward
        loss = self._replica.compute_gradients(batch)
        # agree: with no other rank
        # update: in the memory of all, while others do the same
        self._replica.timer.begin("optimizer")
        self._make_step(batch.weight)
        version = self.queue.count_update()
        self.queue.finish_shard()
        self.log_access(is_write=True, version=version)
        return StepReport(
            loss=loss,
            num_samples=batch.num_samples,
            staleness=version - 1 - version_read,
            num_bytes_sent=self._num_bytes,
        )

    def finish(self) -> nn.Module:
        """Wait until all are done, and copy the parameters; takes part: every living rank."""
        self.queue.leave()
        for parameter in self._replica.parameters:
            parameter.data = parameter.data.clone()
        return self._replica.model
