"""How good a model is on a split: its loss, its accuracy and the task's own numbers (ranks).

A model with averaged weights first gets BatchNorm's statistics of these weights, as SWA does:
Izmailov et al., "Averaging Weights Leads to Wider Optima and Better Generalization", UAI 2018.
"""

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ddpnb.protocol.errors import UserError, kind_of
from ddpnb.rank.tasks.base import CLASSIFY, Supervised, Task, split_step
from ddpnb.rank.tasks.batches import mapped, moved, shape_of

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
    samples = task.held_out if is_held_out else task.train
    totals: dict[str, float] = {}
    pairs: list[Pair] = []
    num_chosen = min(len(samples), max_samples)
    chosen = torch.arange(num_chosen, device="cpu") * len(samples) // num_chosen
    for indices in chosen.split(min(batch_size, _BATCH_SIZE)):
        batch = moved(samples.fetch(indices), device)
        numbers, pair = _measured(model, task, batch) if is_held_out else ({}, None)
        if has_loss and "loss" not in numbers:
            numbers |= _loss_of(model, task, batch, pair if task.validation_step is None else None)
        if not is_held_out:
            numbers.pop("accuracy", None)
        if pair is not None:
            pairs.append(Pair(*mapped(_on_cpu, tuple(pair))))
        for name, value in numbers.items():
            totals[name] = totals.get(name, 0.0) + value * len(indices)
    found = {name: total / num_chosen for name, total in totals.items()}
    if pairs and task.metric is not None:
        outputs, targets = (_joined(list(each)) for each in zip(*pairs, strict=True))
        further = _metrics_of(
            task.metric(outputs, targets), task.metric, "metric(outputs, targets)"
        )
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


class Pair(NamedTuple):
    """What a metric compares."""

    outputs: Any
    targets: Any


def _measured(model: nn.Module, task: Task, batch: Any) -> tuple[dict[str, float], Pair | None]:
    """Return what the task measures on one held-out batch, and what its metric is to get."""
    numbers: dict[str, float] = {}
    if task.validation_step is not None:
        result: Any = task.validation_step(model, batch)
        if task.metric is not None and isinstance(result, tuple) and len(result) == 2:
            return {}, Pair(*result)
        numbers = _metrics_of(result, task.validation_step, "validation_step(model, batch)")
    if task.metric is None:
        return numbers, None
    inputs, targets = pair_of(batch)
    return numbers, Pair(model(inputs), targets)


def _loss_of(model: nn.Module, task: Task, batch: Any, pair: Pair | None) -> dict[str, float]:
    """Return the loss of one batch, and the accuracy where the loss is the default one.

    Args:
        model: in evaluation mode.
        task: has the step.
        batch: on the model's device.
        pair: the model's outputs, if they are known.
    """
    if not isinstance(task.step, Supervised):
        with torch.enable_grad():  # a loss may be made of gradients, such as a penalty
            return {"loss": split_step(task.step(model, batch))[0].item()}
    inputs, targets = pair_of(batch)
    outputs = model(inputs) if pair is None else pair.outputs
    found = {"loss": task.step.loss(outputs, targets).item()}
    if task.step == CLASSIFY and not task.has_measures:
        found["accuracy"] = _accuracy(outputs, targets)
    return found


def _on_cpu(leaf: Any) -> Any:
    """Return a leaf where any library's metric can read it."""
    return leaf.cpu() if isinstance(leaf, Tensor) else leaf


def pair_of(batch: Any) -> tuple[Any, Any]:
    """Return inputs and targets.

    Raises:
        UserError: the batch is something else.
    """
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
    """Return a number, or a tensor or array with a single one, as a float.

    Raises:
        UserError: it is something else.
    """
    try:
        is_text = isinstance(value, str | bytes)
        number = value.detach() if isinstance(value, Tensor) else value
        return float("not a number" if is_text else number)
    except (TypeError, ValueError, RuntimeError):
        raise UserError(
            f"{call} returned {shape_of(value)}; return a number, or a dict of numbers with their "
            "names."
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


def has_batchnorm(model: nn.Module) -> bool:
    """Return whether a model in evaluation mode uses statistics that BatchNorm has kept.

    ``SyncBatchNorm`` is left as it is: one rank alone cannot estimate its statistics.
    """
    if any(isinstance(each, nn.SyncBatchNorm) for each in model.modules()):
        return False
    return bool(_batchnorms(model))


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

    The task's step is made on up to ``max_samples`` training samples in random order, in training
    mode, without backward pass or update.  The statistics are the means over the batches, as those
    of ``torch.optim.swa_utils.update_bn``.  Layers that the forward pass leaves out, or the model
    keeps in evaluation mode, stay as they are.

    Args:
        model: its weights do not change.
        task: what it was trained on.
        device: the model's.
        batch_size: samples of a forward pass, or of at most 512; less than twice as many in some.
        seed: of the order.
        max_samples: the most that are taken.
    """
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(len(task.train), generator=generator, device="cpu")[:max_samples]
    num_batches = max(1, len(chosen) // min(batch_size, _BATCH_SIZE))
    layers, was_training, has_ended = _batchnorms(model), model.training, False
    before = [(each.momentum, copy.deepcopy(each.state_dict())) for each in layers]
    try:
        model.train()
        for layer in layers:
            layer.reset_running_stats()
            layer.momentum = None  # then it takes the mean over the batches
        for indices in chosen.tensor_split(num_batches):  # no rest of a single sample
            batch = moved(task.train.fetch(indices), device)
            with torch.set_grad_enabled(not isinstance(task.step, Supervised)):  # for a penalty
                task.step(model, batch)
        has_ended = True
    finally:
        model.train(was_training)
        for layer, (momentum, state) in zip(layers, before, strict=True):
            layer.momentum = momentum
            if not has_ended or not layer.num_batches_tracked:
                layer.load_state_dict(state)
