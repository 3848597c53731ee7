"""Tensors in memory that the ranks of a host share (ranks).

``PackedTensors`` are bytes, whatever the shapes and types of the tensors, each at a multiple of 64
bytes: copying all of them is one copy.  They may lie in memory that several processes map.
"""

import mmap
import os
import socket
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import NamedTuple, Self, final

import torch
from torch import Tensor

from ddpnb.protocol.processes import as_socket

_ALIGNMENT_BYTES = 64
"""One cache line."""

Gradients = Sequence[Tensor | None]
"""One for each parameter; None: none."""


class PackedTensors(NamedTuple):
    """Tensors that share one piece of CPU memory."""

    raw: Tensor
    """All the bytes, uint8."""
    tensors: list[Tensor]
    """Views of them, in the shapes and types that were asked for."""

    def fill(self, values: Gradients) -> None:
        """Copy detached values in, from any device; None: zeros."""
        for tensor, value in zip(self.tensors, values, strict=True):
            if value is None:
                tensor.zero_()
            else:
                tensor.copy_(value)


def pack(like: Sequence[Tensor]) -> PackedTensors:
    """Return tensors like these in private memory, with undefined values."""
    return _views(torch.empty(_packed_num_bytes(like), dtype=torch.uint8, device="cpu"), like)


@final
class SharedMemory:
    """Copies of all parameters, and places for gradients.

    It has no file name, so that nothing is left however a process ends; it is sent through a
    socket.  It needs no locks: a worker that writes gradients waits for the reply, and its copy
    changes only meanwhile.

    Args:
        descriptor: of the memory; this object closes it.
        like: give shapes and types.
        num_copies: one for each worker, each of which but rank 0 then also has a place for
            gradients; or one that all of them update.
    """

    def __init__(self, descriptor: int, like: Sequence[Tensor], num_copies: int) -> None:
        self._descriptor = descriptor
        size, num_gradients = _packed_num_bytes(like), num_copies - 1
        os.truncate(descriptor, (num_copies + num_gradients) * size)  # of no effect on a second one
        whole = torch.frombuffer(mmap.mmap(descriptor, 0), dtype=torch.uint8)
        pieces = [_views(raw, like) for raw in whole.split(size)]
        self.copies, self._gradients = pieces[:num_copies], pieces[num_copies:]

    @classmethod
    def create(cls, like: Sequence[Tensor], num_copies: int) -> Self:
        """Create the memory, 0 everywhere."""
        return cls(os.memfd_create("ddpnb"), like, num_copies)

    @classmethod
    def receive(cls, connection: Connection, like: Sequence[Tensor], num_copies: int) -> Self:
        """Map the memory that the process at the other end sends; ``OSError`` if it is gone."""
        with as_socket(connection.fileno()) as end:
            _, descriptors, *_ = socket.recv_fds(end, 1, 1)
        if not descriptors:
            raise ConnectionResetError
        return cls(descriptors[0], like, num_copies)

    def copy_of(self, rank: int) -> PackedTensors:
        """Return the parameters that a worker trains on."""
        return self.copies[rank % len(self.copies)]

    def gradients(self, rank: int) -> PackedTensors:
        """Return where a worker writes its gradients; rank 0's need no copy."""
        return self._gradients[rank - 1] if self._gradients else pack([])

    def send(self, connection: Connection) -> None:
        """Send this memory to the process at the other end, on this host."""
        with as_socket(connection.fileno()) as end:
            socket.send_fds(end, [b"!"], [self._descriptor])

    def close(self) -> None:
        """Send it no more; what is mapped stays.  To be called once."""
        os.close(self._descriptor)


def _views(raw: Tensor, like: Sequence[Tensor]) -> PackedTensors:
    tensors, start = [], 0
    for tensor in like:
        tensors.append(raw[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape))
        start += _padded_num_bytes(tensor)
    return PackedTensors(raw, tensors)


def _packed_num_bytes(like: Sequence[Tensor]) -> int:
    """Return the bytes that tensors like these take when packed, padding included."""
    return max(_ALIGNMENT_BYTES, sum(_padded_num_bytes(tensor) for tensor in like))


def _padded_num_bytes(tensor: Tensor) -> int:
    return -(-tensor.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
