"""DiLoCo: an outer optimizer applies what ranks have learned apart (every rank).

    each step:         w_i  <-  w_i - lr * g_i(w_i)                     the task's optimizer
    every H-th step:   d  =  (1 / N) * sum over ranks i of (w - w_i)    the outer gradient
                       v  <-  m * v + d
                       w  <-  w - a * (d + m * v)                       Nesterov momentum
                       w_i  <-  w                                       on every rank

with g_i the gradient of the mean loss over rank i's own part of the global batch, a the
outer learning rate and m the outer momentum.  With a = 1 and m = 0 it is ``local-sgd``.

While d stays the same from round to round, v grows to d / (1 - m), and an outer step to
a / (1 - m) times d: its gain.  After H = 500 steps, the paper's, one d hardly resembles the last,
and a = 0.7, m = 0.9 do well.  After few steps it does, and their gain of 7 is 7 times the learning
rate.  The defaults here, for H = 8, have a gain of 1: the speed of ``local-sgd``, smoothed over
1 / (1 - m) = 2 rounds.

A last round of fewer than H steps ends in the plain mean of the weights, without outer step: a
whole momentum would be added to a part of a round, and no later round corrects it.

Reference: Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language
Models", 2023, algorithm 1: ``diloco:every=500,outer_lr=0.7,outer_momentum=0.9``.

Messages: one all-reduce of all weights every H-th step (one for each dtype), and one at
the end if there were steps since.
Bytes sent per rank: 2 (N - 1) / N * S in each H-th step, 0 in the others; S is the bytes
of all parameters.
"""

from dataclasses import replace
from typing import final

import torch
from torch import nn

from ddpnb.protocol.messages import RankState
from ddpnb.rank.comm.flat_buffers import FlatBuffer
from ddpnb.rank.strategies.base import Plan, State, SynchronousStrategy
from ddpnb.rank.strategies.replica import Batch, Memory, Replica, StepReport


@final
class DiLoCo(SynchronousStrategy):
    """Inner steps alone, outer steps together.

    Args:
        every: H, the inner steps of an outer one.
        outer_lr: a, the outer learning rate.
        outer_momentum: m, the outer Nesterov momentum.
    """

    averages_weights = True
    is_mean = True

    def __init__(
        self, *, every: int = 8, outer_lr: float = 0.5, outer_momentum: float = 0.5
    ) -> None:
        self._every = every
        self._outer_lr = outer_lr
        self._outer_momentum = outer_momentum

    def plan(self, state: RankState) -> Plan:
        """Every rank; they wait for each other only in outer steps."""
        return replace(super().plan(state), num_steps_ahead=self._every)

    def setup(self, replica: Replica) -> None:
        """Make both optimizers; the outer one is in the same state on every rank."""
        super().setup(replica)
        self._flat = FlatBuffer(replica.parameters)
        self._agreed = [nn.Parameter(p.detach().clone()) for p in replica.parameters]
        self._outer = torch.optim.SGD(
            self._agreed,
            lr=self._outer_lr,
            momentum=self._outer_momentum,
            nesterov=self._outer_momentum > 0,
        )
        self._num_inner = replica.first_step % self._every

    def step(self, batch: Batch) -> StepReport:
        """Train on this rank's part of one global batch; every H-th ends with an outer step."""
        replica = self._replica
        # forward, backward, update: each rank alone
        loss = replica.compute_gradients(batch)
        replica.update(self._optimizer)
        self._num_inner += 1
        # agree: takes part: every rank
        num_sent = self._agree() if self._num_inner == self._every else 0
        return batch.report(loss, num_bytes_sent=num_sent)

    def notes(self) -> tuple[str, ...]:
        """Warn where the training ends before the first outer step."""
        num_steps = self._num_inner + self._replica.num_steps
        if num_steps >= self._every:
            return ()
        few = f"{num_steps} steps are fewer than {self._every}"
        return (f"There is no outer step, weights are averaged at the end alone: {few}.",)

    def memory(self) -> Memory:
        """The weights of this rank and the agreed ones; the states of both optimizers."""
        parameters = [*self._replica.model.parameters(), *self._agreed]
        return Memory.of(parameters, self._optimizer, self._outer)

    def finish(self) -> nn.Module:
        """Average if there were inner steps since the last outer one; takes part: every rank."""
        if self._num_inner > 0:
            self._flat.average(self._replica.parameters)
        return self._replica.model

    def save(self, replica: Replica) -> State:
        """Return what every strategy needs, the agreed weights and the outer momentum."""
        return super().save(replica) | {
            "agreed": [parameter.detach().clone() for parameter in self._agreed],
            "outer": self._outer.state_dict(),
        }

    def load(self, replica: Replica, state: State) -> None:
        """Continue from there."""
        super().load(replica, state)
        for mine, theirs in zip(self._agreed, state["agreed"], strict=True):
            mine.data.copy_(theirs)
        self._outer.load_state_dict(state["outer"])

    @torch.no_grad()
    def _agree(self) -> int:
        """Make an outer step; takes part: every rank.  Return the bytes that each rank sends."""
        replica = self._replica
        replica.timer.begin("communication")
        num_sent = self._flat.average(replica.parameters)
        # The mean of w - w_i is w minus the mean of w_i.
        replica.timer.begin("optimizer")
        for agreed, mean in zip(self._agreed, replica.parameters, strict=True):
            agreed.grad = agreed - mean
        self._outer.step()
        for agreed, parameter in zip(self._agreed, replica.parameters, strict=True):
            parameter.copy_(agreed)
        self._num_inner = 0
        return num_sent
