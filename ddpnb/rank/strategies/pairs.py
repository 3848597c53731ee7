"""How do ranks train that each meet one neighbour in each step?  (Every rank.)

    w_i'  =   w_i - lr * g_i(w_i)          on each rank i
    w_i  <-   (w_i' + w_j') / 2            j: the neighbour that i meets in this step

with g_i the gradient of the mean loss over rank i's own part of the global batch.  The
ranks stand in a ring; in step k those at k, k + 2, ... each meet the next one, so that
each meets its left and its right neighbour in turn.  Of an odd number one rests, each
step another.  Nobody waits for more than the neighbour; weights agree only nearly, and
their mean moves as in synchronous SGD.

Reference: Lian et al., "Can Decentralized Algorithms Outperform Centralized Algorithms?",
NeurIPS 2017 (D-PSGD); here the pairs change from step to step.

Messages per step and rank: all weights to one neighbour, and its own back (for each dtype);
at the end one all-reduce of all weights.
Bytes sent per step and rank: S, the bytes of all parameters; 0 by a rank that rests.
"""

from dataclasses import replace
from typing import final

import torch
import torch.distributed as dist
from torch import nn

from ddpnb.rank.strategies.base import Batch, Plan, Replica, StepReport, SynchronousStrategy
from ddpnb.rank.strategies.support.flat import Flat
from ddpnb.wire import RankState


@final
class Pairs(SynchronousStrategy):
    """Averages in pairs that change from step to step: ``gossip:together=on``."""

    def plan(self, state: RankState) -> Plan:
        """Every rank; one is ahead of another by as many steps as it takes news to come by."""
        return replace(super().plan(state), num_ahead=state.world_size)

    def setup(self, replica: Replica) -> None:
        """Make this rank's own optimizer, and room for both ranks' weights."""
        super().setup(replica)
        self._mine = Flat(replica.parameters)
        self._theirs = Flat(replica.parameters)
        self._num_steps = replica.first_step

    def step(self, batch: Batch) -> StepReport:
        """Train on this rank's part of one global batch; takes part: one neighbour."""
        replica = self._replica
        # forward, backward, update: each rank alone
        loss = replica.compute_gradients(batch)
        replica.update(self._optimizer)
        # agree: takes part: this rank and the one that it meets
        neighbour = met_in(self._num_steps, rank=replica.rank, world_size=replica.world_size)
        num_sent = 0 if neighbour is None else self._average_with(neighbour)
        self._num_steps += 1
        return StepReport(loss=loss, num_samples=batch.num_samples, num_bytes_sent=num_sent)

    def finish(self) -> nn.Module:
        """Average over all; takes part: every rank."""
        self._mine.average(self._replica.parameters)
        return self._replica.model

    def _average_with(self, neighbour: int) -> int:
        """Take the mean of both ranks' weights; return the bytes sent."""
        self._replica.timer.begin("communication")
        self._mine.gather(self._replica.parameters)
        both = [
            dist.P2POp(operation, buffer, neighbour)
            for operation, flat in ((dist.isend, self._mine), (dist.irecv, self._theirs))
            for buffer in flat.buffers
        ]
        for work in dist.batch_isend_irecv(both):
            work.wait()
        for mine, theirs in zip(self._mine.buffers, self._theirs.buffers, strict=True):
            torch.add(mine, theirs, out=mine).div_(2)
        self._mine.scatter(self._replica.parameters)
        return self._mine.num_bytes


def met_in(step: int, *, rank: int, world_size: int) -> int | None:
    """Return the rank that a rank meets in a step; None where it rests."""
    place = (rank - step) % world_size
    other = place ^ 1
    return None if other >= world_size else (other + step) % world_size
