"""Connect a worker of an asynchronous run to the queue on rank 0.  Runs on the ranks.

Rank 0's worker calls the queue directly. Each other worker sends requests through a socket to a
thread of rank 0, and this thread calls the queue. If a process dies, its socket closes at once.

On rank 0's host, the tensors are in shared memory. Messages through a Unix socket decide which
process may use the tensors. The system locks the socket for each message, so memory accesses stay
in order on any processor. The socket is in the run folder, and other users cannot open this
folder. A restarted worker finds the socket by its path, without a collective. Workers on other
hosts connect by TCP, prove that they know the run's key, and send each tensor after a message.
"""

import contextlib
import secrets
import socket
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import AuthenticationError
from multiprocessing.connection import answer_challenge, deliver_challenge
from typing import final

import torch.distributed as dist

from ddpnb.protocol.processes import limit_waits
from ddpnb.rank.cancellation import RankLostError
from ddpnb.rank.collectives.flat import num_bytes
from ddpnb.rank.connections import shut_down
from ddpnb.rank.laboratory.order import SERVER_RANK, VirtualOrder
from ddpnb.rank.servers.memory import Gradients, PackedTensors, SharedMemory, pack
from ddpnb.rank.servers.queue import (
    NO_BOUND,
    NO_RANK,
    REPLY,
    REQUEST,
    Reply,
    RequestKind,
    UpdateCounter,
    WorkQueue,
)
from ddpnb.rank.servers.server import (
    HELLO,
    STALLED_SECONDS,
    Server,
    connection_over,
    receive,
    send,
    server_address,
)
from ddpnb.rank.worker import Worker

MakeUpdates = Callable[[Sequence[PackedTensors]], UpdateCounter]
"""Function that creates the ``UpdateCounter`` on rank 0.

The argument is a list of copies of the parameters. The first copy has rank 0's parameters.
"""


class RunOverError(Exception):
    """Raised if a worker cannot join, because the run has ended."""


