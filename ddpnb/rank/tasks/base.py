"""What is trained: which model, on which samples, with which loss and optimizer?  (Every rank.)"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ddpnb.rank.tasks.samples import Samples

ModelFactory = Callable[[], nn.Module]
"""Makes the plain model, with weights from torch's global random numbers."""

LossFunction = Callable[[Tensor, Tensor], Tensor]
"""Outputs and targets to their loss: the *mean* over the samples, a tensor of shape ()."""

OptimizerFactory = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
"""Makes the optimizer of these parameters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One thing to train, in the same terms whether built in or written in a cell."""

    model: ModelFactory
    train: Samples
    held_out: Samples
    optimizer: OptimizerFactory
    loss: LossFunction = nn.functional.cross_entropy
    notes: tuple[str, ...] = ()
    """What must stand beside every result, e.g. that the data are synthetic."""
    defined: Mapping[str, object] = field(default_factory=dict)
    """All that the task's cell defines; nothing where the task is built in."""


def default_optimizer(learning_rate: float) -> OptimizerFactory:
    """Return the factory of what is used where a task names no optimizer: SGD, momentum 0.9."""

    def make(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=learning_rate, momentum=0.9)

    return make
