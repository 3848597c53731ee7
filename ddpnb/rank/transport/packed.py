"""How do many tensors lie in one piece of memory, private or shared?  (Rank side.)

Their bytes lie one behind the other, each tensor's at a multiple of 64, in the order
given: any mix of shapes and types.  Copying them all is one copy.  Shared memory is a
file in the run's folder, unlinked once everybody has mapped it, so that nothing is
left however a process ends.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ddpnb.errors import UserError

_ALIGNMENT = 64
"""One cache line, in bytes."""


class Packed(NamedTuple):
    """Tensors that share one piece of CPU memory."""

    raw: Tensor
    """All the bytes, uint8."""
    tensors: list[Tensor]
    """Views of them, in the shapes and types asked for."""


def pack(like: Sequence[Tensor]) -> Packed:
    """Return tensors like these in private memory, with undefined values."""
    return _cut(torch.empty(num_bytes(like), dtype=torch.uint8), like)


def create_shared(path: Path, size: int) -> None:
    """Make a file of ``size`` bytes for this user alone.

    Raises:
        UserError: the folder's file system has no room for it.
    """
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    try:
        # Without this a full file system would end the process with SIGBUS at the first write.
        os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        path.unlink()
        raise UserError(
            f"There is no room for {size / 1e6:.0f} MB of shared memory in {path.parent}; "
            "free some, or train a smaller model."
        ) from error
    finally:
        os.close(descriptor)


def map_shared(path: Path, like: Sequence[Tensor]) -> Packed:
    """Return tensors like these in a file that ``create_shared`` made."""
    raw = torch.from_file(str(path), shared=True, size=num_bytes(like), dtype=torch.uint8)
    return _cut(raw, like)


def map_copies(path: Path, like: Sequence[Tensor], num_copies: int) -> list[Packed]:
    """Return so many times tensors like these, one behind the other in such a file."""
    all_of_it = map_shared(path, [*like] * num_copies)
    size, num = num_bytes(like), len(like)
    return [
        Packed(all_of_it.raw[at * size :][:size], all_of_it.tensors[at * num :][:num])
        for at in range(num_copies)
    ]


def num_bytes(like: Sequence[Tensor]) -> int:
    """Return how many bytes tensors like these take when packed."""
    return max(_ALIGNMENT, sum(_padded_bytes(tensor) for tensor in like))


def _cut(raw: Tensor, like: Sequence[Tensor]) -> Packed:
    tensors, start = [], 0
    for tensor in like:
        end = start + tensor.numel() * tensor.element_size()
        tensors.append(raw[start:end].view(tensor.dtype).view(tensor.shape))
        start += _padded_bytes(tensor)
    return Packed(raw, tensors)


def _padded_bytes(tensor: Tensor) -> int:
    size = tensor.numel() * tensor.element_size()
    return -(-size // _ALIGNMENT) * _ALIGNMENT
