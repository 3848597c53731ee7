"""The transport within a host: shared memory and Unix sockets (ranks).

Each worker of another rank writes its gradients into its part of the shared memory and trains
on one of the copies of the parameters there.  Short messages through a Unix socket pass
the turn; where a process dies, the socket closes at once.  The server's socket lies in the
run's folder, which no other user may enter: a process that starts later finds it without a
collective.
"""

import contextlib
import socket
import struct
import threading
from pathlib import Path
from typing import final

from ddpnb.rank.comm.messages import PeerGoneError, RunOverError
from ddpnb.rank.comm.packed_tensors import SharedMemory
from ddpnb.rank.comm.parameter_server import ParameterServer
from ddpnb.rank.comm.transport import (
    ConnectionTransport,
    PeerConnection,
    ServerTransport,
    WorkerConfig,
    serve_connection,
)

_HELLO = struct.Struct("<q")
"""The rank that connects."""
_MAX_SOCKET_PATH_BYTES = 107
"""Linux's limit for the address of a Unix socket."""


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
        self._acceptor = threading.Thread(target=self._accept, name="ddpnb-listener", daemon=True)
        with contextlib.ExitStack() as opened:
            self._listener = opened.enter_context(socket.socket(socket.AF_UNIX))
            path = socket_path(config.folder, config.name)
            opened.callback(path.unlink, missing_ok=True)
            self._listener.bind(str(path))
            self._listener.listen()
            self._opened = opened.pop_all()
        self._acceptor.start()

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
            thread = threading.Thread(
                target=self._serve, args=(connected,), name="ddpnb-server", daemon=True
            )
            self._threads.append(thread)
            thread.start()

    def _serve(self, connected: socket.socket) -> None:
        """Send the memory to one worker, and serve it."""
        connection = _SocketConnection(connected)
        with connected:
            set_timeout(connected, self._timeout)
            try:
                (rank,) = _HELLO.unpack(connection.receive(_HELLO.size))
                self._memory.send(connected)
            except (OSError, PeerGoneError):
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
        except (OSError, PeerGoneError) as error:
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
    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected

    def send(self, data: bytes) -> None:
        try:
            self._socket.sendall(data)
        except OSError as error:
            raise PeerGoneError from error

    def receive(self, num_bytes: int) -> bytes:
        try:
            data = self._socket.recv(num_bytes, socket.MSG_WAITALL)
        except OSError as error:
            raise PeerGoneError from error
        if len(data) < num_bytes:
            raise PeerGoneError
        return data


def _shut_down(connected: socket.socket) -> None:
    with contextlib.suppress(OSError):  # not connected yet, or not any more
        connected.shutdown(socket.SHUT_RDWR)
