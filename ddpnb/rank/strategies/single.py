"""One device trains alone: the baseline of all others (rank 0).

    w  <-  w - lr * g(w),    g = gradient of the mean loss over the global batch

Reference: Robbins and Monro, "A Stochastic Approximation Method", Annals of
Mathematical Statistics 22(3), 1951.

Messages per step: none.  Bytes sent per step: 0.
"""

from collections.abc import Iterator
from typing import final

from ddpnb.protocol.messages import RankState
from ddpnb.rank.strategies.base import Plan, SynchronousStrategy
from ddpnb.rank.strategies.replica import Batch, StepReport
from ddpnb.rank.tasks.batches import Shard


@final
class Single(SynchronousStrategy):
    """Plain stochastic gradient descent; the other ranks rest."""

    def plan(self, state: RankState) -> Plan:
        """Rank 0 alone."""
        return Plan(num_ranks=1, num_workers=1, synchronous=True)

    def shards(self) -> Iterator[Shard]:
        """Every global batch, whole."""
        return self._replica.whole_batches()

    def step(self, batch: Batch) -> StepReport:
        """Train on one global batch."""
        # forward, backward
        loss = self._replica.compute_gradients(batch)
        # agree: there is no other rank
        # update
        self._replica.update(self._optimizer)
        return batch.report(loss)
