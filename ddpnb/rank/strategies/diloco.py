"""DiLoCo: local steps on each rank, then a step of an outer optimizer.  Every rank takes part.

    each step:         w_i  <-  w_i - lr * g_i(w_i)                     the task's optimizer
    every H-th step:   d  =  (1 / N) * sum over ranks i of (w - w_i)    the outer gradient
                       v  <-  m * v + d
                       w  <-  w - a * (d + m * v)                       Nesterov momentum
                       w_i  <-  w                                       on every rank

g_i is the gradient of the mean loss over rank i's part of the global batch. a is the outer learning
rate and m is the outer momentum. With a = 1 and m = 0, DiLoCo is the same as ``local-sgd``.

If d is the same in every round, v approaches d / (1 - m). Then an outer step approaches d with a
gain of a / (1 - m). With H = 500, as in the paper, d hardly resembles the previous d, so a = 0.7
and m = 0.9 work well. If H is small, d is similar to the previous d, and the paper's gain of 7 acts
like a learning rate that is 7 times higher. The defaults, for H = 8, have a gain of 1. With the
defaults, outer steps are as large as in ``local-sgd``, but smoothed over 1 / (1 - m) = 2 rounds.

If the last round has fewer than H steps, it ends with the plain mean of the weights. An outer step
would add the full momentum to this round, and no later round would correct the error.

Reference: Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models",
2023, algorithm 1: ``diloco:every=500,outer_lr=0.7,outer_momentum=0.9``.

Messages and bytes are the same as in ``local-sgd``. Ranks average all weights, and then each rank
computes the outer step.
"""

from typing import final

import torch
from torch import nn

from ddpnb.rank.strategies.local_sgd import LocalSgd
from ddpnb.rank.worker import Worker


@final
class DiLoCo(LocalSgd):
    """Local SGD with steps of an outer optimizer instead of plain averages.

    Args:
        every: H, the number of inner steps for each outer step.
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
        """Create the inner and the outer optimizer. Every rank creates the same outer optimizer."""
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
        """Take a step with the outer optimizer. Every rank takes part."""
        self.flat.average(self.flat.tensors)
        # The mean of w - w_i is w minus the mean of w_i.
        for agreed, mean in zip(self.agreed, self.flat.tensors, strict=True):
            agreed.grad = agreed - mean
        self.worker.update(self.outer)
        for agreed, parameter in zip(self.agreed, self.flat.tensors, strict=True):
            parameter.copy_(agreed)
