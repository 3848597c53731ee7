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
from ddpnb.rank.comm.rendezvous import RunOverError
from ddpnb.rank.comm.transport import (
    ConnectionTransport,
    PeerConnection,
    ServerTransport,
    WorkerConfig,
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


@final
class ShmServerTransport(ServerTransport):
    """A listener on a Unix socket, and a thread for each worker.

    Args:
        server: what the workers call.
        memory: what the server shares with them.
        config: of rank 0.
    """

    def __init__(self, server: ParameterServer, memory: SharedMemory, config: WorkerConfig) -> None:
        self._server = server
        self._memory = memory
        self._timeout = config.timeout_seconds
        self._threads: list[threading.Thread] = []
        self._sockets: list[socket.socket] = []
        with contextlib.ExitStack() as opened:
            self._listener = opened.enter_context(socket.socket(socket.AF_UNIX))
            path = socket_path(config.folder, config.name)
            opened.callback(path.unlink, missing_ok=True)
            self._listener.bind(str(path))
            self._listener.listen()
            self._opened = opened.pop_all()
        self._acceptor = start_thread(self._accept)

    def drain(self) -> None:
        """Wait for the threads of all workers."""
        for thread in list(self._threads):
            thread.join(self._timeout)

    def close(self) -> None:
        """Close the listener and disconnect every worker."""
        with contextlib.suppress(OSError):  # closed already
            self._listener.shutdown(socket.SHUT_RDWR)
        self._acceptor.join(self._timeout)
        for connected in self._sockets:
            with contextlib.suppress(OSError):
                connected.shutdown(socket.SHUT_RD)  # the last reply can still be sent
        self.drain()
        self._opened.close()

    # From here on: in threads.

    def _accept(self) -> None:
        while True:
            try:
                connected, _ = self._listener.accept()
            except OSError:  # the listener is closed
                return
            self._sockets.append(connected)
            self._threads.append(start_thread(self._serve, connected))

    def _serve(self, connected: socket.socket) -> None:
        """Send the memory to one worker, and serve it."""
        connection = _SocketConnection(connected)
        with connected:
            set_timeout(connected, self._timeout)
            try:
                (rank,) = _HELLO.unpack(connection.receive(_HELLO.size))
                self._memory.send(connected)
            except OSError:
                return
            set_timeout(connected, 0)  # ``close`` ends the thread; the server watches the time
            serve_connection(self._server, rank, connection, self._memory.gradients(rank))


def connect_shm(config: WorkerConfig) -> ConnectionTransport:
    """Connect a worker, which then trains on the shared memory itself.

    Raises:
        RunOverError: the server has not started, or has ended.
    """
    connecting = socket.socket(socket.AF_UNIX)
    connection = _SocketConnection(connecting)
    with contextlib.ExitStack() as opened:
        opened.callback(connecting.close)
        set_timeout(connecting, config.timeout_seconds)
        opened.enter_context(config.cancellation.held(lambda: _shut_down(connecting)))
        try:
            connecting.connect(str(socket_path(config.folder, config.name)))
            connection.send(_HELLO.pack(config.rank))
            memory = SharedMemory.receive(connecting, config.parameters, config.world_size)
        except OSError as error:
            raise RunOverError from error
        gradients = memory.gradients(config.rank)
        return ConnectionTransport(connection, gradients, memory.copies, opened.pop_all())


def socket_path(folder: Path, name: str) -> Path:
    """Return the address of a socket in a folder."""
    path = folder / f"{name}.s"
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
