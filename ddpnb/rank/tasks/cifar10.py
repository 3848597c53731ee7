"""CIFAR-10: the class of a photograph of 32x32 pixels (ranks).

The user puts CIFAR-10's binary version into ``data/cifar-10-batches-bin``: files of records, each
one byte of label and 3 x 1024 bytes of pixels.  They are mapped into memory, never unpickled.
Without them the images are synthetic, and a note says so.

References: Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009;
He et al., "Deep Residual Learning for Image Recognition", CVPR 2016, section 4.2.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import final

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from ddpnb.protocol.errors import UserError
from ddpnb.rank.tasks.base import Task
from ddpnb.rank.tasks.samples import DatasetSamples, Samples
from ddpnb.rank.tasks.synthetic import make_images

FOLDER = Path("data") / "cifar-10-batches-bin"
RECORD_BYTES = 1 + 3 * 32 * 32
NUM_CLASSES = 10
_MEAN = torch.tensor([0.4914, 0.4822, 0.4465], device="cpu").view(3, 1, 1)
_DEVIATION = torch.tensor([0.2470, 0.2435, 0.2616], device="cpu").view(3, 1, 1)
"""Of each colour over the training images, with pixels from 0 to 1."""
_BLOCKS_OF_STAGES = (2, 2, 2, 2)
_CHANNELS_OF_STAGES = (64, 128, 256, 512)


def build() -> Task:
    """Return the task: ResNet-18 on CIFAR-10, or on synthetic images of its shape.

    Raises:
        UserError: a file does not hold CIFAR-10 records.
    """
    folder = data_folder(Path.cwd())
    train: Samples
    held_out: Samples
    notes: tuple[str, ...] = ()
    if folder is None:
        train, held_out = make_images(1024, 256)
        notes = (f"Synthetic data: there is no {FOLDER}.",)
    else:
        train = DatasetSamples(Images(sorted(folder.glob("data_batch_*.bin"))))
        held_out = DatasetSamples(Images([folder / "test_batch.bin"]))
    return Task(
        model=make_model,
        train=train,
        held_out=held_out,
        notes=notes,
    )


def data_folder(start: Path) -> Path | None:
    """Return the folder of the data, in ``start`` or in the nearest folder above; None without."""
    for folder in (start, *start.parents):
        if (folder / FOLDER / "test_batch.bin").is_file():
            return folder / FOLDER
    return None


@final
class Images(Dataset[tuple[Tensor, Tensor]]):
    """The images of several binary files, one file after the other, with their labels.

    Args:
        paths: the files.

    Raises:
        UserError: there is none, or one does not hold whole records.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        if not paths:
            raise UserError(f"{FOLDER} holds no data_batch_1.bin: unpack all of CIFAR-10 there.")
        self._files = [_records(path) for path in paths]
        self._starts = np.cumsum([0, *map(len, self._files)])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[tuple[Tensor, Tensor]]:
        """Return normalised images (3, 32, 32) and their labels (), all read at once."""
        numbers = np.array(indices)
        records = np.empty((len(numbers), RECORD_BYTES), dtype=np.uint8)
        owners = np.searchsorted(self._starts, numbers, side="right") - 1
        for owner in np.unique(owners):
            is_owned = owners == owner
            records[is_owned] = self._files[owner][numbers[is_owned] - self._starts[owner]]
        pixels = torch.from_numpy(records[:, 1:]).view(-1, 3, 32, 32)
        images = (pixels.float() / 255 - _MEAN) / _DEVIATION
        labels = torch.from_numpy(records[:, 0].astype(np.int64))
        return list(zip(images, labels, strict=True))


def _records(path: Path) -> np.ndarray:
    num_bytes = path.stat().st_size if path.is_file() else 0
    if num_bytes == 0 or num_bytes % RECORD_BYTES:
        raise UserError(
            f"{path} has {num_bytes} bytes, which is not a number of CIFAR-10 records of "
            f"{RECORD_BYTES}: take the binary version."
        )
    records = np.memmap(path, dtype=np.uint8, mode="r").reshape(-1, RECORD_BYTES)
    if (largest := int(records[:, 0].max())) >= NUM_CLASSES:
        raise UserError(f"{path} has a label {largest}: it is not CIFAR-10's binary version.")
    return records


def make_model() -> nn.Module:
    """Return ResNet-18 for (N, 3, 32, 32): a 3x3 convolution first, and no pooling after it."""
    num_channels = _CHANNELS_OF_STAGES[0]
    layers: list[nn.Module] = [*_normalised(3, num_channels, stride=1), nn.ReLU()]
    for stage, num_out in enumerate(_CHANNELS_OF_STAGES):
        for block in range(_BLOCKS_OF_STAGES[stage]):
            stride = 2 if stage > 0 and block == 0 else 1
            layers.append(Residual(num_channels, num_out, stride))
            num_channels = num_out
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(num_channels, NUM_CLASSES)]
    return nn.Sequential(*layers)


class Residual(nn.Module):
    """Two convolutions whose result is added to their input.

    Args:
        num_in: channels of the input.
        num_out: channels of the output.
        stride: of the first convolution.
    """

    def __init__(self, num_in: int, num_out: int, stride: int) -> None:
        super().__init__()
        self.change = nn.Sequential(
            *_normalised(num_in, num_out, stride), nn.ReLU(), *_normalised(num_out, num_out, 1)
        )
        keeps_shape = stride == 1 and num_in == num_out
        self.skip = (
            nn.Identity()
            if keeps_shape
            else nn.Sequential(*_normalised(num_in, num_out, stride, kernel_size=1))
        )

    def forward(self, inputs: Tensor) -> Tensor:
        """Return features (N, ``num_out``, H / stride, W / stride)."""
        return torch.relu(self.skip(inputs) + self.change(inputs))


def _normalised(num_in: int, num_out: int, stride: int, kernel_size: int = 3) -> list[nn.Module]:
    padding = kernel_size // 2
    convolution = nn.Conv2d(
        num_in, num_out, kernel_size, stride=stride, padding=padding, bias=False
    )
    nn.init.kaiming_normal_(convolution.weight, mode="fan_out", nonlinearity="relu")
    return [convolution, nn.BatchNorm2d(num_out)]
