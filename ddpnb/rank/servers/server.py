"""Threads of rank 0, one for each connection that another rank makes (rank 0)."""

import contextlib
import socket
import sys
import threading
from collections.abc import Callable
from typing import final


@final
class Server:
    """Calls a function with each connection, in a thread of its own.

    Args:
        serve: the function; it closes the connection.
        timeout_seconds: how long ``close`` waits for each thread.
    """

    def __init__(self, serve: Callable[[socket.socket], None], timeout_seconds: float) -> None:
        self._serve = serve
        self._timeout = timeout_seconds
        self._listeners: list[socket.socket] = []
        self._connected: list[socket.socket] = []
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
            with contextlib.suppress(OSError):  # as many as there can be have come
                listener.shutdown(socket.SHUT_RDWR)
        self._join(self._acceptors)
        for connected in self._connected:
            with contextlib.suppress(OSError):  # closed already
                connected.shutdown(socket.SHUT_RD)  # a last reply can still be sent
        self._join(self._threads)

    def _accept(self, listener: socket.socket, most: int) -> None:
        with listener, contextlib.suppress(OSError):  # it is shut down
            for _ in range(most):
                connected, _ = listener.accept()
                self._connected.append(connected)
                self._threads.append(_started(self._serve, connected))

    def _join(self, threads: list[threading.Thread]) -> None:
        for thread in threads:
            thread.join(self._timeout)


def _started(target: Callable[..., None], *args: object) -> threading.Thread:
    """Start a thread, which does not keep the process alive."""
    thread = threading.Thread(target=target, args=args, name="ddpnb-server", daemon=True)
    thread.start()
    return thread
