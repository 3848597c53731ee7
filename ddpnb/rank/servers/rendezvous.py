"""How ranks reach each other outside the process group: by sockets (ranks)."""

import contextlib
import socket
import struct
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import final

import torch.distributed as dist

from ddpnb.compat import torch_internals
from ddpnb.rank.worker import Worker

HELLO = struct.Struct("<q")
"""The first message of a rank that connects to another: its number."""


def socket_path(worker: Worker, rank: int) -> Path:
    """Return the address of the Unix socket at which a rank of this host listens."""
    return worker.folder / f"{worker.name}.{rank}.s"


def hosts_of(worker: Worker) -> list[str]:
    """Return a text for each rank's host; takes part: every rank of the default group.

    Two ranks have the same text if and only if they share a folder.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text()  # hosts may have the same name
    status = worker.folder.stat()
    hosts = [""] * worker.world_size
    own = f"{socket.gethostname()} {boot} {status.st_dev} {status.st_ino}"
    dist.all_gather_object(hosts, own)
    return hosts


def server_address() -> str:
    """Return the address at which other hosts reach rank 0's: that of the group's own store."""
    store = torch_internals.group_store()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store.host if isinstance(store, dist.TCPStore) else "127.0.0.1"


def set_timeout(connected: socket.socket, seconds: float) -> None:
    """Bound each wait in the kernel: Python's own timeouts cost one more system call a wait."""
    connected.settimeout(None)
    value = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        connected.setsockopt(socket.SOL_SOCKET, option, value)


def shut_down(connected: socket.socket, how: int = socket.SHUT_RDWR) -> None:
    """End every wait at a socket and at its other end, as long as they are connected."""
    with contextlib.suppress(OSError):
        connected.shutdown(how)


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
            shut_down(listener)
        for thread in self._acceptors:
            thread.join(self._timeout)
        for connected in self._connected:
            shut_down(connected, socket.SHUT_RD)  # a last reply can still be sent
        for thread in self._threads:
            thread.join(self._timeout)

    def _accept(self, listener: socket.socket, most: int) -> None:
        with listener, contextlib.suppress(OSError):  # it is shut down
            for _ in range(most):
                connected, _ = listener.accept()
                self._connected.append(connected)
                self._threads.append(_started(self._serve, connected))


def _started(target: Callable[..., None], *args: object) -> threading.Thread:
    """Start a thread, which does not keep the process alive."""
    thread = threading.Thread(target=target, args=args, name="ddpnb-server", daemon=True)
    thread.start()
    return thread
