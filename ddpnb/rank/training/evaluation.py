"""The loss and accuracy of a trained model (rank 0, after the clock has stopped)."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ddpnb.protocol.errors import summary_of
from ddpnb.rank.tasks.base import LossFunction, Samples, Task

MAX_SAMPLES = 10_000
"""How many samples of a larger split are evaluated, spread evenly over it."""
_BATCH_SIZE = 512
_LABELS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """The result on one split; NaN if it could not be evaluated."""

    loss: float = math.nan
    """Mean over the samples."""
    accuracy: float = math.nan
    """Fraction classified correctly; NaN if the model is no classifier, see ``_num_correct``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalResult:
    """The results on training samples and on samples that the model has never seen."""

    train: Score
    held_out: Score


def evaluate(
    model: nn.Module, task: Task, device: torch.device, *, failed: Callable[[str], None]
) -> EvalResult:
    """Evaluate a model on both splits, in evaluation mode.

    Args:
        model: the trained model.
        task: its loss and its samples.
        device: where the model is.
        failed: takes what went wrong on a split; the run itself is kept all the same.
    """
    model.eval()

    def score_or_nan(split: str, samples: Samples) -> Score:
        try:
            return score(model, task.loss, samples, device)
        except Exception as error:  # noqa: BLE001  the user's model, loss or data may raise anything
            failed(f"could not evaluate the model on {split} samples ({summary_of(error)})")
            return Score()

    return EvalResult(
        train=score_or_nan("training", task.train),
        held_out=score_or_nan("held-out", task.held_out),
    )


@torch.no_grad()
def score(
    model: nn.Module,
    loss: LossFunction,
    samples: Samples,
    device: torch.device,
    max_samples: int = MAX_SAMPLES,
) -> Score:
    """Evaluate a model on up to ``max_samples`` of a split."""
    total_loss, num_correct, num_samples = 0.0, 0.0, 0
    for indices in _chosen(len(samples), max_samples).split(_BATCH_SIZE):
        inputs, targets = (part.to(device) for part in samples.fetch(indices))
        outputs = model(inputs)
        total_loss += loss(outputs, targets).item() * len(indices)
        num_correct += _num_correct(outputs, targets)
        num_samples += len(indices)
    return Score(loss=total_loss / num_samples, accuracy=num_correct / num_samples)


def _chosen(num_samples: int, max_samples: int) -> Tensor:
    if num_samples <= max_samples:
        return torch.arange(num_samples)
    return torch.arange(max_samples) * num_samples // max_samples


def _num_correct(outputs: Tensor, targets: Tensor) -> float:
    """Return how many samples are classified correctly; NaN if the outputs are not class scores.

    Outputs (N, C, ...) are class scores if there are at least two classes and the targets (N, ...)
    are integers from 0 to C - 1.  A sample with several targets, such as a line of text, counts by
    the fraction that is correct.
    """
    if targets.dtype not in _LABELS or outputs.ndim != targets.ndim + 1:
        return math.nan
    num_classes = outputs.shape[1]
    if num_classes < 2 or outputs.shape[:1] + outputs.shape[2:] != targets.shape:
        return math.nan
    if targets.min() < 0 or targets.max() >= num_classes:
        return math.nan
    correct = (outputs.argmax(dim=1) == targets).double()
    return correct.reshape(len(correct), -1).mean(dim=1).sum().item()
