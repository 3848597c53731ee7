"""How ranks reach each other outside the process group: by sockets (ranks)."""

import contextlib
import socket
import struct
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import final

import torch.distributed as dist

from ddpnb.compat import torch_internals
from ddpnb.protocol.processes import as_socket, limit_waits
from ddpnb.rank.worker import Worker

HELLO = struct.Struct("<q")
"""The first message of a rank that connects to another: its number."""


def socket_path(worker: Worker, rank: int) -> Path:
    """Return the address of the Unix socket at which a rank of this host listens."""
    return worker.folder / f"{worker.name}.{rank}.s"


def server_address() -> str:
    """Return the address at which other hosts reach rank 0's: that of the group's own store."""
    store = torch_internals.group_store()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store.host if isinstance(store, dist.TCPStore) else "127.0.0.1"


def connection_over(connected: socket.socket, timeout_seconds: float) -> Connection:
    """Return a connection over a socket, at which no wait is longer than the timeout."""
    connected.settimeout(None)  # whatever the user's default is
    if connected.family != socket.AF_UNIX:
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection = Connection(connected.detach())
    bound_waits(connection, timeout_seconds)
    return connection


def bound_waits(connection: Connection, seconds: float) -> None:
    """Let no wait at a connection be longer; 0: let it be as long as it takes."""
    limit_waits(connection, write_seconds=seconds, read_seconds=seconds).close()


def shut_down(connection: Connection | socket.socket, how: int = socket.SHUT_RDWR) -> None:
    """End every wait at a connection and at its other end, as long as they are connected."""
    with contextlib.suppress(OSError), as_socket(connection.fileno()) as end:
        end.shutdown(how)


@final
class Server:
    """Calls a function with each connection, in a thread of its own.

    Args:
        serve: the function; it closes the connection.  It also gets whether that comes from
            another host.
        timeout_seconds: the longest wait at a connection, and of ``close`` for each thread.
    """

    def __init__(self, serve: Callable[[Connection, bool], None], timeout_seconds: float) -> None:
        self._serve = serve
        self._timeout = timeout_seconds
        self._listeners: list[socket.socket] = []
        self._connected: list[Connection] = []
        self._acceptors: list[threading.Thread] = []
        self._threads: list[threading.Thread] = []

    def listen(self, listener: socket.socket, most: int = sys.maxsize) -> None:
        """Accept connections at a bound socket, until so many have come."""
        listener.settimeout(None)  # whatever the user's default is
        listener.listen()
        self._listeners.append(listener)
        self._acceptors.append(_started(self._accept, listener, most))

    def close(self) -> None:
        """Accept no more, disconnect, and wait until the last replies are on their way."""
        for listener in self._listeners:
            shut_down(listener)
        for thread in self._acceptors:
            thread.join(self._timeout)
        for connection in self._connected:
            shut_down(connection, socket.SHUT_RD)  # a last reply can still be sent
        for thread in self._threads:
            thread.join(self._timeout)

    def _accept(self, listener: socket.socket, most: int) -> None:
        with listener, contextlib.suppress(OSError):  # it is shut down
            for _ in range(most):
                connection = connection_over(listener.accept()[0], self._timeout)
                self._connected.append(connection)
                is_remote = listener.family != socket.AF_UNIX
                self._threads.append(_started(self._serve, connection, is_remote))


def _started(target: Callable[..., None], *args: object) -> threading.Thread:
    """Start a thread, which does not keep the process alive."""
    thread = threading.Thread(target=target, args=args, name="ddpnb-server", daemon=True)
    thread.start()
    return thread
