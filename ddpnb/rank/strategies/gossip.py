"""Gossip: in each step, each rank averages its weights with one neighbour.  Every rank takes part.

    w_i'  =   w_i - lr * g_i(w_i)          on each rank i
    w_i  <-   (w_i' + w_j') / 2            j: the partner of i in this step

g_i is the gradient of the mean loss over rank i's part of the global batch. The ranks form a ring.
In step k, the partner of each of the ranks k, k + 2, ... is the next rank. So each rank alternates
between its left and right neighbour. If the number of ranks is odd, a different rank is idle in
each step. A rank waits only for its partner. Each rank has a separate optimizer and momentum. All
ranks' weights stay nearly equal, and their mean moves as in synchronous SGD. At the end, every rank
gets the mean of all weights.

Reference: Lian et al., "Can Decentralized Algorithms Outperform Centralized Algorithms?", NeurIPS
2017 (D-PSGD). In ddpnb, the pairs change from step to step.

- Messages per step, rank and dtype: one message with all weights to the partner, and one such
  message from the partner. After the last step: one all-reduce of all weights.
- Bytes sent per step and rank: S, the size of all parameters. An idle rank sends 0 bytes.
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
    """SGD on each rank, with an average of two ranks' weights after each step."""

    def plan(self, state: RankState) -> Plan:
        """Return a plan to train on every rank. Ranks may be up to ``world_size`` steps apart."""
        return replace(super().plan(state), in_lockstep=False, averages_weights=True)

    def setup(self, worker: Worker) -> None:
        """Create this rank's optimizer, and flat buffers for its own and its partner's weights."""
        super().setup(worker)
        self.mine, self.theirs = FlatBuffer(worker.parameters), FlatBuffer(worker.parameters)
        self.num_steps = 0

    def step(self, batch: Batch) -> Tensor:
        """Train on this rank's slice of one global batch."""
        worker = self.worker
        worker.model.zero_grad()
        for micro_batch in worker.micro_batches(batch):
            loss = worker.loss(micro_batch)  # forward
            (micro_batch.share * loss).backward()
        # update: each rank by itself
        self.optimizer.step()
        # communicate: this rank and its partner take part
        partner = partner_in_step(self.num_steps, rank=worker.rank, world_size=worker.world_size)
        if partner is not None:
            self.average_with(partner)
        self.num_steps += 1
        return worker.mean_loss

    def finish(self) -> nn.Module:
        """Average the weights of all ranks. Every rank takes part."""
        self.mine.average(self.mine.tensors)
        return self.worker.model

    def average_with(self, partner: int) -> None:
        """Average the weights of two ranks. This rank and its partner take part."""
        self.mine.pack(self.mine.tensors)
        exchange = [
            dist.P2POp(operation, buffer, partner)
            for operation, flat in ((dist.isend, self.mine), (dist.irecv, self.theirs))
            for buffer in flat.buffers
        ]
        for work in dist.batch_isend_irecv(exchange):
            work.wait()
        for mine, theirs in zip(self.mine.buffers, self.theirs.buffers, strict=True):
            torch.add(mine, theirs, out=mine).div_(2)
        self.mine.unpack(self.mine.tensors)


def partner_in_step(step: int, *, rank: int, world_size: int) -> int | None:
    """Return the rank's partner in a step, or None if the rank is idle."""
    position = (rank - step) % world_size
    other = position ^ 1
    return None if other >= world_size else (other + step) % world_size
