"""How good a model is on a split: its loss, its accuracy and the task's own numbers (ranks).

A model with averaged weights first gets BatchNorm's statistics of these weights, as SWA does:
Izmailov et al., "Averaging Weights Leads to Wider Optima and Better Generalization", UAI 2018.
"""

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import update_bn

from ddpnb.protocol.errors import UserError, kind_of
from ddpnb.rank.tasks.base import CLASSIFY, StepFunction, Supervised, Task, split_step
from ddpnb.rank.tasks.batches import Tree, mapped, moved, shape_of
from ddpnb.rank.tasks.samples import Samples

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


@torch.no_grad()
def score(
    model: nn.Module,
    task: Task,
    samples: Samples,
    device: torch.device,
    *,
    max_samples: int = MAX_SAMPLES,
    batch_size: int = _BATCH_SIZE,
    is_held_out: bool = True,
    has_loss: bool = True,
) -> Score:
    """Evaluate a model on up to ``max_samples`` of a split; of one to train on only the loss.

    Without ``has_loss`` only what the task's ``validation_step`` and ``metric`` measure.

    Raises:
        UserError: a measure is not a number.
    """
    means: dict[str, _Mean] = {}
    outputs: list[Any] = []
    targets: list[Any] = []
    measured = partial(_measured, model, task, is_held_out, has_loss, outputs, targets)
    num_chosen = min(len(samples), max_samples)
    chosen = torch.arange(num_chosen, device="cpu") * len(samples) // num_chosen
    for indices in chosen.split(min(batch_size, _BATCH_SIZE)):
        batch = moved(samples.fetch(indices), device)
        for name, value in measured(batch).items():
            means.setdefault(name, _Mean()).add(value, len(indices))
    found = {name: mean.value for name, mean in means.items()}
    if is_held_out and task.metric is not None:
        result = task.metric(_joined(outputs), _joined(targets))
        further = _metrics_of(result, task.metric, "metric(outputs, targets)")
        if "loss" in further:
            raise UserError(
                "metric(outputs, targets) returned 'loss', which is the held-out loss beside it: "
                "give it another name, or return it from validation_step(model, batch)."
            )
        found |= further
    return Score(
        loss=found.pop("loss", math.nan),
        accuracy=found.pop("accuracy", math.nan),
        metrics=found,
        num_samples=num_chosen,
    )


def has_batchnorm(model: nn.Module) -> bool:
    """Return whether a model in evaluation mode uses statistics that BatchNorm has kept.

    ``SyncBatchNorm`` is left as it is: one rank alone cannot estimate its statistics.
    """
    if any(isinstance(each, nn.SyncBatchNorm) for each in model.modules()):
        return False
    return any(each.track_running_stats for each in _batchnorms(model))


