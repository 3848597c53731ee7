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

from torch import nn

from ddpnb.protocol.messages import RankState
from ddpnb.rank.comm.flat_buffers import FlatBuffer, gradients
from ddpnb.rank.strategies.base import Plan, SynchronousStrategy
from ddpnb.rank.strategies.replica import Batch, Replica, StepReport


@final
class LocalSgd(SynchronousStrategy):
    """Local SGD, and post-local SGD.

    Args:
        every: H, the steps from one average to the next.
        after: steps of synchronous SGD at the beginning.
    """

    averages_weights = True
    is_mean = True

    def __init__(self, *, every: int = 8, after: int = 0) -> None:
        self._every = every
        self._after = after

    def plan(self, state: RankState) -> Plan:
        """Every rank; they wait for each other only to average."""
        return replace(super().plan(state), num_steps_ahead=self._every)

    def setup(self, replica: Replica) -> None:
        """Make this rank's own optimizer, and a buffer for all weights."""
        super().setup(replica)
        self._flat = FlatBuffer(replica.parameters)
        self._num_steps = replica.first_step

    def step(self, batch: Batch) -> StepReport:
        """Train on this rank's part of one global batch; some steps end with an average."""
        replica = self._replica
        num_sent, is_local = 0, self._num_steps >= self._after
        self._num_steps += 1
        # forward, backward: the gradient of this rank's own mean
        loss = replica.compute_gradients(batch, weight=1 if is_local else batch.weight)
        # agree on gradients: takes part: every rank
        if not is_local:
            replica.timer.begin("communication")
            num_sent = self._flat.sum(gradients(replica.parameters))
        # update: each rank its own weights
        replica.update(self._optimizer)
        # agree on weights: takes part: every rank
        if is_local and (self._num_steps - self._after) % self._every == 0:
            replica.timer.begin("communication")
            num_sent = self._flat.average(replica.parameters)
        return batch.report(loss, num_bytes_sent=num_sent)

    def notes(self) -> tuple[str, ...]:
        """Warn where the training ends before the first average."""
        num_steps = self._replica.first_step + self._replica.num_steps
        if num_steps - self._after >= self._every:
            return ()
        few = f"{num_steps} steps are fewer than {self._after + self._every}"
        return (f"Weights are averaged at the end alone: {few}.",)

    def finish(self) -> nn.Module:
        """Average once more; takes part: every rank."""
        self._flat.average(self._replica.parameters)
        return self._replica.model
