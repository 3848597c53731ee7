"""How good a model is on a split: its loss, its accuracy and the task's own numbers (ranks).

A model with averaged weights first gets BatchNorm's statistics of these weights, as SWA does:
Izmailov et al., "Averaging Weights Leads to Wider Optima and Better Generalization", UAI 2018.
"""

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import update_bn

from ddpnb.compat.torch_internals import tree_map, tree_map_only
from ddpnb.protocol.errors import UserError, kind_of
from ddpnb.rank.tasks.base import CLASSIFY, Supervised, Task, split_step
from ddpnb.rank.tasks.batches import Tree, moved, permutation, shape_of

MAX_SAMPLES = 10_000
"""How many samples of a larger split are evaluated, spread evenly over it."""
_BATCH_SIZE = 512
BATCHNORM_NOTE = (
    "Its weights are averages: before it is judged, BatchNorm's statistics are estimated anew on "
    "training samples, off the clock."
)
"""Stands beside the results of a model that ``estimate_batchnorm`` was called for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """The result on one split; NaN if it could not be evaluated."""

    loss: float = math.nan
    """Mean over the samples."""
    accuracy: float = math.nan
    """Fraction classified correctly, where the loss is the default one, cross-entropy; NaN if the
    outputs are no class scores, see ``_accuracy``, or if the task measures something else."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """What the task's ``validation_step`` and ``metric`` measure."""
    num_samples: int = 0
    """Samples that it was evaluated on."""

    @property
    def is_known(self) -> bool:
        """Whether the split has a loss or an accuracy."""
        return not math.isnan(self.loss) or not math.isnan(self.accuracy)


@torch.no_grad()
def score(
    model: nn.Module,
    task: Task,
    device: torch.device,
    *,
    max_samples: int = MAX_SAMPLES,
    batch_size: int = _BATCH_SIZE,
    is_held_out: bool = True,
    has_loss: bool = True,
) -> Score:
    """Evaluate a model on up to ``max_samples`` of a split; on the training split, only the loss.

    Without ``has_loss`` only what the task's ``validation_step`` and ``metric`` measure.  A measure
    that is no number is refused.
    """
    samples = task.held_out if is_held_out else task.train
    totals: dict[str, float] = {}
    pairs = []
    num_chosen = min(len(samples), max_samples)
    chosen = torch.arange(num_chosen, device="cpu") * len(samples) // num_chosen
    for indices in chosen.split(min(batch_size, _BATCH_SIZE)):
        batch = moved(samples.fetch(indices), device)
        numbers, pair = _measured(model, task, batch, is_held_out=is_held_out, has_loss=has_loss)
        if pair is not None:  # where any library's metric can read it
            pairs.append(tree_map_only(Tensor, Tensor.cpu, tuple(pair)))
        for name, value in numbers.items():
            totals[name] = totals.get(name, 0.0) + value * len(indices)
    found = {name: total / num_chosen for name, total in totals.items()}
    if pairs and task.metric is not None:
        outputs, targets = tree_map(_joined, *pairs)
        call = "metric(outputs, targets)"
        found |= _metrics_of(task.metric(outputs, targets), task.metric, call)
    return Score(
        loss=found.pop("loss", math.nan),
        accuracy=found.pop("accuracy", math.nan),
        metrics=found,
        num_samples=num_chosen,
    )


def _measured(
    model: nn.Module, task: Task, batch: Any, *, is_held_out: bool, has_loss: bool
) -> tuple[dict[str, float], tuple[Any, Any] | None]:
    """Return what one batch measures, and the outputs and targets that the task's metric gets."""
    numbers: dict[str, float] = {}
    pair = outputs = None
    if is_held_out and task.validation_step is not None:
        result: Any = task.validation_step(model, batch)
        if task.metric is not None and isinstance(result, tuple) and len(result) == 2:
            pair = result
        else:
            numbers = _metrics_of(result, task.validation_step, "validation_step(model, batch)")
    if is_held_out and task.metric is not None and pair is None:
        inputs, targets = pair_of(batch)
        outputs = model(inputs)
        pair = outputs, targets
    if not has_loss or "loss" in numbers:
        return numbers, pair
    if not isinstance(task.step, Supervised):
        with torch.enable_grad():  # a loss may be made of gradients, such as a penalty
            return numbers | {"loss": split_step(task.step(model, batch))[0].item()}, pair
    inputs, targets = pair_of(batch)
    outputs = model(inputs) if outputs is None else outputs
    numbers["loss"] = task.step.loss(outputs, targets).item()
    if is_held_out and task.step == CLASSIFY and not task.has_measures:
        numbers["accuracy"] = _accuracy(outputs, targets)
    return numbers, pair


