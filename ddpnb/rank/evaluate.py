"""How good is a trained model?  (Rank 0, after the clock has stopped.)"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ddpnb.rank.tasks.base import LossFunction, Task
from ddpnb.rank.tasks.samples import Samples

MAX_SAMPLES = 10_000
"""Of a larger training split this many are judged, spread evenly over it."""
_BATCH_SIZE = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """How a model does on one split."""

    loss: float
    """Mean over the samples."""
    accuracy: float
    """Share classified right; NaN where targets are not class labels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """How a model does on what it was trained on, and on what it never saw."""

    train: Score
    held_out: Score


def evaluate(model: nn.Module, task: Task, device: torch.device) -> Verdict:
    """Judge a model on both splits, in evaluation mode."""
    model.eval()
    return Verdict(
        train=score(model, task.loss, task.train, device),
        held_out=score(model, task.loss, task.held_out, device),
    )


@torch.no_grad()
def score(model: nn.Module, loss: LossFunction, samples: Samples, device: torch.device) -> Score:
    """Judge a model on up to ``MAX_SAMPLES`` of a split."""
    total_loss, num_right, num_samples = 0.0, 0.0, 0
    for indices in _chosen(len(samples)).split(_BATCH_SIZE):
        inputs, targets = (part.to(device) for part in samples.fetch(indices))
        outputs = model(inputs)
        total_loss += loss(outputs, targets).item() * len(indices)
        num_right += _num_right(outputs, targets)
        num_samples += len(indices)
    return Score(loss=total_loss / num_samples, accuracy=num_right / num_samples)


def _chosen(num_samples: int) -> Tensor:
    if num_samples <= MAX_SAMPLES:
        return torch.arange(num_samples)
    return torch.arange(MAX_SAMPLES) * num_samples // MAX_SAMPLES


def _num_right(outputs: Tensor, targets: Tensor) -> float:
    """Return how many samples are classified right; NaN where these are not class scores.

    A sample with several targets, as a line of text has, counts by its share of right ones.
    """
    are_labels = not (targets.is_floating_point() or targets.is_complex())
    if not are_labels or outputs.shape[:1] + outputs.shape[2:] != targets.shape:
        return math.nan
    right = outputs.argmax(dim=1) == targets
    return (
        right.flatten(start_dim=1).float().mean(dim=1).sum().item()
        if right.ndim > 1
        else (right.sum().item())
    )
