"""The parts of a training task: model, step, optimizer and samples (ranks)."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor, nn

from ddpnb.protocol.errors import UserError
from ddpnb.rank.tasks.batches import Tree, shape_of
from ddpnb.rank.tasks.samples import Samples

ModelFactory = Callable[[], nn.Module]
"""Creates the plain model, with weights from torch's global random numbers."""

OptimizerFactory = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
"""Creates an optimizer for the given parameters."""

StepFunction = Callable[[nn.Module, Tree], Tensor | Mapping[str, Any]]
"""Computes the loss of a batch. The arguments are a model, possibly wrapped, and a batch.

Returns the *mean* loss over the samples as a tensor of shape (), or a dict with this tensor as
``loss``. ddpnb measures other numbers in the dict in the same way as the loss.
"""

Number = float | Tensor
"""A number, or a tensor with one number."""

STEP = "training_step(model, batch)"
LOSS = "loss(outputs, targets)"


@final
@dataclass(frozen=True, slots=True)
class Supervised:
    """The step for batches of (inputs, targets): the loss of the model's outputs."""

    loss: Callable[[Any, Any], Tensor] = nn.functional.cross_entropy
    """Takes outputs and targets. Returns the *mean* over the samples, a tensor of shape ()."""

    def __call__(self, model: nn.Module, batch: Tree) -> Tensor:
        """Return the mean loss."""
        inputs, targets = batch
        return self.loss(model(inputs), targets)


CLASSIFY = Supervised()
"""The default step, with cross-entropy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A training task, built-in or defined in a cell."""

    model: ModelFactory
    train: Samples
    held_out: Samples
    step: StepFunction = CLASSIFY
    optimizer: Callable[..., Any] | None = None
    """The cell's ``optimizer`` function. None: SGD with the options of the comparison."""
    validation_step: Callable[[nn.Module, Tree], Number | Mapping[str, Number]] | None = None
    """Measures a model on one held-out batch. The mean over the samples is reported.

    If the task has a ``metric``, the step may also return outputs and targets for the metric.
    """
    metric: Callable[[Any, Any], Number | Mapping[str, Number]] | None = None
    """Measures all held-out outputs against all targets."""
    has_loss: bool = True
    """True if the task defines the loss. False if the loss is the default."""
    notes: tuple[str, ...] = ()
    """Notes for every result, for example that the data are synthetic."""
    defined: Mapping[str, object] = field(default_factory=dict)
    """All names that the task's cell defines. Empty for a built-in task."""

    @property
    def has_measures(self) -> bool:
        """True if the task itself measures held-out samples."""
        return self.validation_step is not None or self.metric is not None


def split_step(result: object, call: str = STEP) -> tuple[Tensor, Mapping[str, Number]]:
    """Return the loss and the other numbers in the result of a step.

    If the result is a mapping other than a plain dict, only the loss is returned. An example is the
    output of a transformers model. ``call`` is the name of the step in messages.

    Raises:
        UserError: The result has no loss.
    """
    loss = result.get("loss") if isinstance(result, Mapping) else result
    if not isinstance(loss, Tensor) or loss.ndim > 0:
        raise UserError(
            f"{call} returned {shape_of(result)}. Return the mean loss over the samples as a "
            "tensor of shape (), or a dict with this tensor as 'loss'."
        )
    if type(result) is not dict:
        return loss, {}
    return loss, {name: each for name, each in result.items() if name != "loss"}
