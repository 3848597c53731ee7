"""The parameter server: its parameters, its optimizer and its connections.  Runs on rank 0.

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
from collections.abc import Callable, Iterator, Sequence
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
from torch import Tensor, nn

from ddpnb.protocol.processes import as_socket, limit_waits, portable
from ddpnb.rank.connections import shut_down
from ddpnb.rank.servers.queue import NO_RANK, Gradients, Reply, UpdateCounter, WorkQueue
from ddpnb.rank.tasks.base import OptimizerFactory

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


def pack(
    like: Sequence[Tensor], raw: Tensor | None = None, *, is_shared: bool = False
) -> PackedTensors:
    """Return tensors with these shapes and types, in given memory or in new private memory."""
    sizes = _padded_sizes(like)
    raw = torch.empty(sum(sizes), dtype=torch.uint8, device="cpu") if raw is None else raw
    *pieces, flags = raw.split(sizes)
    pairs = zip(pieces, like, strict=True)
    tensors = [raw[: each.nbytes].view(each.dtype).view(each.shape) for raw, each in pairs]
    return PackedTensors(raw, tensors, flags.numpy().data[: len(like)], is_shared)


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


def mapped(
    descriptor: int, like: Sequence[Tensor], num_copies: int
) -> tuple[list[PackedTensors], list[PackedTensors]]:
    """Map shared memory. Return copies of the parameters, and memory for each rank's gradients.

    If all workers share one copy, they need no memory for gradients. Otherwise each worker has a
    copy, and all workers except rank 0 have memory for gradients. No locks are needed, because a
    worker that writes gradients waits for the reply. The worker's copy of the parameters changes
    only while the worker waits.
    """
    size = sum(_padded_sizes(like))
    os.truncate(descriptor, (2 * num_copies - 1) * size)  # no effect at this size
    whole = torch.frombuffer(mmap.mmap(descriptor, 0), dtype=torch.uint8)
    pieces = [pack(like, raw, is_shared=True) for raw in whole.split(size)]
    return pieces[:num_copies], [pack([], is_shared=True), *pieces[num_copies:]]


def limit(connection: Connection, timeout_seconds: float) -> bool:
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

    Args:
        like: Tensors with the shapes and types of the parameters.
        num_copies: Number of copies of the parameters: one for all workers, or one for each worker.
        timeout_seconds: Maximum number of seconds of each read or write, until a worker has proved
            that it belongs to the run. The queue checks later timeouts.
    """

    def __init__(self, like: Sequence[Tensor], num_copies: int, timeout_seconds: float) -> None:
        self.key = secrets.token_bytes(32)
        """The key that workers on other hosts must know."""
        self._timeout = timeout_seconds
        self._descriptor = new_memory()
        self.copies, self._gradients = mapped(self._descriptor, like, num_copies)
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

        A worker that no longer reads delays the end by at most ``STALLED_SECONDS``.
        """
        self._is_closing = True
        for listener in self._listeners:  # macOS cannot shut down a listener, so wake its thread
            with contextlib.suppress(OSError):
                Client(listener.address).close()
        for thread in self._acceptors:
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
            is_local = limit(connection, self._timeout)
            if not is_local:
                deliver_challenge(connection, self.key)
                answer_challenge(connection, self.key)
            rank = connection.recv()
            copy = self.copies[rank % len(self.copies)]._replace(is_shared=is_local)
            if is_local:
                gradients = self._gradients[rank % len(self.copies)]
                with as_socket(connection.fileno()) as end:
                    socket.send_fds(end, [b"!"], [self._descriptor])
            else:
                gradients = pack(self.copies[0].tensors)
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


@contextlib.contextmanager
def scaled_rate(optimizer: torch.optim.Optimizer, fraction: float) -> Iterator[None]:
    """Multiply the learning rate by a fraction, for one optimizer step in this context.

    Scaling the learning rate scales the whole update. Scaling the gradient would scale neither
    weight decay nor Adam's updates, because Adam divides by the gradient's size. Other hooks may
    set the learning rate during the step, so the hook that scales the rate runs last.
    """
    rates: list[Any] = []

    def scale(*_: object) -> None:
        for group in [] if rates else optimizer.param_groups:  # super().step() calls the hook again
            rates.append(group["lr"])
            group["lr"] = group["lr"] * fraction

    hook = optimizer.register_step_pre_hook(scale)
    try:
        yield
    finally:
        hook.remove()
        for group, rate in zip(optimizer.param_groups, rates, strict=False):
            group["lr"] = rate


@final
class ParameterStore(UpdateCounter):
    """The server's parameters and their optimizer, on rank 0.

    Each worker trains on a copy of the parameters. Only ``pull`` changes a worker's copy.

    Args:
        copies: One copy of the parameters for each rank, on the CPU. The first copy has the initial
            parameters.
        optimizer: Function that creates the optimizer.
        in_rounds: If True, ``push`` only collects gradients, and ``update`` makes the update.
        compensation: The factor lambda in ``compensated``. If 0, gradients are not compensated.
    """

    def __init__(
        self,
        copies: Sequence[PackedTensors],
        optimizer: OptimizerFactory,
        *,
        in_rounds: bool = False,
        compensation: float = 0.0,
    ) -> None:
        super().__init__()
        self.copies = copies
        self._now = pack(copies[0].tensors)
        self._now.raw.copy_(copies[0].raw)
        self._parameters = [nn.Parameter(tensor) for tensor in self.tensors]
        self._optimizer = optimizer(self._parameters)
        self._in_rounds = in_rounds
        self._compensation = compensation
        self._weight = 0.0
        """Sum of the weights of the gradients that arrived since the last update."""

    @property
    def tensors(self) -> list[Tensor]:
        """The current parameters."""
        return self._now.tensors

    def pull(self, rank: int) -> None:
        """Copy the current parameters to a worker's copy."""
        super().pull(rank)
        self.copies[rank].raw.copy_(self._now.raw)

    def push(self, rank: int, gradients: Gradients, weight: float = 1.0) -> int:
        """Apply a worker's gradients, or collect them until ``update``. Return the staleness."""
        staleness = self.version - self._pulled[rank]
        if self._compensation and staleness > 0:
            old = self.copies[rank].tensors
            gradients = compensated(gradients, old, self.tensors, self._compensation)
        self._weight += weight
        if self._in_rounds:
            self._gather(gradients, weight)
        else:
            for parameter, gradient in zip(self._parameters, gradients, strict=True):
                parameter.grad = gradient
            self.update()
        return staleness

    def update(self) -> None:
        """Make one update with the gradients that arrived since the last update, if any arrived."""
        if not self._weight:
            return
        if self._in_rounds:  # turn the weighted sum of the gradients into their mean
            for gradient in (p.grad for p in self._parameters if p.grad is not None):
                gradient.div_(self._weight)
        with scaled_rate(self._optimizer, self._weight):
            self._optimizer.step()
        self.version += 1
        self._weight = 0.0
        for parameter in self._parameters:
            parameter.grad = None

    @torch.no_grad()
    def _gather(self, gradients: Gradients, weight: float) -> None:
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            if gradient is None:
                continue
            if parameter.grad is None:
                parameter.grad = gradient * weight
            else:
                parameter.grad.add_(gradient, alpha=weight)


def compensated(
    gradients: Gradients, old: Sequence[Tensor], now: Sequence[Tensor], strength: float
) -> list[Tensor | None]:
    """Return stale gradients, corrected for the change of the parameters from ``old`` to ``now``.

        g  +  lambda * g * g * (w_now - w_old)

    The formula is a Taylor expansion, with the diagonal of g g^T instead of the Hessian. See Zheng
    et al., "Asynchronous Stochastic Gradient Descent with Delay Compensation", 2017 (DC-ASGD-c).
    """
    return [
        None if g is None else torch.addcmul(g, g * g, mine - theirs, value=strength)
        for g, mine, theirs in zip(gradients, now, old, strict=True)
    ]
