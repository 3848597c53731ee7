"""Local SGD: ranks average their weights every few steps (every rank).

    each step:         w_i  <-  w_i - lr * g_i(w_i)                      on each rank i
    every H-th step:   w_i  <-  (1 / N) * sum over ranks j of w_j        after that

with g_i the gradient of the mean loss over rank i's own part of the global batch.  Momentum
is local.

Reference: Stich, "Local SGD Converges Fast and Communicates Little", ICLR 2019.

Messages: one all-reduce of all weights every H-th step (one for each dtype), and one at
the end if there were steps since.
Bytes sent per rank: 2 (N - 1) / N * S in each of these steps, 0 in the others; S is the
bytes of all parameters.
"""

from dataclasses import replace

from torch import Tensor, nn

from ddpnb.protocol.messages import RankState
from ddpnb.rank.collectives.flat import FlatBuffer
from ddpnb.rank.strategies.base import Plan, Strategy
from ddpnb.rank.worker import Batch, Worker


class LocalSgd(Strategy):
    """Steps alone, averages together.

    Args:
        every: H, the steps from one average to the next.
    """

    def __init__(self, *, every: int = 8) -> None:
        self.every = every
        self.num_steps = 0

    def plan(self, state: RankState) -> Plan:
        """Every rank; they wait for each other only to average."""
        return replace(super().plan(state), num_steps_ahead=self.every, averages_weights=True)

    def setup(self, worker: Worker) -> None:
        """Make this rank's own optimizer, and a buffer for all weights."""
        super().setup(worker)
        self.flat = FlatBuffer(worker.parameters)

    def step(self, batch: Batch) -> Tensor:
        """Train on this rank's slice of one global batch; every H-th one ends with an average."""
        worker = self.worker
        # forward, backward, update: each rank alone
        loss = worker.compute_gradients(batch)
        worker.update(self.optimizer)
        # agree: takes part: every rank
        self.num_steps += 1
        if self.num_steps % self.every == 0:
            self.agree()
        return loss

    def finish(self) -> nn.Module:
        """Average if there were steps since the ranks last agreed; takes part: every rank."""
        if self.num_steps % self.every != 0:
            self.flat.average(self.worker.parameters)
        return self.worker.model

    def agree(self) -> None:
        """Average all weights; takes part: every rank."""
        self.flat.average(self.worker.parameters)
