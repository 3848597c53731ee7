"""Connections within a host: Unix sockets, and memory that the ranks share (ranks).

Tensors lie in shared memory; short messages through a Unix socket pass the turn.  The kernel's
locks in a socket order memory on any processor.  Where a process dies, its socket closes at once.
The socket of rank 0 lies in the run's folder, which no other user may enter: a process that starts
later finds it without a collective.
"""

import contextlib
import socket
import struct
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import final

from torch import Tensor

from ddpnb.rank.servers.connections import (
    PeerConnection,
    RemoteQueue,
    join_threads,
    serve,
    start_thread,
)
from ddpnb.rank.servers.memory import Layout, SharedMemory
from ddpnb.rank.servers.queue import SERVER_RANK, WorkQueue
from ddpnb.rank.servers.rendezvous import RunOverError, WorkerConfig

_HELLO = struct.Struct("<q")
"""The rank that connects."""
_MAX_SOCKET_PATH_BYTES = 107
"""Linux's limit for the address of a Unix socket."""


def serve_host(
    queue: WorkQueue, memory: SharedMemory, config: WorkerConfig, opened: ExitStack
) -> list[threading.Thread]:
    """Listen at a Unix socket, and serve each worker in a thread, until ``opened`` closes.

    Returns:
        The threads, more of which come with workers that join.
    """
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
                threads.append(start_thread(_serve, queue, memory, connected, config))

    def disconnect() -> None:
        listener.shutdown(socket.SHUT_RDWR)
        acceptor.join(config.timeout_seconds)
        for connected in sockets:
            with contextlib.suppress(OSError):  # closed already
                connected.shutdown(socket.SHUT_RD)  # the last reply can still be sent
        join_threads(threads, config.timeout_seconds)

    acceptor = start_thread(accept)
    opened.callback(disconnect)
    return threads


def _serve(
    queue: WorkQueue, memory: SharedMemory, connected: socket.socket, config: WorkerConfig
) -> None:
    """Send the memory to one worker, and serve it."""
    connection = _SocketConnection(connected, config)
    with connected:
        set_timeout(connected, config.timeout_seconds)
        try:
            (rank,) = _HELLO.unpack(connection.receive(_HELLO.size))
            memory.send(connected)
        except OSError:
            return
        set_timeout(connected, 0)  # ``serve_host`` ends the thread; the queue watches the time
        serve(queue, rank, connection, memory.gradients(rank), memory.copies)


def connect_host(config: WorkerConfig, layout: Layout, opened: ExitStack) -> RemoteQueue:
    """Connect a worker, which then trains on the shared memory itself.

    Raises:
        RunOverError: rank 0 does not serve yet, or no longer.
    """
    connecting = opened.enter_context(socket.socket(socket.AF_UNIX))
    connection = _SocketConnection(connecting, config)
    set_timeout(connecting, config.timeout_seconds)
    opened.enter_context(config.cancellation.held(lambda: _shut_down(connecting)))
    try:
        connecting.connect(str(socket_path(config)))
        connection.send(_HELLO.pack(config.rank))
        memory = SharedMemory.receive(connecting, config.parameters, layout)
    except OSError as error:
        raise RunOverError from error
    return RemoteQueue(connection, memory.gradients(config.rank), memory.copies)


def socket_path(config: WorkerConfig, rank: int = SERVER_RANK) -> Path:
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
    """A connection of rank 0, or to it; tensors lie in shared memory."""

    gone = OSError

    def __init__(self, connected: socket.socket, config: WorkerConfig) -> None:
        self._socket = connected
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
        self._link.receive(tensor.nbytes)


def _shut_down(connected: socket.socket) -> None:
    with contextlib.suppress(OSError):  # not connected yet, or not any more
        connected.shutdown(socket.SHUT_RDWR)
