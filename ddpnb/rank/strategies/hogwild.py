"""Hogwild: workers update the same memory without locks.

    worker i:  w  <-  w - (b_i / B) * lr * g_i(w_old)     w: the only copy, in shared memory

Each worker reads and updates the parameters while other workers write them. So w_old may mix values
from before and after another worker's update. Each worker has a separate optimizer and momentum.
The staleness of an update is the number of updates that other workers made since this worker's
previous update. The weight b_i / B is the worker's share of a global batch, as in ``async``. A
schedule of the learning rate advances by one step for every N updates by the N workers together.

Option:

    momentum=m  momentum of the default optimizer, replaces --momentum

Reference: Niu, Recht, Re and Wright, "Hogwild!: A Lock-Free Approach to Parallelizing Stochastic
Gradient Descent", NeurIPS 2011.

- Messages per step and worker: one request to rank 0 and one reply, about 50 bytes each. Rank 0
  counts updates and distributes the shards, so a faster worker gets more shards.
- Bytes sent per step and worker: the size of all parameters, written to shared memory.

If a worker dies, its unfinished shards are lost, and the restarted worker may join again. Hogwild
needs CPUs, because GPUs cannot share this memory.  Every rank takes part, on the CPUs of one host.
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
        """Replace this worker's parameters by views of shared memory. Every rank takes part."""
        self.begin(worker, 1, lambda _: UpdateCounter())
        self.optimizer = worker.optimizer(worker.parameters)

    def step(self, batch: Batch) -> Tensor:
        """Train on one shard, while other workers change the parameters."""
        worker = self.worker
        worker.model.zero_grad()
        for micro_batch in worker.micro_batches(batch):
            loss = worker.loss(micro_batch)  # forward
            (micro_batch.share * loss).backward()
        # communicate: nothing, because the parameters are shared
        # update: in the shared memory, while other workers do the same
        worker.schedule_step = worker.version // worker.world_size
        with scaled_rate(self.optimizer, batch.weight):
            self.optimizer.step()
        self.exchange(batch.weight)
        return worker.mean_loss