def _batchnorms(model: nn.Module) -> list[nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d]:
    kinds = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d
    return [each for each in model.modules() if isinstance(each, kinds)]


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

    The task's step is made on up to ``max_samples`` training samples in random order, in training
    mode, without backward pass or update.  The statistics are the means over the batches.  Layers
    that the forward pass leaves out, or the model keeps in evaluation mode, stay as they are.

    Args:
        model: its weights do not change.
        task: what it was trained on.
        device: the model's.
        batch_size: samples of a forward pass, or of at most 512; less than twice as many in some.
        seed: of the order.
        max_samples: the most that are taken.
    """
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(task.train), generator=generator, device="cpu")
    chosen = order[:max_samples]
    num_batches = max(1, len(chosen) // min(batch_size, _BATCH_SIZE))
    batches = (
        _Boxed(moved(task.train.fetch(indices), device))
        for indices in chosen.tensor_split(num_batches)  # no rest of a single sample
    )
    layers = _batchnorms(model)
    before = [copy.deepcopy(each.state_dict()) for each in layers]
    momenta = [each.momentum for each in layers]
    has_ended = False
    try:
        update_bn(batches, _Stepping(model, task.step))
        has_ended = True
    finally:
        for layer, state, momentum in zip(layers, before, momenta, strict=True):
            layer.momentum = momentum
            if not has_ended or not layer.num_batches_tracked:
                layer.load_state_dict(state)


@dataclass(frozen=True, slots=True)
class _Boxed:
    """A batch that ``update_bn`` hands on whole: of a tuple it would take the first part."""

    tree: Tree


class _Stepping(nn.Module):
    """Calls a model as its training does."""

    def __init__(self, model: nn.Module, step: StepFunction) -> None:
        super().__init__()
        self.model = model
        self._step = step
        self.training = model.training

    def forward(self, batch: _Boxed) -> None:
        """Make the task's step; one of the user's own may need gradients, as a penalty does."""
        with torch.set_grad_enabled(not isinstance(self._step, Supervised)):
            self._step(self.model, batch.tree)


@dataclass(slots=True)
class _Mean:
    """The mean over samples of a number that comes batch by batch."""

    total: float = 0.0
    num_samples: int = 0

    def add(self, value: float, num_samples: int) -> None:
        self.total += value * num_samples
        self.num_samples += num_samples

    @property
    def value(self) -> float:
        return self.total / self.num_samples


def _measured(
    model: nn.Module,
    task: Task,
    is_held_out: bool,
    has_loss: bool,
    all_outputs: list[Any],
    all_targets: list[Any],
    batch: Any,
) -> dict[str, float]:
    """Return the numbers of one batch; keep outputs and targets if the task's metric takes all."""
    found: dict[str, float] = {}
    pair: tuple[Any, Any] | None = None
    if is_held_out and task.validation_step is not None:
        result: Any = task.validation_step(model, batch)
        if task.metric is not None and isinstance(result, tuple) and is_pair(result):
            pair = result
        else:
            found |= _metrics_of(result, task.validation_step, "validation_step(model, batch)")
    wants_loss = has_loss and "loss" not in found
    wants_outputs = is_held_out and task.metric is not None
    if wants_outputs and pair is None and not is_pair(batch):
        raise UserError(
            "metric(outputs, targets) needs both, and data(split) gives batches that are "
            f"{kind_of(batch)}: let validation_step(model, batch) return (outputs, targets), or "
            "the measures themselves, which are averaged."
        )
    if pair is not None:
        all_outputs.append(mapped(_on_cpu, pair[0]))
        all_targets.append(mapped(_on_cpu, pair[1]))
        wants_outputs = False
    if wants_outputs or (wants_loss and isinstance(task.step, Supervised)):
        inputs, targets = pair_of(batch)
        outputs = model(inputs)
        if wants_outputs:
            all_outputs.append(mapped(_on_cpu, outputs))
            all_targets.append(mapped(_on_cpu, targets))
    if not wants_loss:
        return found
    if isinstance(task.step, Supervised):
        found["loss"] = task.step.loss(outputs, targets).item()
        if is_held_out and not task.has_measures and task.step == CLASSIFY:
            found["accuracy"] = _accuracy(outputs, targets)
        return found
    with torch.enable_grad():  # a loss may be made of gradients, such as a penalty
        loss, _ = split_step(task.step(model, batch))
    return found | {"loss": loss.item()}


def _on_cpu(leaf: Any) -> Any:
    """Return a leaf where any library's metric can read it."""
    return leaf.cpu() if isinstance(leaf, Tensor) else leaf


def is_pair(batch: Any) -> bool:
    """Return whether a batch may be (inputs, targets)."""
    return isinstance(batch, tuple | list) and len(batch) == 2


def pair_of(batch: Any) -> tuple[Any, Any]:
    """Return inputs and targets.

    Raises:
        UserError: the batch is something else.
    """
    if not is_pair(batch):
        size = f" of {len(batch)}" if isinstance(batch, tuple | list) else ""
        raise UserError(
            f"data(split) gives batches that are {kind_of(batch)}{size}, not (inputs, targets): "
            "define training_step(model, batch), and validation_step(model, batch) to measure more."
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
    """Return a number, or a tensor or array with a single one, as a float.

    Raises:
        UserError: it is something else.
    """
    try:
        is_text = isinstance(value, str | bytes)
        number = value.detach() if isinstance(value, Tensor) else value
        return float("not a number" if is_text else number)
    except (TypeError, ValueError, RuntimeError):
        what = shape_of(value) if isinstance(value, Tensor) else kind_of(value)
        raise UserError(
            f"{call} returned {what}; return a number, or a dict of numbers with their names."
        ) from None


def _joined(batches: list[Any]) -> Any:
    """Return the outputs of all batches as those of one."""
    first = batches[0]
    if len(batches) == 1:
        return first
    if isinstance(first, Tensor):
        return torch.cat(batches) if first.ndim else torch.stack(batches)
    if isinstance(first, Mapping):
        return {name: _joined([each[name] for each in batches]) for name in first}
    if isinstance(first, tuple | list):
        return [_joined(list(each)) for each in zip(*batches, strict=True)]
    raise UserError(
        f"metric(outputs, targets) is computed on all outputs together, and {kind_of(first)} "
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
