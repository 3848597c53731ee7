"""Hogwild: workers train on the same memory without locks (every rank, of one host, on CPUs).

    worker i:  w  <-  w - (b_i / B) * lr * g_i(w_old)     w: the one copy, in shared memory

Each worker reads the parameters while others write them, and updates them without asking;
w_old may be a mixture of states.  Each has its own optimizer: momentum is local.  Staleness
counts the updates by others between a worker's last one and this one.
The weight b_i / B, a share of the global batch of B, is that of ``async``.

Option:

    momentum=m  of the default optimizer, in place of --momentum

Reference: Niu, Recht, Re and Wright, "Hogwild!: A Lock-Free Approach to Parallelizing
Stochastic Gradient Descent", NeurIPS 2011.

Messages per step and worker: two of some 50 bytes, one to rank 0, which hands out the shards and
counts updates, and its reply; a faster worker takes more shards.  Bytes sent per step: P for
parameters of P bytes, written to the memory of all.

A worker that dies costs the shards it holds; it may join anew.  GPUs cannot share such memory.
"""

from typing import final

from torch import Tensor

from ddpnb.rank.servers.queue import UpdateCounter
from ddpnb.rank.strategies.asynchronous import AsynchronousStrategy, scaled_rate
from ddpnb.rank.worker import Batch, Worker


@final
class Hogwild(AsynchronousStrategy):
    """Asynchronous SGD on shared memory."""

    def setup(self, worker: Worker) -> None:
        """Move the parameters to the one copy in shared memory; takes part: every rank."""
        self.begin(worker, 1, lambda _: UpdateCounter())
        self.optimizer = worker.optimizer(worker.parameters)

    def step(self, batch: Batch) -> Tensor:
        """Train on one shard, on parameters that others change meanwhile."""
        worker = self.worker
        # forward, backward
        loss = worker.compute_gradients(batch)
        # agree: with no other rank
        # update: in the memory of all, while others do the same
        with scaled_rate(self.optimizer, batch.weight):
            worker.update(self.optimizer)
        worker.staleness = self.client.step(batch.weight)
        return loss
