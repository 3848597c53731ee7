"""DiLoCo: local steps on each rank, then a step of an outer optimizer.  Every rank takes part.

    each step:         w_i  <-  w_i - lr * g_i(w_i)                     the task's optimizer
    every H-th step:   d  =  (1 / N) * sum over ranks i of (w - w_i)    the outer gradient
                       v  <-  m * v + d
                       w  <-  w - a * (d + m * v)                       Nesterov momentum
                       w_i  <-  w                                       on every rank

g_i is the gradient of the mean loss over rank i's part of the global batch. a is the outer learning
rate and m is the outer momentum. With a = 1 and m = 0, DiLoCo is the same as ``local-sgd``.

A round is H steps and one outer step. If d is the same in every round, v grows to d / (1 - m), and
an outer step to a / (1 - m) times d. This factor is the gain. The gain is 7 in the paper, which has
H = 500, and 1 with the defaults here, which are for H = 8. With a small H, a gain of 7 acts like a
learning rate that is 7 times higher. With the defaults, 75 % of an outer step come from this
round's d, and 25 % from earlier rounds.

If the last round has fewer than H steps, it ends with the plain mean of the weights. An outer step
would add momentum from earlier, longer rounds, and would move the weights too far.

Reference: Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models",
2023 (arXiv:2311.08105), algorithm 1: ``diloco:every=500,outer_lr=0.7,outer_momentum=0.9``.

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
        # w: the weights after the last outer step
        self.shared = [nn.Parameter(p.detach().clone()) for p in worker.parameters]
        self.outer = torch.optim.SGD(
            self.shared,
            lr=self.outer_lr,
            momentum=self.outer_momentum,
            nesterov=self.outer_momentum > 0,
        )
        worker.optimizers.append(self.outer)

    @torch.no_grad()
    def end_round(self) -> None:
        """Take a step with the outer optimizer. Every rank takes part."""
        self.flat.average(self.flat.tensors)
        # The mean of w - w_i is w minus the mean of w_i.
        for shared, mean in zip(self.shared, self.flat.tensors, strict=True):
            shared.grad = shared - mean
        self.outer.step()
        for shared, parameter in zip(self.shared, self.flat.tensors, strict=True):
            parameter.copy_(shared)
