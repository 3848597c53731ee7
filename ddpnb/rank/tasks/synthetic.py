"""The task without any data set: which prototype is this noisy image made from?  (Every rank.)

Images have CIFAR's shape.  Each of ten classes has a random prototype; an image is
its class's prototype plus noise, at unit variance, so that there is something to learn.
"""

import math

import torch
from torch import nn

from ddpnb.rank.tasks.base import Task, default_optimizer
from ddpnb.rank.tasks.samples import TensorSamples
from ddpnb.wire import RunSpec

NUM_CLASSES = 10
IMAGE_SHAPE = (3, 32, 32)
_DATA_SEED = 0
_NOISE = 2.0
"""Standard deviation of the noise; the prototypes' is 1."""


def build(spec: RunSpec, *, num_train: int = 4096, num_held_out: int = 1024) -> Task:
    """Return the task: 4096 images to train on, 1024 held out, a small convolutional network."""
    generator = torch.Generator().manual_seed(_DATA_SEED)
    prototypes = torch.randn(NUM_CLASSES, *IMAGE_SHAPE, generator=generator)
    return Task(
        model=make_model,
        train=_make_samples(prototypes, num_train, generator),
        held_out=_make_samples(prototypes, num_held_out, generator),
        optimizer=default_optimizer(spec.learning_rate),
        notes=("Synthetic data: images made from a seed.",),
    )


def make_model() -> nn.Module:
    """Return a network of two strided convolutions and one linear layer, for (N, 3, 32, 32)."""
    return nn.Sequential(
        nn.Conv2d(3, 16, kernel_size=3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, kernel_size=3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 8 * 8, NUM_CLASSES),
    )


def _make_samples(
    prototypes: torch.Tensor, num_samples: int, generator: torch.Generator
) -> TensorSamples:
    targets = torch.randint(NUM_CLASSES, (num_samples,), generator=generator)
    noise = torch.randn(num_samples, *IMAGE_SHAPE, generator=generator)
    images = (prototypes[targets] + _NOISE * noise) / math.hypot(1, _NOISE)
    return TensorSamples(images, targets)
