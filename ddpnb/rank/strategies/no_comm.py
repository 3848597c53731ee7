"""Train without communication, on every rank. Its speed is the ceiling for other strategies.

    rank i:  w_i  <-  w_i - lr * g_i(w_i)

g_i is the gradient of the mean loss over rank i's part of the global batch. All ranks compute at
the same time and send nothing. A strategy that shares the samples evenly cannot be faster than
``no-comm``. The run ends when the slowest rank is done, so a strategy that gives more samples to
fast ranks (``async``) can be faster. The result is rank 0's model, which was trained only on rank
0's part of the samples.

Reference: the local gradient step of Zinkevich et al., "Parallelized Stochastic Gradient Descent",
NeurIPS 2010, without the final average.

- Messages per step: 0.
- Bytes sent per step and rank: 0. After the last step, rank 0 broadcasts its weights.
"""

from dataclasses import replace
from typing import final

import torch.distributed as dist
from torch import Tensor, nn

from ddpnb.protocol.messages import RankState
from ddpnb.rank.strategies.base import Plan, Strategy
from ddpnb.rank.worker import Batch

_NOTE = "Ranks do not communicate, so the model was trained only on rank 0's share of the samples."


@final
class NoComm(Strategy):
    """Independent SGD on each rank."""

    def plan(self, state: RankState) -> Plan:
        """Return a plan to train on every rank. Ranks never wait, so each rank can stop early."""
        notes = (_NOTE,) if state.world_size > 1 else ()
        return replace(
            super().plan(state),
            in_lockstep=False,
            stops_alone=True,
            finish_is_timed=False,
            notes=notes,
        )

    def step(self, batch: Batch) -> Tensor:
        """Train on this rank's slice of one global batch, without other ranks."""
        worker = self.worker
        worker.model.zero_grad()
        for micro_batch in worker.micro_batches(batch):
            loss = worker.loss(micro_batch)  # forward
            (micro_batch.share * loss).backward()
        # communicate: nothing
        self.optimizer.step()
        return worker.mean_loss

    def finish(self) -> nn.Module:
        """Copy rank 0's weights to all ranks. Every rank takes part."""
        for parameter in self.worker.parameters:
            dist.broadcast(parameter.data, src=0)
        return self.worker.model
