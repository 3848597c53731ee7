"""The connections and the memory of an asynchronous run's server.  Runs on the ranks.

Each other worker sends requests through a connection to a thread of rank 0, and this thread calls
the work queue. If a process dies, its connection closes at once.

On rank 0's host, the tensors are in shared memory. Messages through a Unix socket decide which
process may use the tensors. The system locks the socket for each message, so memory accesses stay
in order on any processor. The socket is in the run folder, and other users cannot open this
folder. A restarted worker finds the socket by its path, without a collective. Workers on other
hosts connect by TCP, prove that they know the run's key, and send each tensor after a message.
"""

import contextlib
import mmap
import os
import pickle
import secrets
import socket
import tempfile
import threading
from collections.abc import Callable, Sequence
from multiprocessing import AuthenticationError
from multiprocessing.connection import (
    Client,
    Connection,
    Listener,
    answer_challenge,
    deliver_challenge,
)
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from ddpnb.protocol.processes import as_socket, limit_waits, portable
from ddpnb.rank.connections import shut_down
from ddpnb.rank.servers.queue import NO_RANK, Gradients, Reply, WorkQueue

STALLED_SECONDS = 0.5
"""Seconds without progress after which a run that ends stops sending to another process."""

_ALIGNMENT_BYTES = 64
"""Size of one cache line, in bytes."""


class PackedTensors(NamedTuple):
    """Tensors in one piece of CPU memory. Each tensor starts at a multiple of 64 bytes."""

    raw: Tensor
    """All bytes of the memory, as a uint8 tensor."""
    tensors: list[Tensor]
    """Views of ``raw`` with the requested shapes and types."""
    is_given: memoryview
    """Part of the memory with one byte for each tensor: 0 if the latest value was None."""
    is_shared: bool
    """True if the process at the other end of the connection uses the same memory."""

    @property
    def values(self) -> Gradients:
        """The tensors, with None for each tensor whose latest value was None."""
        pairs = zip(self.tensors, self.is_given, strict=True)
        return [tensor if is_given else None for tensor, is_given in pairs]

    def fill(self, values: Gradients) -> None:
        """Copy detached values from any device to the tensors, except values that are None."""
        self.is_given[:] = bytes(value is not None for value in values)
        for tensor, value in zip(self.tensors, values, strict=True):
            if value is not None:
                tensor.copy_(value)

    def send(self, connection: Connection, keeps_trying: Callable[[], bool]) -> None:
        """Send the memory if it is not shared. If the other end stalls, ask whether to continue."""
        data = () if self.is_shared else self.raw.numpy().data
        while data:
            try:
                data = data[os.write(connection.fileno(), data) :]
            except BlockingIOError:
                if not keeps_trying():
                    raise

    def receive(self, connection: Connection) -> None:
        """Fill the memory with the bytes that the other end sends, if the memory is not shared."""
        data = () if self.is_shared else self.raw.numpy().data
        while data:
            if not (num := os.readv(connection.fileno(), [data])):
                raise EOFError
            data = data[num:]


Slot = tuple[PackedTensors, PackedTensors]
"""A worker's copy of the parameters, and its gradients. Unused gradients take up no memory.

No locks are needed, because a worker that writes gradients waits for the reply. The worker's copy
of the parameters changes only while the worker waits.
"""


def pack(like: Sequence[Tensor], raw: Tensor | None = None) -> PackedTensors:
    """Return tensors with these shapes and types, in shared memory or in new private memory."""
    sizes, is_shared = _padded_sizes(like), raw is not None
    memory = torch.empty(sum(sizes), dtype=torch.uint8, device="cpu") if raw is None else raw
    *pieces, flags = memory.split(sizes)
    pairs = zip(pieces, like, strict=True)
    tensors = [piece[: each.nbytes].view(each.dtype).view(each.shape) for piece, each in pairs]
    return PackedTensors(memory, tensors, flags.numpy().data[: len(like)], is_shared)


