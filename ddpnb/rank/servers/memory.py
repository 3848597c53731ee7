"""Store tensors in memory that the ranks of a host share.  Runs on the ranks.

``PackedTensors`` stores tensors of any shapes and types in one piece of memory, so that one
operation copies all tensors. Each tensor starts at a multiple of 64 bytes.
"""

import mmap
import os
import socket
import tempfile
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import NamedTuple, Self, final

import torch
from torch import Tensor

from ddpnb.protocol.processes import as_socket, portable

_ALIGNMENT_BYTES = 64
"""Size of one cache line, in bytes."""

Gradients = Sequence[Tensor | None]
"""List with the gradient of each parameter, or None for a parameter without a gradient."""


class PackedTensors(NamedTuple):
    """Tensors that share one piece of CPU memory."""

    raw: Tensor
    """All bytes of the memory, as a uint8 tensor."""
    tensors: list[Tensor]
    """Views of ``raw`` with the requested shapes and types."""
    is_given: Tensor
    """View of ``raw`` with one number for each tensor: 0 if the latest value was None."""

    @property
    def values(self) -> Gradients:
        """The tensors, with None for each tensor whose latest value was None."""
        pairs = zip(self.tensors, self.is_given.tolist(), strict=True)
        return [tensor if is_given else None for tensor, is_given in pairs]

    def fill(self, values: Gradients) -> None:
        """Copy detached values from any device to the tensors, except values that are None."""
        self.is_given.copy_(torch.tensor([value is not None for value in values]))
        for tensor, value in zip(self.tensors, values, strict=True):
            if value is not None:
                tensor.copy_(value)


def pack(like: Sequence[Tensor]) -> PackedTensors:
    """Return uninitialised tensors in private memory, with the shapes and types of ``like``."""
    return _views(torch.empty(_packed_num_bytes(like), dtype=torch.uint8, device="cpu"), like)


@final
class SharedMemory:
    """Shared memory for copies of all parameters, and for gradients.

    The memory has no file name, so no file is left if a process dies. Processes send the memory's
    file descriptor through a socket. No locks are needed, because a worker that writes gradients
    waits for the reply. The worker's copy of the parameters changes only while the worker waits.

    Args:
        descriptor: File descriptor of the memory. ``close`` closes the descriptor.
        like: Tensors with the shapes and types of the parameters.
        num_copies: Number of copies of the parameters: one for all workers, or one for each worker.
            If each worker has a copy, all workers except rank 0 also have memory for gradients.
    """

    def __init__(self, descriptor: int, like: Sequence[Tensor], num_copies: int) -> None:
        self._descriptor = descriptor
        size, num_gradients = _packed_num_bytes(like), num_copies - 1
        os.truncate(descriptor, (num_copies + num_gradients) * size)  # no effect at this size
        whole = torch.frombuffer(mmap.mmap(descriptor, 0), dtype=torch.uint8)
        pieces = [_views(raw, like) for raw in whole.split(size)]
        self.copies, self._gradients = pieces[:num_copies], pieces[num_copies:]

    @classmethod
    def create(cls, like: Sequence[Tensor], num_copies: int) -> Self:
        """Create the memory, filled with zeros."""
        if not portable():
            return cls(os.memfd_create("ddpnb"), like, num_copies)
        with tempfile.TemporaryFile() as file:  # has no name either
            return cls(os.dup(file.fileno()), like, num_copies)

    @classmethod
    def receive(cls, connection: Connection, like: Sequence[Tensor], num_copies: int) -> Self:
        """Map the memory that another process sends. Raises ``OSError`` if that process ended."""
        with as_socket(connection.fileno()) as end:
            _, descriptors, *_ = socket.recv_fds(end, 1, 1)
        if not descriptors:
            raise ConnectionResetError
        return cls(descriptors[0], like, num_copies)

    def copy_of(self, rank: int) -> PackedTensors:
        """Return the copy of the parameters that a worker uses for training."""
        return self.copies[rank % len(self.copies)]

    def gradients(self, rank: int) -> PackedTensors:
        """Return memory for a worker's gradients, or empty memory if all workers share one copy."""
        return self._gradients[rank - 1] if self._gradients else pack([])

    def send(self, connection: Connection) -> None:
        """Send this memory to another process on this host."""
        with as_socket(connection.fileno()) as end:
            socket.send_fds(end, [b"!"], [self._descriptor])

    def close(self) -> None:
        """Close the descriptor. Existing mappings stay valid. Call this method only once."""
        os.close(self._descriptor)


def _views(raw: Tensor, like: Sequence[Tensor]) -> PackedTensors:
    tensors, start = [], 0
    for tensor in like:
        tensors.append(raw[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape))
        start += _padded(tensor.nbytes)
    return PackedTensors(raw, tensors, raw[start : start + len(like)])


def _packed_num_bytes(like: Sequence[Tensor]) -> int:
    """Return the number of bytes that these tensors need if packed, including padding."""
    num_flags = max(1, len(like))
    return sum(map(_padded, (*(tensor.nbytes for tensor in like), num_flags)))


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
