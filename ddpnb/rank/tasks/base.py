"""What is trained: a model, the step on a batch, an optimizer and samples (ranks)."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor, nn

from ddpnb.protocol.errors import UserError, kind_of
from ddpnb.rank.tasks.batches import Tree
from ddpnb.rank.tasks.optimizers import TaskOptimizer
from ddpnb.rank.tasks.samples import Samples

ModelFactory = Callable[[], nn.Module]
"""Makes the plain model, with weights from torch's global random numbers."""

LossFunction = Callable[[Any, Any], Tensor]
"""Takes outputs and targets; returns the *mean* loss over the samples, a tensor of shape ()."""

OptimizerFactory = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
"""Makes an optimizer of the parameters that it is given."""

StepFunction = Callable[[nn.Module, Tree], Tensor | Mapping[str, Any]]
"""Takes a model, or what a strategy wraps it in, and a batch.

Returns the *mean* loss over the samples, a tensor of shape (), or a dict with it as ``loss``.
Other numbers in the dict are measured as the loss is.
"""

Number = float | Tensor
"""A number, or a tensor with a single one."""


@final
@dataclass(frozen=True, slots=True)
class Supervised:
    """The step on batches of (inputs, targets): the model, then a loss of its outputs."""

    loss: LossFunction = nn.functional.cross_entropy

    def __call__(self, model: nn.Module, batch: Tree) -> Tensor:
        """Return the mean loss."""
        inputs, targets = batch
        return self.loss(model(inputs), targets)


CLASSIFY = Supervised()
"""The default step, with cross-entropy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One thing to train, whether built in or written in a cell."""

    model: ModelFactory
    train: Samples
    held_out: Samples
    optimizer: TaskOptimizer
    step: StepFunction = CLASSIFY
    validation_step: Callable[[nn.Module, Tree], Number | Mapping[str, Number]] | None = None
    """Measures a model on one held-out batch; the mean over the samples is reported.

    Beside a ``metric`` it may return outputs and targets for it.
    """
    metric: Callable[[Any, Any], Number | Mapping[str, Number]] | None = None
    """Measures all held-out outputs against all targets."""
    has_loss: bool = True
    """Whether the task says what the loss is, and does not merely leave it to the default."""
    notes: tuple[str, ...] = ()
    """Shown beside every result, e.g. that the data are synthetic."""
    defined: Mapping[str, object] = field(default_factory=dict)
    """All names that the task's cell defines; empty for a built-in task."""

    @property
    def has_measures(self) -> bool:
        """Whether the task measures held-out samples itself."""
        return self.validation_step is not None or self.metric is not None


def split_step(result: Tensor | Mapping[str, Any]) -> tuple[Tensor, Mapping[str, Number]]:
    """Return the loss and the further numbers of what a step has returned.

    Of other mappings than a plain dict, such as the outputs of transformers' models, the loss
    alone is taken.

    Raises:
        UserError: it is neither a tensor nor a mapping.
    """
    if isinstance(result, Tensor):
        return result, {}
    if not isinstance(result, Mapping):
        raise UserError(
            f"training_step(model, batch) returned {kind_of(result)}; "
            "return the mean over the samples, a tensor of shape ()."
        )
    loss: Tensor = result["loss"]
    if type(result) is not dict:
        return loss, {}
    return loss, {name: each for name, each in result.items() if name != "loss"}
