"""The interface between workers and the parameter server (ranks).

A transport is two functions.  ``serve`` takes the requests of the other ranks' workers to the
server on rank 0, in threads; ``connect`` makes the ``ClientTransport`` of one of these workers.
Where both ends send messages, only the ``PeerConnection`` differs; ``serve_connection`` and
``ConnectionTransport`` are its two ends.
"""

import contextlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import final

from torch import Tensor

from ddpnb.rank.comm.flat_buffers import PackedTensors
from ddpnb.rank.comm.parameter_server import (
    REPLY,
    REQUEST,
    SERVER_RANK,
    Gradients,
    ParameterServer,
    Reply,
    RequestKind,
    WorkerRequest,
)
from ddpnb.rank.comm.rendezvous import NO_RANK


class PeerGoneError(Exception):
    """The other end has disconnected, or its process has died."""


Drain = Callable[[], None]
"""Waits until the last reply to every worker is on its way; ``serve`` returns it."""


class ClientTransport(ABC):
    """A worker's end; raises ``PeerGoneError`` where the server is gone."""

    copies: Sequence[PackedTensors]
    """The copies of the parameters; a reply names one of them."""

    @abstractmethod
    def call(self, request: WorkerRequest, gradients: Gradients = ()) -> Reply:
        """Send a request, and gradients with a push; wait for the reply, except to ``LEAVE``."""


@final
class DirectTransport(ClientTransport):
    """The end of rank 0's own worker: a call of the server, in this process."""

    def __init__(self, server: ParameterServer) -> None:
        self._server = server
        self.copies = server.store.copies

    def call(self, request: WorkerRequest, gradients: Gradients = ()) -> Reply:
        """Call the server; raise the server's own error, if there is one."""
        reply = self._server.handle(SERVER_RANK, request, on_cpu(gradients))
        if reply.lost_rank != NO_RANK and self._server.error is not None:
            raise self._server.error
        return reply


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
class ConnectionTransport(ClientTransport):
    """The end of another rank's worker.

    Args:
        connection: to the server's thread for this worker.
        gradients: memory to pack them in, which the server may share.
        copies: as in ``ClientTransport``.
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

    def call(self, request: WorkerRequest, gradients: Gradients = ()) -> Reply:
        """Send the request and the gradients, receive the reply and the parameters."""
        connection, is_push = self._connection, request.kind is RequestKind.PUSH
        if is_push:
            _copy_gradients(gradients, self._gradients.tensors)
        # A server that has disconnected left a last reply, read below, which says why.
        with contextlib.suppress(connection.gone):
            connection.send(REQUEST.pack(*request))
            if is_push:
                connection.send_tensor(self._gradients.raw)
        if request.kind is RequestKind.LEAVE:
            return Reply()
        try:
            reply = Reply(*REPLY.unpack(connection.receive(REPLY.size)))
            if reply.lost_rank == NO_RANK:
                connection.receive_tensor(self.copies[reply.copy].raw)
        except connection.gone as error:
            raise PeerGoneError from error
        return reply


def serve_connection(
    server: ParameterServer, rank: int, connection: PeerConnection, gradients: PackedTensors
) -> None:
    """Serve one worker until it is done, is lost or has failed."""
    incarnation, kind, lost_rank = object(), RequestKind.BEGIN, NO_RANK
    try:
        while kind in (RequestKind.BEGIN, RequestKind.PUSH) and lost_rank == NO_RANK:
            number, weight = REQUEST.unpack(connection.receive(REQUEST.size))
            kind = RequestKind(number)
            if kind is RequestKind.PUSH:
                connection.receive_tensor(gradients.raw)
            request = WorkerRequest(kind, weight)
            reply = server.handle(rank, request, gradients.tensors, incarnation)
            lost_rank = reply.lost_rank
            if kind is not RequestKind.LEAVE:
                connection.send(REPLY.pack(*reply))
                if lost_rank == NO_RANK:
                    connection.send_tensor(server.parameters(reply))
    except connection.gone:
        last = server.lose(rank, incarnation)
        # The worker may be alive: it was given up, or rank 0 has disconnected.
        with contextlib.suppress(connection.gone):
            connection.send(REPLY.pack(*last))


def start_thread(target: Callable[..., None], *args: object) -> threading.Thread:
    """Start a thread of the server, which does not keep the process alive."""
    thread = threading.Thread(target=target, args=args, name="ddpnb-server", daemon=True)
    thread.start()
    return thread


def on_cpu(gradients: Gradients) -> list[Tensor | None]:
    """Return gradients where the server can use them: as they are or, from a GPU, copied."""
    return [None if gradient is None else gradient.cpu() for gradient in gradients]


def _copy_gradients(gradients: Gradients, into: Sequence[Tensor]) -> None:
    """Copy gradients; a missing one is zero."""
    for tensor, gradient in zip(into, gradients, strict=True):
        if gradient is None:
            tensor.zero_()
        else:
            tensor.copy_(gradient)
