"""Many tensors in one piece of memory, private or shared (ranks).

Their bytes lie one after the other in the given order, each tensor at a multiple of 64 bytes,
whatever their shapes and types.  Copying all of them is one copy.  Shared memory is a file in
the run's folder.
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


def pack(like: Sequence[Tensor]) -> PackedTensors:
    """Return tensors like these in private memory, with undefined values."""
    return _views(torch.empty(packed_num_bytes(like), dtype=torch.uint8), like)


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


@final
class SharedMemory:
    """Copies of all parameters, and a place for the gradients of each rank but rank 0.

    It has no file name, so that nothing is left however a process ends; it is sent through a
    socket.  It does not keep two processes from touching the same bytes: the server decides
    which copy a worker trains on, and a worker that writes gradients waits for the reply.

    Args:
        descriptor: of the memory; closed by ``close``.
        like: the parameters.
        num_workers: all ranks, rank 0 included.
    """

    def __init__(self, descriptor: int, like: Sequence[Tensor], num_workers: int) -> None:
        self._descriptor = descriptor
        # The file has no name, but this process's descriptor has one.
        pieces = map_copies(Path(f"/dev/fd/{descriptor}"), like, 2 * num_workers - 1)
        self.copies, self._gradients = pieces[:num_workers], pieces[num_workers:]

    @classmethod
    def create(cls, path: Path, like: Sequence[Tensor], num_workers: int) -> Self:
        """Create the memory, which has a name for a moment.

        Raises:
            UserError: there is no room for it.
        """
        create_shared_file(path, (2 * num_workers - 1) * packed_num_bytes(like))
        descriptor = os.open(path, os.O_RDWR)
        path.unlink()
        return cls(descriptor, like, num_workers)

    @classmethod
    def receive(cls, connection: socket.socket, like: Sequence[Tensor], num_workers: int) -> Self:
        """Map the memory that the process at the other end sends.

        Raises:
            OSError: the other end is gone.
        """
        _, descriptors, *_ = socket.recv_fds(connection, 1, 1)
        if not descriptors:
            raise ConnectionResetError
        with contextlib.closing(cls(descriptors[0], like, num_workers)) as memory:
            return memory

    def send(self, connection: socket.socket) -> None:
        """Send this memory to the process at the other end of a Unix socket."""
        socket.send_fds(connection, [b"!"], [self._descriptor])

    def gradients(self, rank: int) -> PackedTensors:
        """Return where a worker writes its gradients; rank 0's need no copy."""
        return self._gradients[rank - 1]

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
