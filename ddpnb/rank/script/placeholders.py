"""Placeholders that the export replaces by the run's settings and the notebook's cell."""

import math
from typing import Any

import torch
from torch import Tensor, nn

EPOCHS, BATCH_SIZE, SEED, CHECKPOINT = 2.0, 8, 0, "train.pt"
LEARNING_RATE, MOMENTUM = 0.1, 0.0
ACCUMULATE, AMP, CLIP = 1, False, math.inf
DATA_WORKERS = 0
DDP_OPTIONS: dict[str, Any] = {}


def model() -> nn.Module:
    """Return a model with random weights from torch's generator."""
    return nn.Linear(4, 2)


def data(split: str) -> Any:
    """Return the samples of ``"train"`` or ``"test"``."""
    inputs = torch.randn(24, 4)
    return inputs, (inputs.sum(1) > 0).long()


def optimizer(parameters: Any) -> Any:
    """Return an optimizer, or an optimizer and its scheduler."""
    return torch.optim.SGD(parameters, lr=0.1)


def training_step(net: nn.Module, batch: Any) -> Any:
    """Return the mean loss over a batch, or a dict with the key ``"loss"``."""
    return nn.functional.cross_entropy(net(batch[0]), batch[1])


def validation_step(net: nn.Module, batch: Any) -> Any:
    """Return mean scores over a held-out batch."""
    return {"loss": training_step(net, batch)}


def metric(outputs: Tensor, targets: Tensor) -> Any:
    """Return scores over all held-out outputs."""
    return (outputs.argmax(1) == targets).float().mean()
