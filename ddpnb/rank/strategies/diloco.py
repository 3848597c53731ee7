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
from torch import Tensor, nn

from ddpnb.protocol.messages import RankState
from ddpnb.rank.collectives.flat import FlatBuffer
from ddpnb.rank.strategies.base import Plan, Strategy
from ddpnb.rank.worker import Batch, Worker


@final
class DiLoCo(Strategy):
    """Inner steps alone, outer steps together.

    Args:
        every: H, the inner steps of an outer one.
        outer_lr: a, the outer learning rate.
        outer_momentum: m, the outer Nesterov momentum.
    """

    def __init__(
        self, *, every: int = 8, outer_lr: float = 0.5, outer_momentum: float = 0.5
    ) -> None:
        self.every = every
        self.outer_lr = outer_lr
        self.outer_momentum = outer_momentum
        self.num_inner = 0

    def plan(self, state: RankState) -> Plan:
        """Every rank; they wait for each other only in outer steps."""
        return replace(super().plan(state), num_steps_ahead=self.every, averages_weights=True)

    def setup(self, worker: Worker) -> None:
        """Make both optimizers; the outer one is in the same state on every rank."""
        super().setup(worker)
        self.flat = FlatBuffer(worker.parameters)
        self.agreed = [nn.Parameter(p.detach().clone()) for p in worker.parameters]
        self.outer = torch.optim.SGD(
            self.agreed,
            lr=self.outer_lr,
            momentum=self.outer_momentum,
            nesterov=self.outer_momentum > 0,
        )
        worker.optimizers.append(self.outer)

    def step(self, batch: Batch) -> Tensor:
        """Train on this rank's slice of one global batch; every H-th ends with an outer step."""
        worker = self.worker
        # forward, backward, update: each rank alone
        loss = worker.compute_gradients(batch)
        worker.update(self.optimizer)
        self.num_inner += 1
        # agree: takes part: every rank
        if self.num_inner == self.every:
            self.agree()
        return loss

    def finish(self) -> nn.Module:
        """Average if there were inner steps since the last outer one; takes part: every rank."""
        if self.num_inner > 0:
            self.flat.average(self.worker.parameters)
        return self.worker.model

    @torch.no_grad()
    def agree(self) -> None:
        """Make an outer step; takes part: every rank."""
        self.flat.average(self.worker.parameters)
        # The mean of w - w_i is w minus the mean of w_i.
        for agreed, mean in zip(self.agreed, self.worker.parameters, strict=True):
            agreed.grad = agreed - mean
        self.worker.update(self.outer)
        for agreed, parameter in zip(self.agreed, self.worker.parameters, strict=True):
            parameter.copy_(agreed)
        self.num_inner = 0
