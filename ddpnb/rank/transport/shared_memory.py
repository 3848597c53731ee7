"""Which memory do a server and the workers of its host share?  (Rank side.)

One piece, made before the server, which no file names: whoever may have it is handed its
descriptor through a socket.
"""

import contextlib
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Self, final

from torch import Tensor

from ddpnb.rank.transport.message import PeerGoneError
from ddpnb.rank.transport.packed import Packed, create_shared, map_copies, num_bytes


@final
class SharedMemory:
    """Copies of all parameters, and a place for the gradients of each rank but 0.

    Nothing here keeps two processes from touching the same bytes: the server says which copy
    a worker trains on, and who writes gradients waits for its answer.

    Args:
        descriptor: of the memory; closed with this.
        like: the parameters.
        num_workers: of all ranks, rank 0 among them.
    """

    def __init__(self, descriptor: int, like: Sequence[Tensor], num_workers: int) -> None:
        self._descriptor = descriptor
        # Mapped by a name that is this process's own: the file has none any more.
        pieces = map_copies(Path(f"/dev/fd/{descriptor}"), like, 2 * num_workers - 1)
        self.copies: list[Packed] = pieces[:num_workers]
        self._gradients = pieces[num_workers:]

    @classmethod
    def create(cls, path: Path, like: Sequence[Tensor], num_workers: int) -> Self:
        """Make the memory.

        Args:
            path: where it has a name for a moment.
            like: the parameters.
            num_workers: of all ranks.

        Raises:
            UserError: there is no room for it.
        """
        create_shared(path, (2 * num_workers - 1) * num_bytes(like))
        descriptor = os.open(path, os.O_RDWR)
        path.unlink()
        return cls(descriptor, like, num_workers)

    def gradients(self, rank: int) -> Packed:
        """Return where a worker writes its gradients; rank 0 hands over its own instead."""
        return self._gradients[rank - 1]

    def hand_over(self, connection: socket.socket) -> None:
        """Let the process at the other end of a local socket have this memory.

        Raises:
            PeerGoneError: the other end is gone.
        """
        try:
            socket.send_fds(connection, [b"!"], [self._descriptor])
        except OSError as error:
            raise PeerGoneError from error

    @classmethod
    def receive(cls, connection: socket.socket, like: Sequence[Tensor], num_workers: int) -> Self:
        """Map the memory that the process at the other end hands over.

        Raises:
            PeerGoneError: the other end is gone.
        """
        try:
            _, descriptors, *_ = socket.recv_fds(connection, 1, 1)
        except OSError as error:
            raise PeerGoneError from error
        if not descriptors:
            raise PeerGoneError
        with contextlib.closing(cls(descriptors[0], like, num_workers)) as memory:
            return memory

    def close(self) -> None:
        """Hand it over to nobody any more; what is mapped stays.  May be called twice."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
