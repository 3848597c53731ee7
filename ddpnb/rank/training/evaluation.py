"""Computes a model's loss, its accuracy and the task's other measures on a split.

If the model's weights are averages, BatchNorm's statistics are first estimated again, as in SWA:
Izmailov et al., "Averaging Weights Leads to Wider Optima and Better Generalization", UAI 2018.
Runs on the ranks.
"""

import copy
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ddpnb.compat.torch_internals import tree_map, tree_map_only
from ddpnb.protocol.errors import UserError, kind_of
from ddpnb.rank.tasks.base import CLASSIFY, Supervised, Task, evaluated_loss
from ddpnb.rank.tasks.batches import moved, num_rows, permutation, shape_of

MAX_SAMPLES = 10_000
"""Default maximum number of evaluated samples.  These samples are evenly spaced in the split."""
_BATCH_SIZE = 512
BATCHNORM_NOTE = (
    "The model's weights are averages, so ddpnb estimates BatchNorm's statistics again on training "
    "samples before the evaluation. The training time does not include this estimate."
)
"""Note in the results of a model for which ``estimate_batchnorm`` was called."""


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
) -> tuple[dict[str, float], int]:
    """Evaluate a model on up to ``max_samples`` samples of a split.

    On the training split, compute only the loss.  If ``has_loss`` is False, call only the
    task's ``validation_step`` and ``metric``.  Raise ``UserError`` if a measure is not a number.

    Return the measures and the number of samples.  ``"loss"`` is the mean loss.  ``"accuracy"`` is
    the fraction of correctly predicted classes, if the loss is the default loss (cross-entropy) and
    the task has no other measures.  ``collate_fn`` may drop or add samples.
    """
    samples = task.held_out if is_held_out else task.train
    totals: dict[str, float] = {}
    pairs = []
    num_chosen, num_samples = min(len(samples), max_samples), 0
    chosen = torch.arange(num_chosen, device="cpu") * len(samples) // num_chosen
    for indices in chosen.split(min(batch_size, _BATCH_SIZE)):
        batch = moved(samples.fetch(indices), device)
        if not (num := num_rows(batch, len(indices))):
            continue
        num_samples += num
        numbers, pair = _measured(model, task, batch, is_held_out=is_held_out, has_loss=has_loss)
        if pair is not None:  # on the CPU, where any library's metric can read the tensors
            pairs.append(tree_map_only(Tensor, Tensor.cpu, tuple(pair)))
        for name, value in numbers.items():
            totals[name] = totals.get(name, 0.0) + value * num
    found = {name: total / num_samples for name, total in totals.items()}
    if pairs and task.metric is not None:
        outputs, targets = tree_map(_joined, *pairs)
        call = "metric(outputs, targets)"
        found |= _metrics_of(task.metric(outputs, targets), task.metric, call)
    return found, num_samples


def _measured(
    model: nn.Module, task: Task, batch: Any, *, is_held_out: bool, has_loss: bool
) -> tuple[dict[str, float], tuple[Any, Any] | None]:
    """Return the measures of one batch.  Also return (outputs, targets) if a metric needs them."""
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
        return numbers | {"loss": evaluated_loss(task.step, model, batch).item()}, pair
    inputs, targets = pair_of(batch)
    outputs = model(inputs) if outputs is None else outputs
    numbers["loss"] = task.step.loss(outputs, targets).item()
    if is_held_out and task.step == CLASSIFY and not task.has_measures:
        numbers["accuracy"] = _accuracy(outputs, targets)
    return numbers, pair


def pair_of(batch: Any) -> tuple[Any, Any]:
    """Return a batch's inputs and targets; raise ``UserError`` if the batch is not a pair."""
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        size = f" of {len(batch)}" if isinstance(batch, tuple | list) else ""
        raise UserError(
            f"data(split) gives batches that are {kind_of(batch)}{size}, not (inputs, targets). "
            "Define training_step(model, batch) and validation_step(model, batch). "
            "validation_step returns measures, or (outputs, targets) for a metric."
        )
    inputs, targets = batch
    return inputs, targets


def _metrics_of(result: Any, function: Callable[..., Any], call: str) -> dict[str, float]:
    """Return a function's measures as a dict.  A single number gets the function's name as key."""
    if isinstance(result, Mapping):
        return {str(name): number_of(each, f"{call}'s {name!r}") for name, each in result.items()}
    name = getattr(function, "__name__", type(function).__name__)
    return {name: number_of(result, call)}


def number_of(value: Any, call: str) -> float:
    """Convert a number, tensor or array to a float; raise ``UserError`` if that is impossible."""
    try:
        if not isinstance(value, str | bytes):
            return float(value.detach() if isinstance(value, Tensor) else value)
        raise TypeError
    except (TypeError, ValueError, RuntimeError):
        raise UserError(
            f"{call} returned {shape_of(value)}. Return a number, or a dict that contains a "
            "number for each name."
        ) from None


def _joined(*outputs: Any) -> Any:
    if isinstance(outputs[0], Tensor):
        return torch.cat(outputs) if outputs[0].ndim else torch.stack(outputs)
    if len(outputs) == 1:
        return outputs[0]
    raise UserError(
        "metric(outputs, targets) needs the outputs of all batches at once, but ddpnb cannot join "
        f"outputs that are {kind_of(outputs[0])}. Define validation_step(model, batch) instead."
    )


def _accuracy(outputs: Tensor, targets: Tensor) -> float:
    """Return the fraction of correctly predicted classes; NaN if targets are not class numbers.

    Outputs have shape (N, C, ...) and targets have shape (N, ...), as for cross-entropy.  If each
    sample has several targets, as in text, the fraction is computed per sample and then averaged.
    """
    if targets.is_floating_point() or targets.min() < 0:  # probabilities, or ignored targets
        return math.nan
    correct = (outputs.argmax(dim=1) == targets).double()
    return correct.reshape(len(correct), -1).mean(dim=1).mean().item()


def has_batchnorm(model: nn.Module) -> bool:
    """Return True if a model in evaluation mode uses BatchNorm statistics that can be estimated.

    Return False for a model with ``SyncBatchNorm``, because one rank cannot estimate these layers.
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
    """Estimate BatchNorm's statistics for the model's current weights.  One rank takes part.

    The task's step runs on up to ``max_samples`` training samples, in a random order from ``seed``.
    The step runs in training mode, without a backward pass or an update.  The statistics are the
    means over the batches.  A layer does not change if the forward pass does not use the layer, or
    if the model keeps the layer in evaluation mode.
    """
    chosen = permutation(len(task.train), seed)[:max_samples]
    num_batches = max(1, len(chosen) // min(batch_size, _BATCH_SIZE))
    batches = chosen.tensor_split(num_batches)  # avoids a last batch of one sample
    before = [(e, e.momentum, copy.deepcopy(e.state_dict())) for e in _batchnorms(model)]
    was_training = model.training
    model.train()
    try:
        for layer, *_ in before:
            layer.reset_running_stats()
            layer.momentum = None  # the mean over all batches
        for each in batches:
            evaluated_loss(task.step, model, moved(task.train.fetch(each), device))
    finally:
        model.train(was_training)
        for layer, momentum, state in before:
            layer.momentum = momentum
            if not layer.num_batches_tracked:
                layer.load_state_dict(state)
