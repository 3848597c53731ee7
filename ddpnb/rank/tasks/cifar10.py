"""CIFAR-10: the class of a photograph of 32x32 pixels (ranks).

The user puts CIFAR-10's binary version into ``data/cifar-10-batches-bin``: files of records, each
one byte of label and 3 x 1024 bytes of pixels.  They are mapped into memory, never unpickled.
Without them the images are synthetic, and a note says so.

References: Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009;
He et al., "Deep Residual Learning for Image Recognition", CVPR 2016, section 4.2.
"""

from itertools import pairwise
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, Dataset

from ddpnb.rank.tasks.base import Task
from ddpnb.rank.tasks.samples import TensorSamples, as_samples
from ddpnb.rank.tasks.synthetic import make_images

FOLDER = Path("data") / "cifar-10-batches-bin"
RECORD_BYTES = 1 + 3 * 32 * 32
_MEAN = torch.tensor([0.4914, 0.4822, 0.4465], device="cpu").view(3, 1, 1)
_DEVIATION = torch.tensor([0.2470, 0.2435, 0.2616], device="cpu").view(3, 1, 1)
"""Of each colour over the training images, with pixels from 0 to 1."""
_CHANNELS = (64, 64, 64, 128, 128, 256, 256, 512, 512)
"""Before the first block, and after each."""


def build() -> Task:
    """Return the task: ResNet-18 on CIFAR-10, or on synthetic images of its shape.

    The data are looked for in the working folder, then in the folders above it.
    """
    train, held_out = (as_samples(data(split), split) for split in ("train", "test"))
    note = f"Synthetic data: there is no {FOLDER}."
    notes = (note,) if isinstance(train, TensorSamples) else ()
    return Task(model=model, train=train, held_out=held_out, notes=notes)


def data(split: str) -> Any:
    """Return the photographs of a split, or synthetic images where there are none."""
    here = Path.cwd()
    found = [each / FOLDER for each in (here, *here.parents) if (each / FOLDER).is_dir()]
    if not found:
        return make_images(1024, 256)[split == "test"]
    files = found[0].glob("data_batch_*.bin" if split == "train" else "test_batch.bin")
    return ConcatDataset([Photographs(path) for path in sorted(files)])


@final
class Photographs(Dataset[tuple[Tensor, int]]):
    """The images of a binary file: normalised, (3, 32, 32), each with its label."""

    def __init__(self, path: Path) -> None:
        self._records = np.memmap(path, dtype=np.uint8, mode="r").reshape(-1, RECORD_BYTES)

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        record = torch.tensor(self._records[index], device="cpu")
        pixels = record[1:].view(3, 32, 32)
        return (pixels.float() / 255 - _MEAN) / _DEVIATION, int(record[0])


def model() -> nn.Module:
    """Return ResNet-18 for (N, 3, 32, 32): a 3x3 convolution first, and no pooling after it."""
    return nn.Sequential(
        *_normalised(3, _CHANNELS[0]),
        nn.ReLU(),
        *(Residual(num_in, num_out) for num_in, num_out in pairwise(_CHANNELS)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(_CHANNELS[-1], 10),
    )


class Residual(nn.Module):
    """Two convolutions, added to their input; where channels grow, there are fewer pixels."""

    def __init__(self, num_in: int, num_out: int) -> None:
        super().__init__()
        stride = 1 if num_in == num_out else 2
        self.change = nn.Sequential(
            *_normalised(num_in, num_out, stride), nn.ReLU(), *_normalised(num_out, num_out)
        )
        self.skip = nn.Sequential()
        if stride > 1:
            self.skip.extend(_normalised(num_in, num_out, stride, kernel_size=1))

    def forward(self, inputs: Tensor) -> Tensor:
        """Return features (N, ``num_out``, H / stride, W / stride)."""
        return torch.relu(self.skip(inputs) + self.change(inputs))


def _normalised(
    num_in: int, num_out: int, stride: int = 1, kernel_size: int = 3
) -> tuple[nn.Module, nn.Module]:
    """Return a convolution and its BatchNorm."""
    convolution = nn.Conv2d(
        num_in, num_out, kernel_size, stride, padding=kernel_size // 2, bias=False
    )
    nn.init.kaiming_normal_(convolution.weight, mode="fan_out", nonlinearity="relu")
    return convolution, nn.BatchNorm2d(num_out)
