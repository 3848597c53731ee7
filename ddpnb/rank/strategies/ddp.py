"""How does DistributedDataParallel train?  (Every rank.)

    w  <-  w - lr * sum over ranks i of (b_i / B) * g_i(w)

with g_i the gradient of the mean loss over rank i's b_i samples of the global
batch of B: exactly the gradient of the mean loss over the whole batch.

Reference: Li et al., "PyTorch Distributed: Experiences on Accelerating Data
Parallel Training", PVLDB 13(12), 2020.

Messages per step: one all-reduce for each bucket of gradients (25 MB), sent while
the backward pass still works on the next; with buffers (BatchNorm's statistics)
also one broadcast from rank 0.
"""

from collections.abc import Iterator
from typing import final

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddpnb.rank.order import Share, every_step
from ddpnb.rank.strategies.base import Batch, Plan, Replica, StepReport, Strategy
from ddpnb.wire import RankState


@final
class Ddp(Strategy):
    """Torch's own ``DistributedDataParallel``, over the default process group."""

    def plan(self, state: RankState) -> Plan:
        """Every rank."""
        return Plan(num_ranks=state.world_size, num_workers=state.world_size, synchronous=True)

    def setup(self, replica: Replica) -> None:
        """Wrap the model, which broadcasts rank 0's weights; takes part: every rank."""
        self._replica = replica
        device_ids = [replica.device] if replica.device.type == "cuda" else None
        self._ddp = DistributedDataParallel(replica.model, device_ids=device_ids)
        self._optimizer = replica.optimizer(replica.parameters)

    def shares(self) -> Iterator[Share]:
        """This rank's part of every global batch."""
        replica = self._replica
        return every_step(replica.num_steps, part=replica.rank, num_parts=replica.world_size)

    def step(self, batch: Batch) -> StepReport:
        """Train on this rank's part of one global batch; takes part: every rank."""
        # forward; backward, and agree at the same time: DDP averages the gradients bucket by
        # bucket.  It divides by the number of ranks; the weight makes that a mean over samples.
        loss = self._replica.compute_gradients(
            batch,
            weight=self._replica.world_size * batch.weight,
            model=self._ddp,
            unsynced=self._ddp.no_sync,
        )
        # update: every rank the same
        self._replica.update(self._optimizer)
        return StepReport(loss=loss, num_samples=batch.num_samples)

    def finish(self) -> nn.Module:
        """Return the model inside the wrapper."""
        return self._replica.model

    def close(self) -> None:
        """Nothing to let go of: the process group belongs to the rank."""
