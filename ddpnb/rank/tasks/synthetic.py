"""Classify synthetic images by finding the prototype from which a noisy image was made.

Images have CIFAR's shape. Each of ten classes has a random prototype. An image is the prototype of
its class plus noise, scaled to unit variance, so a model can learn the classes.

You can increase communication and computation independently. Extra parameters add communication,
but hardly any computation. Extra convolutions share parameters, so they add computation, but hardly
any communication.  Runs on the ranks.
"""

import math

import torch
from torch import Tensor, nn

from ddpnb.rank.tasks.base import Task
from ddpnb.rank.tasks.samples import TensorSamples

SAMPLES = 4096
PARAMETERS = 0
COMPUTE = 0
NUM_HELD_OUT = 1024
NUM_CLASSES = 10
IMAGE_SHAPE = (3, 32, 32)
_DATA_SEED = 0
_NOISE = 2.0
"""Standard deviation of the noise. The prototypes have a standard deviation of 1."""
_CHUNK = 1_000_000
"""Maximum number of extra parameters in one tensor, so a large model has many tensors."""

Images = tuple[Tensor, Tensor]
"""Images (N, 3, 32, 32) and their classes."""


def build(*, samples: int = SAMPLES, parameters: int = PARAMETERS, compute: int = COMPUTE) -> Task:
    """Return the task: training images, 1024 held-out images, a small convolutional network."""
    train, held_out = make_images(samples, NUM_HELD_OUT)
    return Task(
        model=lambda: model(parameters=parameters, compute=compute),
        train=TensorSamples(train),
        held_out=TensorSamples(held_out),
        notes=("The data are synthetic: random images from a fixed seed.",),
    )


def data(split: str) -> Images:
    """Return the images and classes of a split, ``"train"`` or ``"test"``."""
    images, classes = make_images(SAMPLES, NUM_HELD_OUT)[split == "test"]
    return images, classes


def make_images(num_train: int, num_held_out: int) -> tuple[Images, Images]:
    """Return training and held-out images with their classes, the same on every rank."""
    generator = torch.Generator().manual_seed(_DATA_SEED)
    prototypes = torch.randn(NUM_CLASSES, *IMAGE_SHAPE, generator=generator, device="cpu")

    def split(num_samples: int) -> Images:
        targets = torch.randint(NUM_CLASSES, (num_samples,), generator=generator, device="cpu")
        noise = torch.randn(num_samples, *IMAGE_SHAPE, generator=generator, device="cpu")
        return (prototypes[targets] + _NOISE * noise) / math.hypot(1, _NOISE), targets

    return split(num_train), split(num_held_out)


def model(*, parameters: int = PARAMETERS, compute: int = COMPUTE) -> nn.Module:
    """Return a network of two strided convolutions and a linear layer, for images (N, 3, 32, 32).

    The network has ``parameters`` parameters, or more if its layers need more.
    """
    net = nn.Sequential(
        nn.Conv2d(3, 16, kernel_size=3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, kernel_size=3, stride=2, padding=1),
        nn.ReLU(),
        *([RepeatedConvolution(32, compute)] if compute else []),
        nn.Flatten(),
        nn.Linear(32 * 8 * 8, NUM_CLASSES),
    )
    num_own = sum(parameter.numel() for parameter in net.parameters())
    if parameters > num_own:
        net.append(ExtraParameters(parameters - num_own))
    return net


class RepeatedConvolution(nn.Module):
    """A convolution that is applied several times, to add computation but little communication."""

    def __init__(self, num_channels: int, num_times: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(num_channels, num_channels, kernel_size=3, padding=1)
        self.num_times = num_times

    def forward(self, inputs: Tensor) -> Tensor:
        """Return features of the same shape (N, C, H, W)."""
        for _ in range(self.num_times):
            inputs = inputs + torch.tanh(self.convolution(inputs)) / self.num_times
        return inputs


class ExtraParameters(nn.Module):
    """Many parameters that need little computation, because only their mean is used (as a bias)."""

    def __init__(self, num_parameters: int) -> None:
        super().__init__()
        chunks = torch.zeros(num_parameters).split(_CHUNK)
        self.weights = nn.ParameterList(chunk.clone() for chunk in chunks)

    def forward(self, scores: Tensor) -> Tensor:
        """Return the scores (N, classes). The weights' mean is added to the first class's score."""
        bias = torch.stack([weight.mean() for weight in self.weights]).mean()
        return torch.cat([scores[:, :1] + bias, scores[:, 1:]], dim=1)
