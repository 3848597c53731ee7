"""Gossip: each rank averages its weights with one neighbour in each step (every rank).

    w_i'  =   w_i - lr * g_i(w_i)          on each rank i
    w_i  <-   (w_i' + w_j') / 2            j: the partner of i in this step

with g_i the gradient of the mean loss over rank i's part of the global batch.  The ranks form a
ring.  In step k ranks k, k + 2, ... each meet the next one, so that each rank meets its left and
its right neighbour in turn.  Of an odd number one rests, another in each step.  No rank waits for
any other than its partner, and each has its own optimizer, momentum included.  Weights agree only
nearly; their mean moves as in synchronous SGD.  All ranks end with the mean of all weights.

Reference: Lian et al., "Can Decentralized Algorithms Outperform Centralized Algorithms?",
NeurIPS 2017 (D-PSGD); here the pairs change from step to step.

Messages per step and rank: all weights to the partner, and its own back (for each dtype); at
the end one all-reduce of all weights.  Bytes sent per step and rank: S, the bytes of all
parameters; 0 by a rank that rests.
"""

from dataclasses import replace
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddpnb.protocol.messages import RankState
from ddpnb.rank.collectives.flat import FlatBuffer
from ddpnb.rank.strategies.base import Plan, Strategy
from ddpnb.rank.worker import Batch, Worker


@final
class Gossip(Strategy):
    """Averages in pairs that change from step to step."""

    def plan(self, state: RankState) -> Plan:
        """Every rank; as the waits pass on around the ring, ranks are up to N steps apart."""
        return replace(super().plan(state), num_steps_ahead=state.world_size, averages_weights=True)

    def setup(self, worker: Worker) -> None:
        """Make this rank's own optimizer, and buffers for both ranks' weights."""
        super().setup(worker)
        self.mine, self.theirs = FlatBuffer(worker.parameters), FlatBuffer(worker.parameters)
        self.num_steps = 0

    def step(self, batch: Batch) -> Tensor:
        """Train on this rank's slice of one global batch."""
        worker = self.worker
        # forward, backward, update: each rank alone
        loss = worker.compute_gradients(batch)
        worker.update(self.optimizer)
        # agree: takes part: this rank and its partner
        partner = partner_in_step(self.num_steps, rank=worker.rank, world_size=worker.world_size)
        if partner is not None:
            self.average_with(partner)
        self.num_steps += 1
        return loss

    def finish(self) -> nn.Module:
        """Average over all; takes part: every rank."""
        self.mine.average(self.worker.parameters)
        return self.worker.model

    def average_with(self, partner: int) -> None:
        """Take the mean of both ranks' weights; takes part: this rank and its partner."""
        self.mine.gather(self.worker.parameters)
        exchange = [
            dist.P2POp(operation, buffer, partner)
            for operation, flat in ((dist.isend, self.mine), (dist.irecv, self.theirs))
            for buffer in flat.buffers
        ]
        for work in dist.batch_isend_irecv(exchange):
            work.wait()
        for mine, theirs in zip(self.mine.buffers, self.theirs.buffers, strict=True):
            torch.add(mine, theirs, out=mine).div_(2)
        self.mine.scatter(self.worker.parameters)


def partner_in_step(step: int, *, rank: int, world_size: int) -> int | None:
    """Return the rank that a rank meets in a step; None where it rests."""
    position = (rank - step) % world_size
    other = position ^ 1
    return None if other >= world_size else (other + step) % world_size
