"""Many tensors in one piece of memory (ranks).

A ``FlatBuffer`` has one flat tensor for each dtype: what a collective takes.  ``PackedTensors`` are
bytes, whatever the shapes and types of the tensors, each at a multiple of 64 bytes: copying all of
them is one copy.  They may lie in a file that several processes map.
"""

import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddpnb.protocol.errors import UserError

_ALIGNMENT_BYTES = 64
"""One cache line."""


class FlatBuffer:
    """Tensors laid end to end: one flat tensor for each dtype among them.

    It lies where the default group can send from: for gloo in the host's memory.

    Args:
        like: gives shapes, dtypes and device; at least one.
    """

    def __init__(self, like: Sequence[Tensor]) -> None:
        device = torch.device("cpu") if dist.get_backend() == "gloo" else like[0].device
        sizes: Counter[torch.dtype] = Counter()
        for tensor in like:
            sizes[tensor.dtype] += tensor.numel()
        rest = {kind: torch.zeros(size, dtype=kind, device=device) for kind, size in sizes.items()}
        self.buffers = list(rest.values())
        """Shape (n,) each."""
        self.views: list[Tensor] = []
        """The part of a buffer for each tensor, in its shape, in the given order."""
        for tensor in like:
            view, rest[tensor.dtype] = rest[tensor.dtype].tensor_split([tensor.numel()])
            self.views.append(view.view(tensor.shape))

    @torch.no_grad()
    def gather(self, tensors: Iterable[Tensor]) -> None:
        """Copy tensors in."""
        for view, tensor in zip(self.views, tensors, strict=True):
            view.copy_(tensor)

    @torch.no_grad()
    def scatter(self, tensors: Iterable[Tensor]) -> None:
        """Copy them out, into these."""
        for view, tensor in zip(self.views, tensors, strict=True):
            tensor.copy_(view)

    def sum(self, tensors: Sequence[Tensor]) -> None:
        """Replace tensors by their sums over all ranks; takes part: every rank."""
        self.gather(tensors)
        for buffer in self.buffers:
            dist.all_reduce(buffer)
        self.scatter(tensors)

    @torch.no_grad()
    def average(self, tensors: Sequence[Tensor]) -> None:
        """Replace tensors by their means over all ranks; takes part: every rank."""
        self.sum(tensors)
        for tensor in tensors:
            tensor /= dist.get_world_size()

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return num_bytes(self.buffers)


def gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """Return the gradients; a parameter that had no part in the loss gets one of zeros."""
    found = []
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        found.append(parameter.grad)
    return found


def all_reduce_bytes(size: int, world_size: int) -> int:
    """Return what each rank sends in an all-reduce of ``size`` bytes: 2 (N - 1) / N of them.

    No all-reduce can do with less on every rank (Patarasuk and Yuan, 2009).
    """
    return 2 * (world_size - 1) * size // world_size


def num_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of tensors; of a sharded one, those on this rank."""
    return sum(tensor.numel() * tensor.element_size() for tensor in map(_local, tensors))


class PackedTensors(NamedTuple):
    """Tensors that share one piece of CPU memory."""

    raw: Tensor
    """All the bytes, uint8."""
    tensors: list[Tensor]
    """Views of them, in the shapes and types that were asked for."""


def pack(like: Sequence[Tensor]) -> PackedTensors:
    """Return tensors like these in private memory, with undefined values."""
    return _views(torch.empty(packed_num_bytes(like), dtype=torch.uint8, device="cpu"), like)


def packed_num_bytes(like: Sequence[Tensor]) -> int:
    """Return the bytes that tensors like these take when packed, padding included."""
    return max(_ALIGNMENT_BYTES, sum(_padded_num_bytes(tensor) for tensor in like))


def create_shared_file(path: Path, num_bytes: int) -> None:
    """Create a file of this size that only this user can open.

    Raises:
        UserError: the folder's file system has no room for it.
    """
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    try:
        # Otherwise a full file system would end the process with SIGBUS at the first write.
        os.posix_fallocate(descriptor, 0, num_bytes)
    except OSError as error:
        path.unlink()
        raise UserError(
            f"There is no room for {num_bytes / 1e6:.0f} MB of shared memory in {path.parent}; "
            "free some, or train a smaller model."
        ) from error
    finally:
        os.close(descriptor)


def map_copies(path: Path, like: Sequence[Tensor], num_copies: int) -> list[PackedTensors]:
    """Map such a file as copies of tensors like these, one after the other."""
    size = packed_num_bytes(like)
    whole = torch.from_file(str(path), shared=True, size=num_copies * size, dtype=torch.uint8)
    return [_views(raw, like) for raw in whole.split(size)]


def _views(raw: Tensor, like: Sequence[Tensor]) -> PackedTensors:
    tensors, start = [], 0
    for tensor in like:
        end = start + tensor.numel() * tensor.element_size()
        tensors.append(raw[start:end].view(tensor.dtype).view(tensor.shape))
        start += _padded_num_bytes(tensor)
    return PackedTensors(raw, tensors)


def _padded_num_bytes(tensor: Tensor) -> int:
    size = tensor.numel() * tensor.element_size()
    return -(-size // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def _local(tensor: Tensor) -> Tensor:
    """Return the part on this rank, without an import of ``DTensor``, which takes a second."""
    to_local: Callable[[], Tensor] | None = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()
