"""How workers reach the parameter server; within a host by shared memory and sockets (ranks).

A transport is two functions.  ``serve`` takes the requests of the other ranks' workers to the
server on rank 0, in threads; ``connect`` makes the ``ClientTransport`` of one of these workers.
Where both ends send messages, only the ``PeerConnection`` differs; ``serve_connection`` and
``ConnectionTransport`` are its two ends.

Within a host each worker writes its gradients into its part of the shared memory, and trains on one
of the copies of the parameters there.  Short messages through a Unix socket pass the turn; where a
process dies, the socket closes at once.  The server's socket lies in the run's folder, which no
other user may enter: a process that starts later finds it without a collective.
"""

import contextlib
import os
import socket
import struct
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Self, final

from torch import Tensor

from ddpnb.rank.comm.flat_buffers import (
    PackedTensors,
    create_shared_file,
    map_copies,
    packed_num_bytes,
)
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
from ddpnb.rank.comm.rendezvous import NO_RANK, RunOverError, WorkerConfig

_HELLO = struct.Struct("<q")
"""The rank that connects."""
_MAX_SOCKET_PATH_BYTES = 107
"""Linux's limit for the address of a Unix socket."""


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
            for tensor, gradient in zip(self._gradients.tensors, gradients, strict=True):
                if gradient is None:
                    tensor.zero_()
                else:
                    tensor.copy_(gradient)
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


@final
class SharedMemory:
    """Copies of all parameters, and a place for the gradients of each rank but rank 0.

    It has no file name, so that nothing is left however a process ends; it is sent through a
    socket.  It needs no locks: the server decides which copy a worker trains on, and a worker that
    writes gradients waits for the reply.
    """

    def __init__(self, descriptor: int, like: Sequence[Tensor], num_workers: int) -> None:
        self._descriptor = descriptor
        # The file has no name, but this process's descriptor has one.
        pieces = map_copies(Path(f"/dev/fd/{descriptor}"), like, 2 * num_workers - 1)
        self.copies, self._gradients = pieces[:num_workers], pieces[num_workers:]

    @classmethod
    def create(cls, path: Path, like: Sequence[Tensor], num_workers: int) -> Self:
        """Create the memory, which has a name for a moment; ``UserError`` if there is no room."""
        create_shared_file(path, (2 * num_workers - 1) * packed_num_bytes(like))
        descriptor = os.open(path, os.O_RDWR)
        path.unlink()
        return cls(descriptor, like, num_workers)

    @classmethod
    def receive(cls, connection: socket.socket, like: Sequence[Tensor], num_workers: int) -> Self:
        """Map the memory that the process at the other end sends; ``OSError`` if it is gone."""
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


def serve_shm(
    server: ParameterServer, memory: SharedMemory, config: WorkerConfig, opened: ExitStack
) -> Drain:
    """Listen at a Unix socket, and serve each worker in a thread, until ``opened`` closes."""
    threads: list[threading.Thread] = []
    sockets: list[socket.socket] = []
    listener = opened.enter_context(socket.socket(socket.AF_UNIX))
    path = socket_path(config)
    opened.callback(path.unlink, missing_ok=True)
    listener.bind(str(path))
    listener.settimeout(None)  # whatever the user's default is
    listener.listen()

    def accept() -> None:
        with contextlib.suppress(OSError):  # the listener is shut down
            while True:
                connected, _ = listener.accept()
                sockets.append(connected)
                threads.append(start_thread(_serve, server, memory, connected, config))

    def drain() -> None:
        for thread in list(threads):
            thread.join(config.timeout_seconds)

    def disconnect() -> None:
        listener.shutdown(socket.SHUT_RDWR)
        acceptor.join(config.timeout_seconds)
        for connected in sockets:
            with contextlib.suppress(OSError):  # closed already
                connected.shutdown(socket.SHUT_RD)  # the last reply can still be sent
        drain()

    acceptor = start_thread(accept)
    opened.callback(disconnect)
    return drain


def _serve(
    server: ParameterServer, memory: SharedMemory, connected: socket.socket, config: WorkerConfig
) -> None:
    """Send the memory to one worker, and serve it."""
    connection = _SocketConnection(connected, config)
    with connected:
        set_timeout(connected, config.timeout_seconds)
        try:
            (rank,) = _HELLO.unpack(connection.receive(_HELLO.size))
            connection.peer = rank
            memory.send(connected)
        except OSError:
            return
        set_timeout(connected, 0)  # ``serve_shm`` ends the thread; the server watches the time
        serve_connection(server, rank, connection, memory.gradients(rank))


def connect_shm(config: WorkerConfig, opened: ExitStack) -> ConnectionTransport:
    """Connect a worker, which then trains on the shared memory itself.

    Raises:
        RunOverError: the server has not started, or has ended.
    """
    connecting = opened.enter_context(socket.socket(socket.AF_UNIX))
    connection = _SocketConnection(connecting, config)
    set_timeout(connecting, config.timeout_seconds)
    opened.enter_context(config.cancellation.held(lambda: _shut_down(connecting)))
    try:
        connecting.connect(str(socket_path(config)))
        connection.send(_HELLO.pack(config.rank))
        memory = SharedMemory.receive(connecting, config.parameters, config.world_size)
    except OSError as error:
        raise RunOverError from error
    return ConnectionTransport(connection, memory.gradients(config.rank), memory.copies)


def socket_path(config: WorkerConfig, rank: int = 0) -> Path:
    """Return the address of the socket at which a rank listens."""
    path = config.path(f"{rank}.s")
    assert len(bytes(path)) <= _MAX_SOCKET_PATH_BYTES, f"too long for a socket: {path}"
    return path


def set_timeout(connected: socket.socket, seconds: float) -> None:
    """Bound each wait in the kernel: Python's own timeouts cost one more system call a wait."""
    connected.settimeout(None)
    value = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        connected.setsockopt(socket.SOL_SOCKET, option, value)


@final
class _SocketConnection(PeerConnection):
    """A connection of the server, or the server's of a worker; tensors lie in shared memory."""

    gone = OSError

    def __init__(self, connected: socket.socket, config: WorkerConfig) -> None:
        self.peer = SERVER_RANK
        """The rank at the other end."""
        self._socket = connected
        self._rank = config.rank
        self._link = config.link

    def send(self, data: bytes) -> None:
        self._socket.sendall(data)

    def receive(self, num_bytes: int) -> bytes:
        data = self._socket.recv(num_bytes, socket.MSG_WAITALL)
        if len(data) < num_bytes:
            raise ConnectionResetError
        return data

    def receive_tensor(self, tensor: Tensor) -> None:
        """Let it take its time, where the ranks are to be connected by a network."""
        self._link.message(self.peer, self._rank, tensor.nbytes)


def _shut_down(connected: socket.socket) -> None:
    with contextlib.suppress(OSError):  # not connected yet, or not any more
        connected.shutdown(socket.SHUT_RDWR)


def on_cpu(gradients: Gradients) -> list[Tensor | None]:
    """Return gradients where the server can use them: as they are or, from a GPU, copied."""
    return [None if gradient is None else gradient.cpu() for gradient in gradients]
