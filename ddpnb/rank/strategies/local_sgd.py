"""Local SGD: ranks train independently and average their weights every few steps.

    each step:         w_i  <-  w_i - lr * g_i(w_i)                      on each rank i
    every H-th step:   w_i  <-  (1 / N) * sum over ranks j of w_j        after that

g_i is the gradient of the mean loss over rank i's part of the global batch. Each rank has its
own optimizer state, which is never averaged. Every rank takes part in each average.

Reference: Stich, "Local SGD Converges Fast and Communicates Little", ICLR 2019 (arXiv:1805.09767).

- Messages per dtype: one all-reduce of all weights in every H-th step. If ranks took steps after
  the last average, there is one more all-reduce at the end.
- Bytes sent per rank, with N ranks: 2 (N - 1) / N * S in every H-th step, and 0 in the other steps.
  S is the size of all parameters in bytes.
"""

from dataclasses import replace

from torch import Tensor, nn

from ddpnb.protocol.messages import RankState
from ddpnb.rank.collectives.flat import FlatBuffer
from ddpnb.rank.strategies.base import Plan, Strategy
from ddpnb.rank.worker import Batch, Worker


class LocalSgd(Strategy):
    """Independent SGD on each rank, with an average of all weights every few steps.

    Args:
        every: H, the number of steps between two averages.
    """

    def __init__(self, *, every: int = 8) -> None:
        self.every = every
        self.num_steps = 0

    def plan(self, state: RankState) -> Plan:
        """Return a plan to train on every rank. Ranks wait for each other only to average."""
        return replace(super().plan(state), in_lockstep=False, averages_weights=True)

    def setup(self, worker: Worker) -> None:
        """Create this rank's optimizer, and a flat buffer for all weights."""
        super().setup(worker)
        self.flat = FlatBuffer(worker.parameters)

    def step(self, batch: Batch) -> Tensor:
        """Train on this rank's slice of one global batch. Every H-th step averages the weights."""
        worker = self.worker
        worker.model.zero_grad()
        for micro_batch in worker.micro_batches(batch):
            loss = worker.loss(micro_batch)  # forward
            (micro_batch.share * loss).backward()
        # update: each rank without the others
        self.optimizer.step()
        # communicate: every rank takes part
        self.num_steps += 1
        if self.num_steps % self.every == 0:
            self.end_round()
        return worker.mean_loss

    def finish(self) -> nn.Module:
        """Average the weights if ranks took steps after the last average. Every rank takes part."""
        if self.num_steps % self.every != 0:
            # not end_round(), because diloco's short last round has no outer step
            self.flat.average(self.flat.tensors)
        return self.worker.model

    def end_round(self) -> None:
        """Average all weights. Every rank takes part."""
        self.flat.average(self.flat.tensors)
