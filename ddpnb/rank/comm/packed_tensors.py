"""How do many tensors lie in one piece of memory, private or shared?  (Rank side.)

Their bytes lie one behind the other, each tensor's at a multiple of 64, in the order
given: any mix of shapes and types.  Copying them all is one copy.  Shared memory is a
file in the run's folder.
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

_ALIGNMENT = 64
"""One cache line, in bytes."""


class PackedTensors(NamedTuple):
    """Tensors that share one piece of CPU memory."""

    raw: Tensor
    """All the bytes, uint8."""
    tensors: list[Tensor]
    """Views of them, in the shapes and types asked for."""


def pack(like: Sequence[Tensor]) -> PackedTensors:
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


def map_copies(path: Path, like: Sequence[Tensor], num_copies: int) -> list[PackedTensors]:
    """Return so many times tensors like these, one behind the other in such a file."""
    size = num_bytes(like)
    whole = torch.from_file(str(path), shared=True, size=num_copies * size, dtype=torch.uint8)
    return [_cut(raw, like) for raw in whole.split(size)]


def num_bytes(like: Sequence[Tensor]) -> int:
    """Return how many bytes tensors like these take when packed."""
    return max(_ALIGNMENT, sum(_padded_bytes(tensor) for tensor in like))


def _cut(raw: Tensor, like: Sequence[Tensor]) -> PackedTensors:
    tensors, start = [], 0
    for tensor in like:
        end = start + tensor.numel() * tensor.element_size()
        tensors.append(raw[start:end].view(tensor.dtype).view(tensor.shape))
        start += _padded_bytes(tensor)
    return PackedTensors(raw, tensors)


def _padded_bytes(tensor: Tensor) -> int:
    size = tensor.numel() * tensor.element_size()
    return -(-size // _ALIGNMENT) * _ALIGNMENT


@final
class SharedMemory:
    """Copies of all parameters, and a place for the gradients of each rank but 0.

    No file names it, so that nothing is left however a process ends: it is handed over through
    a socket.  The server says which copy a worker trains on, and a worker that writes gradients
    waits for its answer: nothing here keeps two processes from touching the same bytes.

    Args:
        descriptor: of the memory; closed with this.
        like: the parameters.
        num_workers: of all ranks, rank 0 among them.
    """

    def __init__(self, descriptor: int, like: Sequence[Tensor], num_workers: int) -> None:
        self._descriptor = descriptor
        # Mapped by a name that is this process's own: the file has none any more.
        pieces = map_copies(Path(f"/dev/fd/{descriptor}"), like, 2 * num_workers - 1)
        self.copies, self._gradients = pieces[:num_workers], pieces[num_workers:]

    @classmethod
    def create(cls, path: Path, like: Sequence[Tensor], num_workers: int) -> Self:
        """Make the memory, which has a name for a moment.

        Raises:
            UserError: there is no room for it.
        """
        create_shared(path, (2 * num_workers - 1) * num_bytes(like))
        descriptor = os.open(path, os.O_RDWR)
        path.unlink()
        return cls(descriptor, like, num_workers)

    def gradients(self, rank: int) -> PackedTensors:
        """Return where a worker writes its gradients; rank 0 hands over its own instead."""
        return self._gradients[rank - 1]

    def hand_over(self, connection: socket.socket) -> None:
        """Let the process at the other end of a local socket have this memory."""
        socket.send_fds(connection, [b"!"], [self._descriptor])

    @classmethod
    def receive(cls, connection: socket.socket, like: Sequence[Tensor], num_workers: int) -> Self:
        """Map the memory that the process at the other end hands over.

        Raises:
            OSError: the other end is gone.
        """
        _, descriptors, *_ = socket.recv_fds(connection, 1, 1)
        if not descriptors:
            raise ConnectionResetError
        with contextlib.closing(cls(descriptors[0], like, num_workers)) as memory:
            return memory

    def close(self) -> None:
        """Hand it over to nobody any more; what is mapped stays.  May be called twice."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
