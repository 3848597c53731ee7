"""What is trained: a model, the step on a batch, an optimizer and samples (ranks)."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor, nn

from ddpnb.protocol.errors import UserError
from ddpnb.rank.tasks.batches import Tree, shape_of
from ddpnb.rank.tasks.samples import Samples

ModelFactory = Callable[[], nn.Module]
"""Makes the plain model, with weights from torch's global random numbers."""

OptimizerFactory = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
"""Makes an optimizer of the parameters that it is given."""

StepFunction = Callable[[nn.Module, Tree], Tensor | Mapping[str, Any]]
"""Takes a model, or what a strategy wraps it in, and a batch.

Returns the *mean* loss over the samples, a tensor of shape (), or a dict with it as ``loss``.
Other numbers in the dict are measured as the loss is.
"""

Number = float | Tensor
"""A number, or a tensor with a single one."""

STEP = "training_step(model, batch)"
LOSS = "loss(outputs, targets)"


@final
@dataclass(frozen=True, slots=True)
class Supervised:
    """The step on batches of (inputs, targets): the model, then a loss of its outputs."""

    loss: Callable[[Any, Any], Tensor] = nn.functional.cross_entropy
    """Takes outputs and targets; returns the *mean* over the samples, a tensor of shape ()."""

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
    step: StepFunction = CLASSIFY
    optimizer: Callable[..., Any] | None = None
    """The cell's own; None: SGD, as the options say."""
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


def split_step(result: object, call: str = STEP) -> tuple[Tensor, Mapping[str, Number]]:
    """Return the loss and the further numbers of what a step has returned.

    Of other mappings than a plain dict, such as the outputs of transformers' models, the loss
    alone is taken.  Messages call the step ``call``.

    Raises:
        UserError: there is no loss in it.
    """
    loss = result.get("loss") if isinstance(result, Mapping) else result
    if not isinstance(loss, Tensor) or loss.ndim > 0:
        raise UserError(
            f"{call} returned {shape_of(result)}; return the mean over the samples, a tensor of "
            "shape (), or a dict with it as 'loss'."
        )
    if type(result) is not dict:
        return loss, {}
    return loss, {name: each for name, each in result.items() if name != "loss"}
