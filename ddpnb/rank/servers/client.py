"""How a worker of an asynchronous run reaches the queue of rank 0 (ranks).

Rank 0's own worker calls the queue.  Each other worker sends its requests through a socket, at
whose other end a thread of rank 0 calls the queue.  Where a process dies, its socket closes at
once.

On rank 0's host the tensors lie in shared memory, and messages through a Unix socket pass the turn;
the kernel's locks in a socket order memory on any processor.  The socket lies in the run's folder,
which no other user may enter: a process that starts later finds it without a collective.  Workers
of other hosts connect by TCP, and the tensors follow the messages.
"""

import contextlib
import socket
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import final

import torch.distributed as dist

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
from ddpnb.rank.servers.server import HELLO, Server, connection_over, server_address
from ddpnb.rank.worker import Worker

MakeUpdates = Callable[[Sequence[PackedTensors]], UpdateCounter]
"""Makes, on rank 0, what workers read and write.

From copies of the parameters, the first of which holds rank 0's.
"""


class RunOverError(Exception):
    """There is nothing to join: the run has ended."""


@final
class Client:
    """One worker's access to the queue, and on rank 0 the queue itself.

    Every call blocks until the queue lets the worker go on, and raises ``RankLostError`` where the
    run is over.  ``close`` before ``finish`` ends the run for all.

    Args:
        worker: this one; takes part: every rank, or one on rank 0's host that joins.  Its
            parameters, where they are on a CPU, then lie where other ranks write them; to other
            devices they are copied.
        num_copies: of the parameters: one for each worker, or one that all of them update.
        make_updates: called on rank 0.
        opened: closes threads and sockets, after ``close``.
        timeout_seconds: in which some worker must make progress.
        bound: steps that a worker may be ahead of the slowest.

    Raises:
        RunOverError: there is no run to join.
        RankLostError: rank 0 is gone.
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
        """Rank 0's."""
        self._worker = worker
        self._path = worker.folder / f"{worker.name}.s"
        """The address of the socket on rank 0's host."""
        # The queue's own report comes first.
        self._timeout = timeout_seconds * (1.0 if worker.rank == SERVER_RANK else 1.5)
        self._num_copies = num_copies
        self._trained = worker.parameters
        self._num_bytes = num_bytes(self._trained)
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
        """Wait for all workers; take the first parameters and shards."""
        for parameter, tensor in zip(self._trained, self._copy.tensors, strict=True):
            if parameter.device.type == "cpu":
                parameter.data = tensor
        reply = self._call(RequestKind.BEGIN)
        self._shards.extend(reply.shards)
        self._worker.meter.wait_until(reply.now)

    def shards(self) -> Iterator[int]:
        """Yield the numbers of this worker's shards, until all are handed out."""
        while self._shards:
            yield self._shards.popleft()

    def step(self, weight: float, gradients: Gradients = ()) -> int:
        """Report a step; take parameters and the next shard; return the gradients' staleness.

        There are no gradients where this worker has made the update itself.
        """
        meter = self._worker.meter
        with meter.communicating():
            asked_at = meter.moment()
            reply = self._call(RequestKind.STEP, weight, gradients)
            meter.wait_until(reply.now)
            if isinstance(asked_at, float) and reply.waited_seconds > 0:  # the host's own clock
                meter.begin("waiting", at=asked_at)
                meter.begin("communication", at=asked_at + reply.waited_seconds)
        size = round(meter.scale * self._num_bytes)
        meter.count(sent=size, received=size)
        self._shards.extend(reply.shards)
        self._worker.version = reply.version
        return reply.staleness

    def finish(self) -> None:
        """Wait until all workers are done; take the final parameters."""
        self._worker.meter.wait_until(self._call(RequestKind.DONE).now)
        self._is_over = True
        for parameter in self._trained:
            if parameter.device.type == "cpu":
                parameter.data = parameter.data.clone()  # in memory of its own

    def close(self) -> None:
        """Report a failure unless this worker has finished; may be called twice."""
        if not self._is_over:
            self._is_over = True
            if self.queue is not None:
                self.queue.fail(SERVER_RANK)
            else:
                with contextlib.suppress(OSError):
                    self._connection.send_bytes(REQUEST.pack(RequestKind.FAIL, 0.0))

    def _meet(self, make_updates: MakeUpdates, bound: int) -> None:
        """Have rank 0 listen, and the others connect; takes part: every rank."""
        worker = self._worker
        place = [0, 0]
        if worker.rank == SERVER_RANK:
            num_local = worker.local_world_size
            num_remote = worker.world_size - num_local
            assert not num_remote or self._num_copies > 1, "all ranks would update the same memory"
            self._memory = SharedMemory.create(self._trained, self._num_copies)
            self._opened.callback(self._memory.close)
            self._copy = self._memory.copy_of(SERVER_RANK)
            self._copy.fill([parameter.detach() for parameter in self._trained])
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
            place = [self._serve(self.queue, num_remote), num_local]
        dist.broadcast_object_list(place, src=SERVER_RANK)  # takes part: every rank
        if worker.rank == SERVER_RANK:
            return
        try:
            port, num_local = place  # rank 0's host has the first ranks
            self._connect(port if worker.rank >= num_local else 0)
        except OSError as error:
            raise RankLostError(SERVER_RANK) from error

    def _serve(self, queue: WorkQueue, num_remote: int) -> int:
        """Listen; return the port for workers of other hosts, if any."""
        opened = self._opened
        server = Server(queue, self._memory, self._trained, self._timeout)
        opened.callback(server.close)
        local, port = socket.socket(socket.AF_UNIX), 0
        local.bind(str(self._path))
        opened.callback(self._path.unlink)
        server.listen(local)
        if num_remote:
            remote = socket.create_server((server_address(), 0))
            port = remote.getsockname()[1]
            server.listen(remote, num_remote)
        opened.enter_context(self._worker.cancellation.held(lambda: queue.fail(SERVER_RANK)))
        return port

    def _connect(self, port: int = 0) -> None:
        """Connect to rank 0, on this host if there is no port; raises ``OSError``."""
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
        connection.send_bytes(HELLO.pack(worker.rank))
        if self._is_remote:
            self._copy, self._gradients = pack(self._trained), pack(self._trained)
        else:
            memory = SharedMemory.receive(connection, self._trained, self._num_copies)
            memory.close()
            self._copy, self._gradients = memory.copy_of(worker.rank), memory.gradients(worker.rank)

    def _call(self, kind: RequestKind, weight: float = 0.0, gradients: Gradients = ()) -> Reply:
        """Make a request of the queue; on rank 0 raise its error, if there is one."""
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
        for parameter, tensor in zip(self._trained, self._copy.tensors, strict=True):
            if parameter.device.type != "cpu":
                parameter.data.copy_(tensor)
        return reply

    def _ask(self, kind: RequestKind, weight: float, gradients: Gradients) -> Reply:
        """Make a request of rank 0's process."""
        connection = self._connection
        if gradients:
            self._gradients.fill(gradients)
        try:
            # A rank 0 that has disconnected left a last reply, read below, which says why.
            with contextlib.suppress(OSError):
                connection.send_bytes(REQUEST.pack(kind, weight))
                if self._is_remote and kind is RequestKind.STEP:
                    connection.send_bytes(self._gradients.raw.numpy().data)
            reply = Reply(*REPLY.unpack(connection.recv_bytes()))
            if self._is_remote and reply.lost_rank == NO_RANK:
                connection.recv_bytes_into(self._copy.raw.numpy().data)
        except (EOFError, OSError):
            return Reply(lost_rank=SERVER_RANK)
        return reply
