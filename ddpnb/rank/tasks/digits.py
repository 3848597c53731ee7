"""Classify handwritten digits in images of 8x8 pixels.  Runs on the ranks.

Source: Alpaydin and Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine Learning
Repository, 1998 (CC BY 4.0). The data are the 1797 digits of scikit-learn's ``load_digits``.
``digits.npz`` contains these digits in the order of scikit-learn's ``train_test_split(...,
test_size=0.2, random_state=0, stratify=targets)``. ddpnb uses this file because importing
scikit-learn would take two seconds on every rank.
"""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from ddpnb.rank.tasks.base import Task
from ddpnb.rank.tasks.samples import TensorSamples

_INITIAL_SCALE = 0.8
_NUM_TRAIN = 1437


def build() -> Task:
    """Return the task: 1437 training digits, 360 held-out digits, a small convolutional network."""
    train, held_out = (TensorSamples(data(split)) for split in ("train", "test"))
    return Task(model=model, train=train, held_out=held_out)


def data(split: str) -> tuple[Tensor, Tensor]:
    """Return images (N, 1, 8, 8) with values from 0 to 1, and the digit in each image."""
    with np.load(Path(__file__).with_name("digits.npz")) as digits:
        images = torch.from_numpy(digits["images"] / 16).float().unsqueeze(1)
        targets = torch.from_numpy(digits["targets"]).long()
    part = slice(_NUM_TRAIN) if split == "train" else slice(_NUM_TRAIN, None)
    return images[part], targets[part]


def model() -> nn.Module:
    """Return a network of two convolutions and one hidden layer, for images (N, 1, 8, 8).

    The network has no BatchNorm. BatchNorm's statistics would depend on how a batch is split among
    workers, so strategies would not train the same function.

    With torch's default weights, the network learns too little in six epochs. The initial weights
    follow He et al., "Delving Deep into Rectifiers", ICCV 2015, and are multiplied by 0.8. Without
    the factor 0.8, the loss surface is too sharp for training with stale gradients. The initial
    weights of the last layer follow Glorot and Bengio, 2010.
    """
    net = nn.Sequential(
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
    *hidden, last = (layer for layer in net if isinstance(layer, nn.Conv2d | nn.Linear))
    for layer in hidden:
        nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
        layer.weight.data.mul_(_INITIAL_SCALE)
    nn.init.xavier_normal_(last.weight)
    for name, parameter in net.named_parameters():
        if name.endswith("bias"):
            nn.init.zeros_(parameter)
    return net
