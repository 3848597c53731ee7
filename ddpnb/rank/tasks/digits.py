"""Handwritten digits: the digit in a picture of 8x8 pixels (ranks).

The 1797 digits come with scikit-learn, so nothing is downloaded.  Alpaydin and Kaynak, "Optical
Recognition of Handwritten Digits", UCI Machine Learning Repository, 1998.
"""

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn

from ddpnb.protocol.messages import RunSpec
from ddpnb.rank.tasks.base import Task
from ddpnb.rank.tasks.optimizers import default_optimizer
from ddpnb.rank.tasks.samples import TensorSamples

_INITIAL_SCALE = 0.8
_SPLIT_SEED = 0
"""Fixed, so that every run is evaluated on the same held-out digits."""


def build(spec: RunSpec) -> Task:
    """Return the task: 1437 digits to train on, 360 held out, a small convolutional network."""
    digits = load_digits()
    images = torch.from_numpy(digits.images / 16.0).float().unsqueeze(1)
    targets = torch.from_numpy(digits.target).long()
    train, held_out = train_test_split(
        range(len(targets)), test_size=0.2, random_state=_SPLIT_SEED, stratify=digits.target
    )
    return Task(
        model=make_model,
        train=TensorSamples(images[train], targets[train]),
        held_out=TensorSamples(images[held_out], targets[held_out]),
        optimizer=default_optimizer(spec.learning_rate, spec.used_momentum),
    )


def make_model() -> nn.Module:
    """Return a network of two convolutions and one hidden layer, for images (N, 1, 8, 8).

    It has no BatchNorm: the statistics would depend on how a batch is split among workers, and no
    two strategies would train the same function.
    """
    model = nn.Sequential(
        nn.Conv2d(1, 32, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 4 * 4, 256),
        nn.ReLU(),
        nn.Linear(256, 10),
    )
    _initialise(model)
    return model


def _initialise(model: nn.Sequential) -> None:
    """Set larger weights than torch's defaults, which learn too little in six epochs.

    He et al., "Delving Deep into Rectifiers", ICCV 2015, times 0.8, because larger weights make the
    loss too sharp for stale gradients.  The last layer: Glorot and Bengio, 2010.
    """
    *hidden, last = (layer for layer in model if isinstance(layer, nn.Conv2d | nn.Linear))
    for layer in hidden:
        nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
        with torch.no_grad():
            layer.weight.mul_(_INITIAL_SCALE)
    nn.init.xavier_normal_(last.weight)
    for layer in (*hidden, last):
        assert layer.bias is not None
        nn.init.zeros_(layer.bias)
