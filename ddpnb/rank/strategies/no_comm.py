"""How fast would this host train if the ranks never had to talk?  (Every rank.)

    rank i:  w_i  <-  w_i - lr * g_i(w_i)

with g_i the gradient of the mean loss over rank i's own part of the global batch.  All
ranks compute at once and nothing is sent: the ceiling of what a strategy can reach here
that shares the samples evenly.  The run is over when the slowest rank is done; who gives
a fast rank more, as ``async`` does, may be faster.  Rank 0's model counts; it has learnt
from its own part alone.

Reference: the local gradient step of Zinkevich et al., "Parallelized Stochastic Gradient
Descent", NeurIPS 2010, without its average at the end.

Messages per step: none.  Bytes sent per step and rank: 0.  After the last step rank 0's
weights are broadcast.
"""

from collections.abc import Iterator
from typing import final

import torch.distributed as dist
from torch import nn

from ddpnb.rank.order import Share
from ddpnb.rank.strategies.base import Batch, Memory, Plan, Replica, StepReport, Strategy
from ddpnb.rank.strategies.support.flat import Flat, meeting_place, memory_of
from ddpnb.wire import RankState

_NOTE = "no-comm sends nothing: its model has learnt from rank 0's share of the samples alone."


@final
class NoComm(Strategy):
    """Each rank for itself."""

    def plan(self, state: RankState) -> Plan:
        """Every rank."""
        num = state.world_size
        notes = (_NOTE,) if num > 1 else ()
        # Nobody waits for anybody: num_ahead is what a stop allows for.
        return Plan(num_ranks=num, num_workers=num, synchronous=True, num_ahead=1, notes=notes)

    def setup(self, replica: Replica) -> None:
        """Make the optimizer."""
        self._replica = replica
        self._optimizer = replica.optimizer(replica.parameters)

    def shares(self) -> Iterator[Share]:
        """This rank's part of every global batch."""
        return self._replica.shares()

    def step(self, batch: Batch) -> StepReport:
        """Train on this rank's part of one global batch, alone."""
        # forward, backward
        loss = self._replica.compute_gradients(batch)
        # agree: with nobody
        # update
        self._replica.update(self._optimizer)
        return StepReport(loss=loss, num_samples=batch.num_samples)

    def memory(self) -> Memory:
        """All of both."""
        return memory_of(self._replica.model.parameters(), self._optimizer)

    def finish(self) -> nn.Module:
        """Take rank 0's weights; takes part: every rank."""
        parameters = self._replica.parameters
        flat = Flat(parameters, meeting_place(self._replica.device))
        flat.gather(parameters)
        for buffer in flat.buffers:
            dist.broadcast(buffer, src=0)
        flat.scatter(parameters)
        return self._replica.model

    def close(self) -> None:
        """Nothing to let go of."""
