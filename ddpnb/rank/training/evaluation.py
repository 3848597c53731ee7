"""How good is a trained model?  (Rank 0, after the clock has stopped.)"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ddpnb.protocol.errors import summary_of
from ddpnb.rank.tasks.base import LossFunction, Samples, Task

MAX_SAMPLES = 10_000
"""Of a larger training split this many are judged, spread evenly over it."""
_BATCH_SIZE = 512
_LABELS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """How a model does on one split; NaN where it could not be evaluated."""

    loss: float = math.nan
    """Mean over the samples."""
    accuracy: float = math.nan
    """Share classified right; NaN where that is not known, see ``_num_right``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalResult:
    """How a model does on what it was trained on, and on what it never saw."""

    train: Score
    held_out: Score


def evaluate(
    model: nn.Module, task: Task, device: torch.device, *, failed: Callable[[str], None]
) -> EvalResult:
    """Judge a model on both splits, in evaluation mode.

    Args:
        model: the trained model.
        task: its loss and its samples.
        device: where the model is.
        failed: takes what went wrong on a split; what was trained is worth keeping all the same.
    """
    model.eval()

    def judge(split: str, samples: Samples) -> Score:
        try:
            return score(model, task.loss, samples, device)
        except Exception as error:  # noqa: BLE001  whatever the user's model, loss or data raise
            failed(f"could not evaluate the model on {split} samples ({summary_of(error)})")
            return Score()

    return EvalResult(
        train=judge("training", task.train), held_out=judge("held-out", task.held_out)
    )


@torch.no_grad()
def score(
    model: nn.Module,
    loss: LossFunction,
    samples: Samples,
    device: torch.device,
    max_samples: int = MAX_SAMPLES,
) -> Score:
    """Judge a model on up to ``max_samples`` of a split."""
    total_loss, num_right, num_samples = 0.0, 0.0, 0
    for indices in _chosen(len(samples), max_samples).split(_BATCH_SIZE):
        inputs, targets = (part.to(device) for part in samples.fetch(indices))
        outputs = model(inputs)
        total_loss += loss(outputs, targets).item() * len(indices)
        num_right += _num_right(outputs, targets)
        num_samples += len(indices)
    return Score(loss=total_loss / num_samples, accuracy=num_right / num_samples)


def _chosen(num_samples: int, max_samples: int) -> Tensor:
    if num_samples <= max_samples:
        return torch.arange(num_samples)
    return torch.arange(max_samples) * num_samples // max_samples


def _num_right(outputs: Tensor, targets: Tensor) -> float:
    """Return how many samples are classified right; NaN where these are not class scores.

    They are where targets (N, ...) are integers from 0 to C - 1, and outputs (N, C, ...) hold a
    score for each of at least two classes.  A sample with several targets, as a line of text
    has, counts by its share of right ones.
    """
    if targets.dtype not in _LABELS or outputs.ndim != targets.ndim + 1:
        return math.nan
    num_classes = outputs.shape[1]
    if num_classes < 2 or outputs.shape[:1] + outputs.shape[2:] != targets.shape:
        return math.nan
    if targets.min() < 0 or targets.max() >= num_classes:
        return math.nan
    right = (outputs.argmax(dim=1) == targets).double()
    return right.reshape(len(right), -1).mean(dim=1).sum().item()