def _padded_sizes(like: Sequence[Tensor]) -> list[int]:
    """Return the number of bytes of each tensor and of ``is_given``, as multiples of 64."""
    sizes = *(each.nbytes for each in like), max(1, len(like))
    return [-(-size // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES for size in sizes]


def new_memory() -> int:
    """Return the descriptor of memory without a file name, so a killed process leaves no file."""
    if not portable():
        return os.memfd_create("ddpnb")
    with tempfile.TemporaryFile() as file:  # has no name either
        return os.dup(file.fileno())


def mapped(descriptor: int, like: Sequence[Tensor], num_slots: int) -> list[Slot]:
    """Map shared memory with one slot for each worker, or with one slot for all workers."""
    size = sum(_padded_sizes(like))
    os.truncate(descriptor, 2 * num_slots * size)  # no effect at this size
    whole = torch.frombuffer(mmap.mmap(descriptor, 0), dtype=torch.uint8)
    pieces = [pack(like, raw) for raw in whole.split(size)]
    return list(zip(pieces[::2], pieces[1::2], strict=True))


def limit_seconds(connection: Connection, timeout_seconds: float) -> bool:
    """Limit each read and write of a connection. Return True if both ends are on one host."""
    seconds = timeout_seconds
    with limit_waits(connection, write_seconds=seconds, read_seconds=seconds) as end:
        if end.family != socket.AF_UNIX:
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return end.family == socket.AF_UNIX


def received(connection: Connection) -> int:
    """Return the descriptor that the server sends. Raises ``OSError`` if the server has ended."""
    with as_socket(connection.fileno()) as end:
        _, descriptors, *_ = socket.recv_fds(end, 1, 1)
    if not descriptors:
        raise ConnectionResetError
    return descriptors[0]


@final
class Server:
    """Shares memory with the workers on this host, and serves each connection in a thread.

    ``like`` has the shapes and types of the parameters. ``timeout_seconds`` limits each read and
    write until a worker has proved that it belongs to the run. The queue checks later timeouts.
    """

    def __init__(self, like: Sequence[Tensor], num_slots: int, timeout_seconds: float) -> None:
        self.key = secrets.token_bytes(32)
        """The key that workers on other hosts must know."""
        self._timeout = timeout_seconds
        self._descriptor = new_memory()
        self._slots = mapped(self._descriptor, like, num_slots)
        self.copies = [copy for copy, _ in self._slots]
        self._is_closing = False
        self._listeners: list[Listener] = []
        self._connections: list[Connection] = []
        self._acceptors: list[threading.Thread] = []
        self._threads: list[threading.Thread] = []

    def serve(self, queue: WorkQueue, address: Any) -> Any:
        """Accept workers at an address until ``close``. Return the address with its port."""
        listener = Listener(address, backlog=128)
        self._listeners.append(listener)
        self._acceptors.append(_started(self._accept, queue, listener))
        return listener.address

    def close(self) -> None:
        """Stop accepting connections and requests, and wait until the last replies are sent.

        A worker that no longer reads delays the end by at most twice ``STALLED_SECONDS``.
        """
        self._is_closing = True
        for listener, thread in zip(self._listeners, self._acceptors, strict=True):
            try:
                Client(listener.address).close()  # macOS cannot shut down a listener, so wake it
            except OSError:  # the socket's file was removed, so nothing can wake the thread
                continue
            thread.join(self._timeout)
        for connection in self._connections:
            with contextlib.suppress(OSError):  # already closed
                shut_down(connection.fileno(), socket.SHUT_RD)  # rank 0 can still send a last reply
        for thread in self._threads:
            thread.join(self._timeout)
        os.close(self._descriptor)

    def _accept(self, queue: WorkQueue, listener: Listener) -> None:
        with listener:
            while not self._is_closing:
                with contextlib.suppress(OSError):  # the other end has already disconnected
                    self._connections.append(listener.accept())
                    self._threads.append(_started(self._serve, queue, self._connections[-1]))

    def _serve(self, queue: WorkQueue, connection: Connection) -> None:
        """Serve one worker until it is done, is lost or has failed."""
        with connection, contextlib.suppress(EOFError, OSError, AuthenticationError):
            is_local = limit_seconds(connection, self._timeout)
            if not is_local:
                deliver_challenge(connection, self.key)
                answer_challenge(connection, self.key)
            rank = connection.recv()
            slot = self._slots[rank % len(self._slots)]
            copy, gradients = (each._replace(is_shared=is_local) for each in slot)
            if is_local:
                with as_socket(connection.fileno()) as end:
                    socket.send_fds(end, [b"!"], [self._descriptor])
            # From here on, ``close`` ends every wait, and the queue checks the timeout.
            limit_waits(connection, write_seconds=STALLED_SECONDS, read_seconds=0).close()
            incarnation, request = object(), "begin"
            try:
                while request != "finish":
                    request, weight = connection.recv()
                    if request == "fail":
                        return queue.fail(rank)
                    if request == "step":
                        gradients.receive(connection)
                    reply = queue.handle(rank, request, weight, gradients.values, incarnation)
                    _send_reply(connection, reply)
                    if reply.lost_rank != NO_RANK:
                        return
                    copy.send(connection, lambda: not self._is_closing)
            except BlockingIOError:  # the worker has stalled, so it would not read a reply either
                queue.lose(rank, incarnation)
            except (EOFError, OSError):
                # Reply, because the worker may be alive (declared lost, or rank 0 disconnected).
                _send_reply(connection, queue.lose(rank, incarnation))


def _send_reply(connection: Connection, reply: Reply) -> None:
    connection.send_bytes(pickle.dumps(tuple(reply)))  # faster than ``send``


def _started(target: Callable[..., None], *args: object) -> threading.Thread:
    """Start a daemon thread. The process can exit while the thread runs."""
    thread = threading.Thread(target=target, args=args, name="ddpnb-server", daemon=True)
    thread.start()
    return thread
