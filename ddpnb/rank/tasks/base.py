"""The parts of a training task: model, step, optimizer and samples.  Runs on the ranks."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor, nn

from ddpnb.protocol.errors import UserError
from ddpnb.rank.tasks.batches import Tree, shape_of
from ddpnb.rank.tasks.samples import Samples

ModelFactory = Callable[[], nn.Module]
"""Function that creates the plain model, with weights from torch's global random generator."""

OptimizerFactory = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
"""Function that creates an optimizer for a list of parameters."""

StepFunction = Callable[[nn.Module, Tree], Tensor | Mapping[str, Any]]
"""Function that takes a model (or its wrapper) and a batch, and computes the batch's loss.

The function returns the *mean* loss over the samples as a tensor of shape (), or a dict that maps
``"loss"`` to this tensor. Like the loss, other numbers in the dict are averaged over the samples.
"""

Number = float | Tensor
"""A number, or a tensor with one number."""

STEP_CALL = "training_step(model, batch)"
LOSS = "loss(outputs, targets)"


@final
@dataclass(frozen=True, slots=True)
class Supervised:
    """A step that computes the loss of the model's outputs, for batches of (inputs, targets)."""

    loss: Callable[[Any, Any], Tensor] = nn.functional.cross_entropy
    """Function of outputs and targets that returns the *mean* loss, a tensor of shape ()."""

    def __call__(self, model: nn.Module, batch: Tree) -> Tensor:
        """Return the mean loss."""
        inputs, targets = batch
        return self.loss(model(inputs), targets)


CLASSIFY = Supervised()
"""The default step, with cross-entropy as the loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A training task, built-in or defined in a cell."""

    model: ModelFactory
    train: Samples
    held_out: Samples
    step: StepFunction = CLASSIFY
    optimizer: Callable[..., Any] | None = None
    """The cell's ``optimizer`` function. If None, ddpnb uses SGD with the comparison's options."""
    validation_step: Callable[[nn.Module, Tree], Number | Mapping[str, Number]] | None = None
    """Function that evaluates a model on one held-out batch. ddpnb reports the mean over samples.

    If the task has a ``metric``, this function may return outputs and targets for the metric.
    """
    metric: Callable[[Any, Any], Number | Mapping[str, Number]] | None = None
    """Function that computes scores from all held-out outputs and targets."""
    has_loss: bool = True
    """True if the task defines the loss. False if ddpnb uses the default loss."""
    notes: tuple[str, ...] = ()
    defined: Mapping[str, object] = field(default_factory=dict)
    """Variables of the task's cell and of earlier cells (empty for a built-in task)."""

    @property
    def has_measures(self) -> bool:
        """True if the task defines its own scores for held-out samples."""
        return self.validation_step is not None or self.metric is not None


def split_step(result: object, call: str = STEP_CALL) -> tuple[Tensor, Mapping[str, Number]]:
    """Return the loss and the other numbers in the result of a step.

    Other numbers are returned only if the result is a plain dict. The output of a transformers
    model is not a plain dict. ``call`` is the name of the step in messages.

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


def evaluated_loss(step: StepFunction, model: nn.Module, batch: Tree) -> Tensor:
    """Return the loss of a batch.  Gradients are off, except in a user's step, which may need them.

    For example, the loss may contain a gradient penalty.
    """
    with torch.set_grad_enabled(not isinstance(step, Supervised)):
        return split_step(step(model, batch))[0]
