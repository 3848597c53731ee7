"""Tensors in memory that the ranks of a host share (ranks).

``PackedTensors`` are bytes, whatever the shapes and types of the tensors, each at a multiple of 64
bytes: copying all of them is one copy.  They may lie in a file that several processes map.
"""

import contextlib
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Self, final

import torch
from torch import Tensor

from ddpnb.protocol.errors import UserError

_ALIGNMENT_BYTES = 64
"""One cache line."""


class PackedTensors(NamedTuple):
    """Tensors that share one piece of CPU memory."""

    raw: Tensor
    """All the bytes, uint8."""
    tensors: list[Tensor]
    """Views of them, in the shapes and types that were asked for."""

    @torch.no_grad()
    def fill(self, values: Sequence[Tensor]) -> None:
        """Copy values in, from any device."""
        for tensor, value in zip(self.tensors, values, strict=True):
            tensor.copy_(value)


NO_TENSORS = PackedTensors(torch.empty(0, dtype=torch.uint8, device="cpu"), [])


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


class Layout(NamedTuple):
    """What lies in the memory that the workers of a run share."""

    num_copies: int
    """Copies of the parameters: one for each worker, or one that all of them update."""
    num_gradients: int
    """Places for gradients: one for each rank but rank 0, which needs no copy, or none."""


@final
class SharedMemory:
    """Copies of all parameters, and places for gradients.

    It has no file name, so that nothing is left however a process ends; it is sent through a
    socket.  It needs no locks: the queue decides which copy a worker trains on, and a worker that
    writes gradients waits for the reply.

    Args:
        descriptor: of the file; this object closes it.
        like: give shapes and types.
        layout: how many pieces there are.
    """

    def __init__(self, descriptor: int, like: Sequence[Tensor], layout: Layout) -> None:
        self._descriptor = descriptor
        size = packed_num_bytes(like)
        # The file has no name, but this process's descriptor has one.
        path = f"/dev/fd/{descriptor}"
        whole = torch.from_file(path, shared=True, size=sum(layout) * size, dtype=torch.uint8)
        pieces = [_views(raw, like) for raw in whole.split(size)]
        self.copies, self._gradients = pieces[: layout.num_copies], pieces[layout.num_copies :]

    @classmethod
    def create(cls, path: Path, like: Sequence[Tensor], layout: Layout) -> Self:
        """Create the memory, which has a name for a moment; ``UserError`` if there is no room."""
        create_shared_file(path, sum(layout) * packed_num_bytes(like))
        descriptor = os.open(path, os.O_RDWR)
        path.unlink()
        return cls(descriptor, like, layout)

    @classmethod
    def receive(cls, connection: socket.socket, like: Sequence[Tensor], layout: Layout) -> Self:
        """Map the memory that the process at the other end sends; ``OSError`` if it is gone."""
        _, descriptors, *_ = socket.recv_fds(connection, 1, 1)
        if not descriptors:
            raise ConnectionResetError
        with contextlib.closing(cls(descriptors[0], like, layout)) as memory:
            return memory

    def gradients(self, rank: int) -> PackedTensors:
        """Return where a worker writes its gradients; rank 0's need no copy."""
        return self._gradients[rank - 1] if self._gradients else NO_TENSORS

    def send(self, connection: socket.socket) -> None:
        """Send this memory to the process at the other end of a Unix socket."""
        socket.send_fds(connection, [b"!"], [self._descriptor])

    def close(self) -> None:
        """Close the descriptor; what is mapped stays.  May be called twice."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


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