def pair_of(batch: Any) -> tuple[Any, Any]:
    """Return inputs and targets; refuse a batch that is something else."""
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        size = f" of {len(batch)}" if isinstance(batch, tuple | list) else ""
        raise UserError(
            f"data(split) gives batches that are {kind_of(batch)}{size}, not (inputs, targets): "
            "define training_step(model, batch), and validation_step(model, batch), which returns "
            "measures, or (outputs, targets) for a metric."
        )
    inputs, targets = batch
    return inputs, targets


def _metrics_of(result: Any, function: Callable[..., Any], call: str) -> dict[str, float]:
    """Return what a function measured; a single number gets the function's own name."""
    if isinstance(result, Mapping):
        return {str(name): number_of(each, f"{call}'s {name!r}") for name, each in result.items()}
    name = getattr(function, "__name__", type(function).__name__)
    return {name: number_of(result, call)}


def number_of(value: Any, call: str) -> float:
    """Return a number, or a tensor or array with a single one; refuse anything else."""
    try:
        if not isinstance(value, str | bytes):
            return float(value.detach() if isinstance(value, Tensor) else value)
        raise TypeError
    except (TypeError, ValueError, RuntimeError):
        raise UserError(
            f"{call} returned {shape_of(value)}; return a number, or a dict of numbers with their "
            "names."
        ) from None


def _joined(*parts: Any) -> Any:
    """Return an output of all batches as that of one."""
    if isinstance(parts[0], Tensor):
        return torch.cat(parts) if parts[0].ndim else torch.stack(parts)
    if len(parts) == 1:
        return parts[0]
    raise UserError(
        f"metric(outputs, targets) is computed on all outputs together, and {kind_of(parts[0])} "
        "cannot be joined to the next: define validation_step(model, batch), which is averaged."
    )


def _accuracy(outputs: Tensor, targets: Tensor) -> float:
    """Return the fraction classified correctly; NaN if targets are no class numbers.

    Outputs (N, C, ...) and targets (N, ...) are what cross-entropy takes.  A sample with several
    targets, such as a line of text, counts by the fraction that is correct.
    """
    if targets.is_floating_point() or targets.min() < 0:  # probabilities; targets to be ignored
        return math.nan
    correct = (outputs.argmax(dim=1) == targets).double()
    return correct.reshape(len(correct), -1).mean(dim=1).mean().item()


def has_batchnorm(model: nn.Module) -> bool:
    """Return whether a model in evaluation mode uses statistics that BatchNorm has kept.

    ``SyncBatchNorm`` is left as it is: one rank alone cannot estimate its statistics.
    """
    is_synced = any(isinstance(each, nn.SyncBatchNorm) for each in model.modules())
    return bool(_batchnorms(model)) and not is_synced


def _batchnorms(model: nn.Module) -> list[nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d]:
    kinds = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d
    return [e for e in model.modules() if isinstance(e, kinds) and e.track_running_stats]


def estimate_batchnorm(
    model: nn.Module,
    task: Task,
    device: torch.device,
    *,
    batch_size: int,
    seed: int,
    max_samples: int = MAX_SAMPLES,
) -> None:
    """Estimate BatchNorm's statistics anew, for the weights as they are; one rank alone may.

    The task's step is made on up to ``max_samples`` training samples in the random order of a seed,
    in training mode, without backward pass or update.  The statistics are the means over the
    batches.  Layers that the forward pass leaves out, or the model keeps in evaluation mode, stay
    as they are.
    """
    chosen = permutation(len(task.train), seed)[:max_samples]
    num_batches = max(1, len(chosen) // min(batch_size, _BATCH_SIZE))
    batches = chosen.tensor_split(num_batches)  # no rest of a single sample
    before = {layer: copy.deepcopy(layer.state_dict()) for layer in _batchnorms(model)}
    try:
        update_bn(
            ((moved(task.train.fetch(each), device),) for each in batches), _Step(model, task)
        )
    finally:
        for layer, state in before.items():
            if not layer.num_batches_tracked:
                layer.load_state_dict(state)


class _Step(nn.Module):
    """A task's step, to be called as a model is."""

    def __init__(self, model: nn.Module, task: Task) -> None:
        super().__init__()
        self.model, self.task = model, task
        self.train(model.training)

    def forward(self, batch: Tree) -> None:
        with torch.set_grad_enabled(not isinstance(self.task.step, Supervised)):  # for a penalty
            self.task.step(self.model, batch)
