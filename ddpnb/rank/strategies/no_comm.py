"""No communication: the ceiling of what strategies can reach here (every rank).

    rank i:  w_i  <-  w_i - lr * g_i(w_i)

with g_i the gradient of the mean loss over rank i's own part of the global batch.  All ranks
compute at once and nothing is sent: no strategy that shares the samples evenly can be faster.
The run is over when the slowest rank is done; a strategy that gives a fast rank more samples,
as ``async`` does, may be faster.  Rank 0's model is the result; it has learned only from rank
0's part.

Reference: the local gradient step of Zinkevich et al., "Parallelized Stochastic Gradient
Descent", NeurIPS 2010, without its average at the end.

Messages per step: none.  Bytes sent per step and rank: 0.  After the last step rank 0's
weights are broadcast.
"""

from dataclasses import replace
from typing import final

import torch.distributed as dist
from torch import Tensor, nn

from ddpnb.protocol.messages import RankState
from ddpnb.rank.strategies.base import Plan, Strategy
from ddpnb.rank.worker import Batch

_NOTE = "no-comm sends nothing: its model has learnt from rank 0's share of the samples alone."


@final
class NoComm(Strategy):
    """Each rank for itself."""

    def plan(self, state: RankState) -> Plan:
        """Every rank; none waits for another, so each stops where it is."""
        notes = (_NOTE,) if state.world_size > 1 else ()
        return replace(
            super().plan(state), num_steps_ahead=None, finish_is_timed=False, notes=notes
        )

    def step(self, batch: Batch) -> Tensor:
        """Train on this rank's slice of one global batch, alone."""
        # forward, backward
        loss = self.worker.compute_gradients(batch)
        # agree: with no other rank
        # update
        self.worker.update(self.optimizer)
        return loss

    def finish(self) -> nn.Module:
        """Take rank 0's weights; takes part: every rank."""
        for parameter in self.worker.parameters:
            dist.broadcast(parameter.data, src=0)
        return self.worker.model