@final
class Client:
    """One worker's access to the queue. Rank 0's client also creates the queue.

    Every call blocks until the queue lets the worker continue. If the run is over, the call raises
    ``RankLostError``. If ``close`` is called before ``finish``, the run ends for all workers.

    Args:
        worker: This rank's worker. Every rank takes part. A restarted worker on rank 0's host joins
            without the other ranks. CPU parameters are moved to memory that other ranks can write.
            Other parameters stay on their device, and ddpnb copies new values to the device.
        num_copies: Number of copies of the parameters: one for each worker, or one for all workers.
        make_updates: Function that creates the ``UpdateCounter``. Only rank 0 calls this function.
        opened: Exit stack that ends the threads and closes the sockets after ``close``.
        timeout_seconds: Maximum number of seconds during which no worker makes progress.
        bound: Maximum number of steps that a worker may be ahead of the slowest worker.

    Raises:
        RunOverError: The worker cannot join, because the run has ended.
        RankLostError: Rank 0 cannot be reached.
    """

    def __init__(
        self,
        worker: Worker,
        num_copies: int,
        make_updates: MakeUpdates,
        opened: contextlib.ExitStack,
        *,
        timeout_seconds: float,
        bound: int = NO_BOUND,
    ) -> None:
        self.queue: WorkQueue | None = None
        """The work queue, on rank 0. On other ranks, the queue is None."""
        self._worker = worker
        self._path = worker.folder / f"{worker.name}.s"
        """Address of the Unix socket on rank 0's host."""
        # Other ranks wait longer, so that the queue reports a timeout first.
        self._timeout = timeout_seconds * (1.0 if worker.rank == SERVER_RANK else 1.5)
        self._num_copies = num_copies
        self.trained = worker.parameters
        self._num_bytes = num_bytes(self.trained)
        self._shards: deque[int] = deque()
        self._is_over = False
        self._opened = opened
        if worker.joins:
            try:
                self._connect()
            except OSError as error:
                raise RunOverError from error
        else:
            self._meet(make_updates, bound)

    def begin(self) -> None:
        """Wait for all workers, then get the first parameters and shards."""
        for parameter, tensor in zip(self.trained, self._copy.tensors, strict=True):
            if parameter.device.type == "cpu":
                parameter.data = tensor
        reply = self._call(RequestKind.BEGIN)
        self._shards.extend(reply.shards)
        self._worker.version = reply.version
        self._worker.clock.wait_until(reply.now)

    def shards(self) -> Iterator[int]:
        """Yield the numbers of this worker's shards, until the queue has no more shards."""
        while self._shards:
            yield self._shards.popleft()

    def step(self, weight: float, gradients: Gradients = ()) -> int:
        """Report a step, and get parameters and the next shard. Return the update's staleness.

        If the worker has already updated the shared parameters, ``gradients`` is empty.
        """
        clock = self._worker.clock
        with clock.communicating():
            asked_at = clock.moment()
            reply = self._call(RequestKind.STEP, weight, gradients)
            clock.wait_until(reply.now)
            if isinstance(asked_at, float) and reply.waited_seconds > 0:  # not virtual time
                clock.enter("waiting", at=asked_at)
                clock.enter("communication", at=asked_at + reply.waited_seconds)
        size = clock.scale * self._num_bytes
        clock.count(sent=size, received=size)
        self._shards.extend(reply.shards)
        self._worker.version = reply.version
        return reply.staleness

    def finish(self) -> None:
        """Wait until all workers are done, then get the final parameters."""
        self._worker.clock.wait_until(self._call(RequestKind.DONE).now)
        self._is_over = True
        for parameter in self.trained:
            if parameter.device.type == "cpu":
                parameter.data = parameter.data.clone()  # in private memory

    def close(self) -> None:
        """Report that this worker has failed, unless it has finished. Repeated calls are safe."""
        if not self._is_over:
            self._is_over = True
            if self.queue is not None:
                self.queue.fail(SERVER_RANK)
            else:
                with contextlib.suppress(OSError):  # rank 0 may no longer read
                    limit_waits(self._connection, write_seconds=STALLED_SECONDS).close()
                    self._connection.send_bytes(REQUEST.pack(RequestKind.FAIL, 0.0))

    def _meet(self, make_updates: MakeUpdates, bound: int) -> None:
        """Start the server on rank 0 and connect the other ranks to it. Every rank takes part."""
        worker = self._worker
        place: tuple[int, int, bytes] = 0, 0, b""
        if worker.rank == SERVER_RANK:
            num_local = worker.local_world_size
            num_remote = worker.world_size - num_local
            assert not num_remote or self._num_copies > 1, "other hosts cannot share memory"
            self._memory = SharedMemory.create(self.trained, self._num_copies)
            self._opened.callback(self._memory.close)
            self._copy = self._memory.copy_of(SERVER_RANK)
            self._copy.fill([parameter.detach() for parameter in self.trained])
            num, emulated = worker.world_size, worker.laboratory
            order = emulated and VirtualOrder(emulated, num_workers=num, shard=worker.shard)
            self.queue = WorkQueue(
                make_updates(self._memory.copies),
                num_workers=worker.world_size,
                num_shards=worker.num_steps * worker.world_size,
                timeout_seconds=self._timeout,
                num_prefetched=worker.num_prefetched,
                order=order,
                bound=bound,
            )
            key = secrets.token_bytes(32)
            place = self._serve(self.queue, num_remote, key), num_local, key
        sent = [place]
        dist.broadcast_object_list(sent, src=SERVER_RANK)  # every rank takes part
        if worker.rank == SERVER_RANK:
            return
        try:
            port, num_local, key = sent[0]  # rank 0's host has the first ranks
            self._connect(port if worker.rank >= num_local else 0, key)
        except (OSError, AuthenticationError) as error:
            raise RankLostError(SERVER_RANK) from error

    def _serve(self, queue: WorkQueue, num_remote: int, key: bytes) -> int:
        """Start the server. Return the port for other hosts, or 0 if there is only one host."""
        opened = self._opened
        local, port = socket.socket(socket.AF_UNIX), 0
        local.bind(str(self._path))
        opened.callback(self._path.unlink)
        server = Server(queue, self._memory, self.trained, key, self._timeout)
        opened.callback(server.close)  # before the path is removed
        server.listen(local)
        if num_remote:
            remote = socket.create_server((server_address(), 0))
            port = remote.getsockname()[1]
            server.listen(remote)
        opened.enter_context(self._worker.cancellation.held(lambda: queue.fail(SERVER_RANK)))
        return port

    def _connect(self, port: int = 0, key: bytes = b"") -> None:
        """Connect to rank 0 by TCP, or by the Unix socket if the port is 0. Raises ``OSError``."""
        worker, opened = self._worker, self._opened
        if port:
            address = server_address(), port
            connected = socket.create_connection(address, self._timeout)
        else:
            connected = socket.socket(socket.AF_UNIX)
            connected.connect(str(self._path))
        self._is_remote = port > 0
        self._connection = connection = connection_over(connected, self._timeout)
        opened.enter_context(connection)
        opened.enter_context(worker.cancellation.held(lambda: shut_down(connection.fileno())))
        if self._is_remote:
            answer_challenge(connection, key)
            deliver_challenge(connection, key)
        connection.send_bytes(HELLO.pack(worker.rank))
        if self._is_remote:
            self._copy, self._gradients = pack(self.trained), pack(self.trained)
        else:
            memory = SharedMemory.receive(connection, self.trained, self._num_copies)
            memory.close()
            self._copy, self._gradients = memory.copy_of(worker.rank), memory.gradients(worker.rank)

    def _call(self, kind: RequestKind, weight: float = 0.0, gradients: Gradients = ()) -> Reply:
        """Send a request to the queue. On rank 0, raise the queue's error if there is one."""
        if self.queue is None:
            reply = self._ask(kind, weight, gradients)
        else:
            on_cpu = [None if gradient is None else gradient.cpu() for gradient in gradients]
            reply = self.queue.handle(SERVER_RANK, kind, weight, on_cpu)
            if reply.lost_rank != NO_RANK and self.queue.error is not None:
                raise self.queue.error
        if reply.lost_rank != NO_RANK:
            self._is_over = True
            raise RankLostError(reply.lost_rank)
        for parameter, tensor in zip(self.trained, self._copy.tensors, strict=True):
            if parameter.device.type != "cpu":
                parameter.data.copy_(tensor)
        return reply

    def _ask(self, kind: RequestKind, weight: float, gradients: Gradients) -> Reply:
        """Send a request to rank 0, and return the reply."""
        connection = self._connection
        if gradients:
            self._gradients.fill(gradients)
        try:
            # If rank 0 has disconnected, read its last reply, which contains the reason.
            with contextlib.suppress(OSError):
                connection.send_bytes(REQUEST.pack(kind, weight))
                if self._is_remote and kind is RequestKind.STEP:
                    send(connection, self._gradients.raw, lambda: False)
            reply = Reply(*REPLY.unpack(connection.recv_bytes()))
            if self._is_remote and reply.lost_rank == NO_RANK:
                receive(connection, self._copy.raw)
        except (EOFError, OSError):
            return Reply(lost_rank=SERVER_RANK)
        return reply
