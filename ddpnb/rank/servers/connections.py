"""The two ends of a worker's connection to rank 0, whatever carries its messages (ranks).

``serve`` runs in a thread of rank 0 for each worker of another rank; a ``RemoteQueue`` is that
worker's end.  Rank 0's own worker calls the queue itself.
"""

import contextlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import final

from torch import Tensor

from ddpnb.rank.collectives.account import SERVER_THREAD
from ddpnb.rank.servers.memory import PackedTensors
from ddpnb.rank.servers.queue import (
    REPLY,
    REQUEST,
    Reply,
    Request,
    RequestKind,
    WorkQueue,
)
from ddpnb.rank.servers.rendezvous import NO_RANK
from ddpnb.rank.servers.store import Gradients


class PeerGoneError(Exception):
    """The other end has disconnected, or its process has died."""


class PeerConnection(ABC):
    """One end of a connection."""

    gone: type[Exception]
    """What every method raises where the other end is gone."""

    @abstractmethod
    def send(self, data: bytes) -> None:
        """Send bytes."""

    @abstractmethod
    def receive(self, num_bytes: int) -> bytes:
        """Return exactly so many bytes."""

    def send_tensor(self, tensor: Tensor) -> None:  # noqa: B027
        """Send a tensor; nothing to do where both ends share its memory."""

    def receive_tensor(self, tensor: Tensor) -> None:  # noqa: B027
        """Fill a tensor; nothing to do where the other end has filled it."""


@final
class RemoteQueue:
    """A worker's access to the queue of rank 0.

    Args:
        connection: to the thread of rank 0 for this worker.
        gradients: memory to pack them in, which rank 0 may share.
        copies: of the parameters; a reply names one of them.
    """

    def __init__(
        self,
        connection: PeerConnection,
        gradients: PackedTensors,
        copies: Sequence[PackedTensors],
    ) -> None:
        self.copies = copies
        self._connection = connection
        self._gradients = gradients

    def call(self, request: Request, gradients: Gradients = ()) -> Reply:
        """Send a request, and gradients with a step; wait for the reply, except to ``FAIL``.

        Raises:
            PeerGoneError: rank 0 is gone.
        """
        connection = self._connection
        for tensor, gradient in zip(self._gradients.tensors, gradients, strict=False):
            if gradient is None:
                tensor.zero_()
            else:
                tensor.copy_(gradient)
        # A rank 0 that has disconnected left a last reply, read below, which says why.
        with contextlib.suppress(connection.gone):
            connection.send(REQUEST.pack(*request))
            if request.kind is RequestKind.STEP:
                connection.send_tensor(self._gradients.raw)
        if request.kind is RequestKind.FAIL:
            return Reply()
        try:
            reply = Reply(*REPLY.unpack(connection.receive(REPLY.size)))
            if reply.lost_rank == NO_RANK:
                connection.receive_tensor(self.copies[reply.copy].raw)
        except connection.gone as error:
            raise PeerGoneError from error
        return reply


def serve(
    queue: WorkQueue,
    rank: int,
    connection: PeerConnection,
    gradients: PackedTensors,
    copies: Sequence[PackedTensors],
) -> None:
    """Serve one worker until it is done, is lost or has failed."""
    incarnation, kind, lost_rank = object(), RequestKind.BEGIN, NO_RANK
    try:
        while kind in (RequestKind.BEGIN, RequestKind.STEP) and lost_rank == NO_RANK:
            number, weight = REQUEST.unpack(connection.receive(REQUEST.size))
            kind = RequestKind(number)
            if kind is RequestKind.STEP:
                connection.receive_tensor(gradients.raw)
            reply = queue.handle(rank, Request(kind, weight), gradients.tensors, incarnation)
            lost_rank = reply.lost_rank
            if kind is not RequestKind.FAIL:
                connection.send(REPLY.pack(*reply))
                if lost_rank == NO_RANK:
                    connection.send_tensor(copies[reply.copy].raw)
    except connection.gone:
        last = queue.lose(rank, incarnation)
        # The worker may be alive: it was given up, or rank 0 has disconnected.
        with contextlib.suppress(connection.gone):
            connection.send(REPLY.pack(*last))


def join_threads(threads: Sequence[threading.Thread], seconds: float) -> None:
    """Wait, so long for each, until the last reply to every worker is on its way."""
    for thread in list(threads):
        thread.join(seconds)


def start_thread(target: Callable[..., None], *args: object) -> threading.Thread:
    """Start a thread of rank 0's, which does not keep the process alive."""
    thread = threading.Thread(target=target, args=args, name=SERVER_THREAD, daemon=True)
    thread.start()
    return thread
