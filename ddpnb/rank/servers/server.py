"""The server that connects other ranks to rank 0's queue, without collectives.  Runs on rank 0.

A separate thread serves each worker's connection. On rank 0's host, the tensors are in shared
memory. Workers on other hosts send and receive the tensors after the messages. These workers prove
with a secret key that they belong to the run.
"""

import contextlib
import os
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import final

import torch.distributed as dist
from torch import Tensor

from ddpnb.compat import torch_internals
from ddpnb.protocol.processes import limit_waits
from ddpnb.rank.connections import shut_down
from ddpnb.rank.servers.memory import SharedMemory, pack
from ddpnb.rank.servers.queue import NO_RANK, REPLY, REQUEST, RequestKind, WorkQueue

HELLO = struct.Struct("<q")
"""Binary format of a worker's first message. The message contains the worker's rank."""

STALLED_SECONDS = 0.5
"""Seconds without progress after which a run that ends stops sending to a worker."""


def server_address() -> str:
    """Return rank 0's address for other hosts. The address is taken from the group's store."""
    store = torch_internals.group_store()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store.host if isinstance(store, dist.TCPStore) else "127.0.0.1"


def connection_over(connected: socket.socket, timeout_seconds: float) -> Connection:
    """Return a connection over a socket. Each read or write fails if it exceeds the timeout."""
    connected.settimeout(None)  # ignore the user's default timeout
    if connected.family != socket.AF_UNIX:
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection = Connection(connected.detach())
    limit_waits(connection, write_seconds=timeout_seconds, read_seconds=timeout_seconds).close()
    return connection


def send(connection: Connection, raw: Tensor, keeps_trying: Callable[[], bool]) -> None:
    """Send all bytes. If the other end reads nothing within the write limit, ask whether to end."""
    data = raw.numpy().data
    while data:
        try:
            data = data[os.write(connection.fileno(), data) :]
        except BlockingIOError:
            if not keeps_trying():
                raise


def receive(connection: Connection, raw: Tensor) -> None:
    """Fill a tensor with the bytes that the other end sends."""
    data = raw.numpy().data
    while data:
        if not (num := os.readv(connection.fileno(), [data])):
            raise EOFError
        data = data[num:]


@final
class Server:
    """Serves each connection in a separate thread.

    ``parameters`` has the shapes and types of the gradients from other hosts. Workers on other
    hosts know the ``key``. ``timeout_seconds`` limits each read or write until a worker has said
    its rank, and the wait for each thread in ``close``.
    """

    def __init__(
        self,
        queue: WorkQueue,
        memory: SharedMemory,
        parameters: Sequence[Tensor],
        key: bytes,
        timeout_seconds: float,
    ) -> None:
        self._queue = queue
        self._key = key
        self._memory = memory
        self._parameters = parameters
        self._timeout = timeout_seconds
        self._is_closing = False
        self._listeners: list[socket.socket] = []
        self._connected: list[Connection] = []
        self._acceptors: list[threading.Thread] = []
        self._threads: list[threading.Thread] = []

    def listen(self, listener: socket.socket) -> None:
        """Accept connections at a bound socket until ``close``."""
        listener.settimeout(None)  # ignore the user's default timeout
        listener.listen()
        self._listeners.append(listener)
        self._acceptors.append(_started(self._accept, listener))

    def close(self) -> None:
        """Stop accepting connections and requests, and wait until the last replies are sent.

        A worker that no longer reads delays the end by at most ``STALLED_SECONDS``.
        """
        self._is_closing = True
        for listener in self._listeners:  # macOS cannot shut down a listener, so wake its thread
            with contextlib.suppress(OSError), socket.socket(listener.family) as last:
                last.settimeout(self._timeout)
                last.connect(listener.getsockname())
        for thread in self._acceptors:
            thread.join(self._timeout)
        for connection in self._connected:
            with contextlib.suppress(OSError):  # already closed
                shut_down(connection.fileno(), socket.SHUT_RD)  # rank 0 can still send a last reply
        for thread in self._threads:
            thread.join(self._timeout)

    def _accept(self, listener: socket.socket) -> None:
        with listener:
            while not self._is_closing:
                with contextlib.suppress(OSError):  # the other end has already disconnected
                    connection = connection_over(listener.accept()[0], self._timeout)
                    self._connected.append(connection)
                    is_remote = listener.family != socket.AF_UNIX
                    self._threads.append(_started(self._serve, connection, is_remote))

    def _serve(self, connection: Connection, is_remote: bool) -> None:
        """Serve one worker until it is done, is lost or has failed."""
        queue = self._queue
        with connection, contextlib.suppress(EOFError, OSError, AuthenticationError):
            if is_remote:
                deliver_challenge(connection, self._key)
                answer_challenge(connection, self._key)
            (rank,) = HELLO.unpack(connection.recv_bytes())
            if is_remote:
                gradients = pack(self._parameters)
            else:
                self._memory.send(connection)
                gradients = self._memory.gradients(rank)
            # From here on, ``close`` ends every wait, and the queue checks the timeout.
            limit_waits(connection, write_seconds=STALLED_SECONDS, read_seconds=0).close()
            incarnation, kind = object(), RequestKind.BEGIN
            try:
                while kind is not RequestKind.DONE:
                    number, weight = REQUEST.unpack(connection.recv_bytes())
                    kind = RequestKind(number)
                    if kind is RequestKind.FAIL:
                        queue.fail(rank)
                        return
                    if is_remote and kind is RequestKind.STEP:
                        receive(connection, gradients.raw)
                    reply = queue.handle(rank, kind, weight, gradients.values, incarnation)
                    connection.send_bytes(REPLY.pack(*reply))
                    if reply.lost_rank != NO_RANK:
                        return
                    if is_remote:
                        send(
                            connection, self._memory.copy_of(rank).raw, lambda: not self._is_closing
                        )
            except (EOFError, OSError):
                # Reply, because the worker may be alive (declared lost, or rank 0 disconnected).
                connection.send_bytes(REPLY.pack(*queue.lose(rank, incarnation)))


def _started(target: Callable[..., None], *args: object) -> threading.Thread:
    """Start a daemon thread. The process can exit while the thread runs."""
    thread = threading.Thread(target=target, args=args, name="ddpnb-server", daemon=True)
    thread.start()
    return thread
