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

Messages and bytes are those of ``local-sgd``: an outer step is made of the average of all weights,
by every rank for itself.
"""

from typing import final

import torch
from torch import nn

from ddpnb.rank.strategies.local_sgd import LocalSgd
from ddpnb.rank.worker import Worker


@final
class DiLoCo(LocalSgd):
    """Local SGD with outer steps in place of averages.

    Args:
        every: H, the inner steps of an outer one.
        outer_lr: a, the outer learning rate.
        outer_momentum: m, the outer Nesterov momentum.
    """

    def __init__(
        self, *, every: int = 8, outer_lr: float = 0.5, outer_momentum: float = 0.5
    ) -> None:
        super().__init__(every=every)
        self.outer_lr = outer_lr
        self.outer_momentum = outer_momentum

    def setup(self, worker: Worker) -> None:
        """Make both optimizers; the outer one is in the same state on every rank."""
        super().setup(worker)
        self.agreed = [nn.Parameter(p.detach().clone()) for p in worker.parameters]
        self.outer = torch.optim.SGD(
            self.agreed,
            lr=self.outer_lr,
            momentum=self.outer_momentum,
            nesterov=self.outer_momentum > 0,
        )
        worker.optimizers.append(self.outer)

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
