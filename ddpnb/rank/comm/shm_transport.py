"""The transport within a host: shared memory and Unix sockets (ranks).

Each worker of another rank writes its gradients into its part of the shared memory and trains
on one of the copies of the parameters there.  Short messages through a Unix socket pass
the turn; where a process dies, the socket closes at once.  The server's socket lies in the
run's folder, which no other user may enter: a process that starts later finds it without a
collective.
"""

import contextlib
import os
import socket
import struct
import threading
from collections.abc import Sequence
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
from ddpnb.rank.comm.parameter_server import ParameterServer
from ddpnb.rank.comm.rendezvous import RunOverError, WorkerConfig
from ddpnb.rank.comm.transport import (
    ConnectionTransport,
    Drain,
    PeerConnection,
    serve_connection,
    start_thread,
)

_HELLO = struct.Struct("<q")
"""The rank that connects."""
_MAX_SOCKET_PATH_BYTES = 107
"""Linux's limit for the address of a Unix socket."""


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


def serve_shm(
    server: ParameterServer, memory: SharedMemory, config: WorkerConfig, opened: ExitStack
) -> Drain:
    """Listen at a Unix socket, and serve each worker in a thread.

    Args:
        server: what the workers call.
        memory: what the server shares with them.
        config: of rank 0.
        opened: closes the listener and disconnects every worker.
    """
    threads: list[threading.Thread] = []
    sockets: list[socket.socket] = []
    listener = opened.enter_context(socket.socket(socket.AF_UNIX))
    path = socket_path(config)
    opened.callback(path.unlink, missing_ok=True)
    listener.bind(str(path))
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
    connection = _SocketConnection(connected)
    with connected:
        set_timeout(connected, config.timeout_seconds)
        try:
            (rank,) = _HELLO.unpack(connection.receive(_HELLO.size))
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
    connection = _SocketConnection(connecting)
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
    gone = OSError

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected

    def send(self, data: bytes) -> None:
        self._socket.sendall(data)

    def receive(self, num_bytes: int) -> bytes:
        data = self._socket.recv(num_bytes, socket.MSG_WAITALL)
        if len(data) < num_bytes:
            raise ConnectionResetError
        return data


def _shut_down(connected: socket.socket) -> None:
    with contextlib.suppress(OSError):  # not connected yet, or not any more
        connected.shutdown(socket.SHUT_RDWR)
