"""Local SGD: ranks average their weights every few steps (every rank).

    each step:         w_i  <-  w_i - lr * g_i(w_i)                      on each rank i
    every H-th step:   w_i  <-  (1 / N) * sum over ranks j of w_j        after that

with g_i the gradient of the mean loss over rank i's own part of the global batch.  Momentum
is local.  With ``after`` = T the first T steps are synchronous SGD:
the gradients are averaged, and H is counted from there.

References: Stich, "Local SGD Converges Fast and Communicates Little", ICLR 2019; Lin et
al., "Don't Use Large Mini-batches, Use Local SGD", ICLR 2020 (post-local SGD: ``after``).

Messages: one all-reduce of all weights every H-th step (one for each dtype); before
``after`` one of all gradients each step; one of all weights at the end.
Bytes sent per rank: 2 (N - 1) / N * S in each of these steps, 0 in the others; S is the
bytes of all parameters.
"""

from dataclasses import replace
from typing import final

from torch import Tensor, nn

from ddpnb.protocol.messages import RankState
from ddpnb.rank.collectives.flat import FlatBuffer, gradients
from ddpnb.rank.strategies.base import Plan, Strategy
from ddpnb.rank.strategies.worker import Batch, Worker


@final
class LocalSgd(Strategy):
    """Local SGD, and post-local SGD.

    Args:
        every: H, the steps from one average to the next.
        after: steps of synchronous SGD at the beginning.
    """

    def __init__(self, *, every: int = 8, after: int = 0) -> None:
        self.every = every
        self.after = after
        self.num_steps = 0

    def plan(self, state: RankState) -> Plan:
        """Every rank; they wait for each other only to average."""
        return replace(super().plan(state), num_steps_ahead=self.every, averages_weights=True)

    def setup(self, worker: Worker) -> None:
        """Make this rank's own optimizer, and a buffer for all weights."""
        super().setup(worker)
        self.flat = FlatBuffer(worker.parameters)
        if worker.num_steps < self.after + self.every:
            few = f"{worker.num_steps} steps are fewer than {self.after + self.every}"
            worker.notes.append(f"Weights are averaged at the end alone: {few}.")

    def step(self, batch: Batch) -> Tensor:
        """Train on this rank's slice of one global batch; some steps end with an average."""
        worker, is_local = self.worker, self.num_steps >= self.after
        self.num_steps += 1
        # forward, backward: the gradient of this rank's own mean
        loss = worker.compute_gradients(batch, weight=1 if is_local else batch.weight)
        # agree on gradients: takes part: every rank
        if not is_local:
            self.flat.sum(gradients(worker.parameters))
        # update: each rank its own weights
        worker.update(self.optimizer)
        # agree on weights: takes part: every rank
        if is_local and (self.num_steps - self.after) % self.every == 0:
            self.flat.average(worker.parameters)
        return loss

    def finish(self) -> nn.Module:
        """Average once more; takes part: every rank."""
        self.flat.average(self.worker.parameters)
        return self.worker.model
