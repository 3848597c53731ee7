"""How do ranks of one host exchange tensors?  Through shared memory, in turns.  (Rank side.)

Each worker of another rank writes its gradients into its part of the shared memory, and
trains on one of the copies of the parameters there.  The turns go by Unix sockets: a dead
process is seen at once.  The server's socket lies in the run's folder, which no other user may
enter: a process that comes later finds the server there without any collective.
"""

import contextlib
import socket
import struct
import threading
from pathlib import Path
from typing import final

from ddpnb.rank.comm.client import Place, ServerTransport, Wire, WireChannel, serve
from ddpnb.rank.comm.messages import PeerGoneError, RunOverError
from ddpnb.rank.comm.packed_tensors import SharedMemory
from ddpnb.rank.comm.parameter_server import Server

_HELLO = struct.Struct("<q")
"""The rank that connects."""
_MAX_SOCKET_PATH_BYTES = 107
"""What Linux allows for the address of a local socket."""


@final
class ShmServer(ServerTransport):
    """Listens on a Unix socket; a thread for each worker.

    Args:
        server: what the workers call.
        memory: what the server shares with them.
        place: rank 0's.
    """

    def __init__(self, server: Server, memory: SharedMemory, place: Place) -> None:
        self._server = server
        self._memory = memory
        self._timeout = place.timeout_seconds
        self._threads: list[threading.Thread] = []
        self._connections: list[socket.socket] = []
        self._acceptor = threading.Thread(target=self._accept, name="ddpnb-door", daemon=True)
        with contextlib.ExitStack() as opened:
            self._listener = opened.enter_context(socket.socket(socket.AF_UNIX))
            path = socket_path(place.folder, place.name)
            opened.callback(path.unlink, missing_ok=True)
            self._listener.bind(str(path))
            self._listener.listen()
            self._opened = opened.pop_all()
        self._acceptor.start()

    def settle(self) -> None:
        """Wait for the threads of all workers."""
        for thread in list(self._threads):
            thread.join(self._timeout)

    def close(self) -> None:
        """Close the door, hang up on everybody."""
        with contextlib.suppress(OSError):  # closed already
            self._listener.shutdown(socket.SHUT_RDWR)
        self._acceptor.join(self._timeout)
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RD)  # what is left to say can still be said
        self.settle()
        self._opened.close()

    # From here on: in threads.

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # the door is closed
                return
            self._connections.append(connection)
            thread = threading.Thread(
                target=self._welcome, args=(connection,), name="ddpnb-server", daemon=True
            )
            self._threads.append(thread)
            thread.start()

    def _welcome(self, connection: socket.socket) -> None:
        """Hand the memory over to one worker, and serve it."""
        wire = _ShmWire(connection)
        with connection:
            set_timeout(connection, self._timeout)
            try:
                (rank,) = _HELLO.unpack(wire.receive(_HELLO.size))
                self._memory.hand_over(connection)
            except (OSError, PeerGoneError):
                return
            set_timeout(connection, 0)  # a thread is ended by ``close``; the server watches times
            serve(self._server, rank, wire, self._memory.gradients(rank))


@final
class _ShmWire(Wire):
    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def send(self, data: bytes) -> None:
        try:
            self._connection.sendall(data)
        except OSError as error:
            raise PeerGoneError from error

    def receive(self, num_bytes: int) -> bytes:
        try:
            data = self._connection.recv(num_bytes, socket.MSG_WAITALL)
        except OSError as error:
            raise PeerGoneError from error
        if len(data) < num_bytes:
            raise PeerGoneError
        return data


def shm_channel(place: Place) -> WireChannel:
    """Return a worker's channel, over which it trains on the shared memory itself.

    Raises:
        RunOverError: there is no server, or not any more.
    """
    connection = socket.socket(socket.AF_UNIX)
    wire = _ShmWire(connection)
    with contextlib.ExitStack() as opened:
        opened.callback(connection.close)
        set_timeout(connection, place.timeout_seconds)
        opened.enter_context(place.cancellation.held(lambda: _hang_up(connection)))
        try:
            connection.connect(str(socket_path(place.folder, place.name)))
            wire.send(_HELLO.pack(place.rank))
            memory = SharedMemory.receive(connection, place.parameters, place.world_size)
        except (OSError, PeerGoneError) as error:
            raise RunOverError from error
        gradients = memory.gradients(place.rank)
        return WireChannel(wire, gradients, memory.copies, opened.pop_all())


def socket_path(folder: Path, name: str) -> Path:
    """Return the address of a socket in a folder."""
    path = folder / f"{name}.s"
    assert len(bytes(path)) <= _MAX_SOCKET_PATH_BYTES, f"too long for a socket: {path}"
    return path


def set_timeout(connection: socket.socket, seconds: float) -> None:
    """Bound each wait by the kernel's own clock: Python's costs a system call more for each."""
    connection.settimeout(None)
    value = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        connection.setsockopt(socket.SOL_SOCKET, option, value)


def _hang_up(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # not connected yet, or not any more
        connection.shutdown(socket.SHUT_RDWR)
