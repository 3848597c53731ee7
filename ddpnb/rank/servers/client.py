"""A worker of an asynchronous run: how it begins, steps, ends, and who serves it (ranks)."""

import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import final

from torch import nn

from ddpnb.protocol.errors import UserError
from ddpnb.rank.cancellation import RankLostError
from ddpnb.rank.collectives.flat import num_bytes
from ddpnb.rank.servers.across import connect_hosts, serve_hosts
from ddpnb.rank.servers.connections import PeerGoneError, RemoteQueue, join_threads
from ddpnb.rank.servers.local import connect_host, serve_host
from ddpnb.rank.servers.memory import Layout, PackedTensors, SharedMemory, pack
from ddpnb.rank.servers.queue import (
    SERVER_RANK,
    Reply,
    Request,
    RequestKind,
    WorkQueue,
)
from ddpnb.rank.servers.rendezvous import NO_RANK, Rendezvous, RunOverError, WorkerConfig, host_id
from ddpnb.rank.servers.store import Gradients

MakeQueue = Callable[[Sequence[PackedTensors], Callable[[], int]], WorkQueue]
"""Makes rank 0's queue: from the copies of the parameters, the first of which holds rank 0's, and
from what returns a rank that failed before the run began."""

_IS_LOCAL = "is-local"


@final
class Client:
    """One worker's access to the queue, and on rank 0 the queue itself.

    Every call blocks until the queue lets the worker go on, and raises ``RankLostError`` where the
    run is over.  ``close`` before ``finish`` ends the run for all.

    Args:
        config: of this worker.  Its parameters, where they are on a CPU, then lie where other
            ranks write them; to other devices they are copied.
        layout: of the memory that the workers share.
        make_queue: called on rank 0.
        joins: whether the others train already; only on their own host can a worker join.

    Raises:
        UserError: the ranks are on several hosts, and there is no place for gradients: all ranks
            would have to update the same memory.  Only rank 0 raises it.
        RunOverError: there is no run to join.
        RankLostError: rank 0 is gone.
    """

    def __init__(
        self, config: WorkerConfig, layout: Layout, make_queue: MakeQueue, *, joins: bool = False
    ) -> None:
        self.queue: WorkQueue | None = None
        """Rank 0's."""
        self._config = config
        self._num_bytes = num_bytes(config.parameters)
        self._threads: list[threading.Thread] = []
        self._trained: list[nn.Parameter] = list(config.parameters)
        self._current: PackedTensors | None = None
        """The copy that the parameters lie in."""
        self._is_over = False
        self._opened = contextlib.ExitStack()
        with contextlib.ExitStack() as opened:  # what is open is closed where this fails
            self._remote: RemoteQueue | None = None
            self._copies: Sequence[PackedTensors] = ()
            self._connect(layout, make_queue, joins, opened)
            self._opened = opened.pop_all()

    def begin(self) -> range:
        """Wait for all workers; take the first parameters; return the numbers of shards."""
        return self._call(Request(RequestKind.BEGIN)).shards

    def step(self, weight: float, gradients: Gradients = ()) -> Reply:
        """Report a step; take parameters and the next shard.

        Args:
            weight: this worker's share of the global batch.
            gradients: of the mean loss; none where this worker has made the update itself.
        """
        meter = self._config.meter
        with meter.communicating():
            asked_at = meter.timer.moment()
            reply = self._call(Request(RequestKind.STEP, weight), gradients)
            if isinstance(asked_at, float) and reply.waited_seconds > 0:  # the host's own clock
                meter.timer.begin("waiting", at=asked_at)
                meter.timer.begin("communication", at=asked_at + reply.waited_seconds)
        meter.count(sent=self._num_bytes, received=self._num_bytes)
        return reply

    def finish(self) -> None:
        """Wait until all workers are done; take the final parameters."""
        self._call(Request(RequestKind.DONE))
        self._is_over = True
        self._leave_memory()
        join_threads(self._threads, self._config.timeout_seconds)

    def close(self) -> None:
        """Report a failure unless this worker has finished; may be called twice."""
        if not self._is_over:
            self._is_over = True
            with contextlib.suppress(PeerGoneError):
                self._send(Request(RequestKind.FAIL))
        self._leave_memory()
        self._opened.close()

    def _connect(
        self,
        layout: Layout,
        make_queue: MakeQueue,
        joins: bool,
        opened: contextlib.ExitStack,
    ) -> None:
        config = self._config
        if joins:
            self._remote = connect_host(config, layout, opened)
        elif config.rank == SERVER_RANK:
            self._serve(Rendezvous(config), layout, make_queue, opened)
        else:
            rendezvous = Rendezvous(config)
            rendezvous.set(_host_key(config.rank), host_id(config.folder))
            is_local = rendezvous.get(_IS_LOCAL, from_rank=SERVER_RANK) == "True"
            try:
                if is_local:
                    self._remote = connect_host(config, layout, opened)
                else:
                    self._num_bytes = 0  # gloo's messages are counted where they are sent
                    self._remote = connect_hosts(config, opened)
            except RunOverError as error:
                raise RankLostError(SERVER_RANK) from error
        if self._remote is not None:
            self._copies = self._remote.copies

    def _serve(
        self,
        rendezvous: Rendezvous,
        layout: Layout,
        make_queue: MakeQueue,
        opened: contextlib.ExitStack,
    ) -> None:
        """Make the queue, and serve the other ranks, in shared memory if all are on one host."""
        config = self._config
        others = config.other_ranks
        opened.callback(rendezvous.delete, _IS_LOCAL, *map(_host_key, others))
        hosts = {rendezvous.get(_host_key(rank), from_rank=rank) for rank in others}
        is_local = hosts <= {host_id(config.folder)}
        if not is_local and not layout.num_gradients:
            raise UserError(
                "These workers update the same memory, and they are on several hosts: take async."
            )
        if is_local:
            memory = SharedMemory.create(config.path("m"), config.parameters, layout)
            opened.enter_context(contextlib.closing(memory))
            copies = memory.copies
        else:
            copies = [pack(config.parameters) for _ in range(layout.num_copies)]
        self._copies = copies
        copies[0].fill([parameter.detach() for parameter in config.parameters])
        self.queue = queue = make_queue(copies, rendezvous.find_failed_rank)
        if is_local:
            self._threads = serve_host(queue, memory, config, opened)
            rendezvous.set(_IS_LOCAL, str(is_local))
        else:
            rendezvous.set(_IS_LOCAL, str(is_local))  # first, as every rank takes part
            self._threads = serve_hosts(queue, copies, config, opened)
        opened.enter_context(config.cancellation.held(lambda: queue.fail(SERVER_RANK)))

    def _call(self, request: Request, gradients: Gradients = ()) -> Reply:
        try:
            reply = self._send(request, gradients)
        except PeerGoneError as error:
            self._is_over = True
            raise RankLostError(SERVER_RANK) from error
        if reply.lost_rank != NO_RANK:
            self._is_over = True
            raise RankLostError(reply.lost_rank)
        self._train_on(self._copies[reply.copy])
        return reply

    def _send(self, request: Request, gradients: Gradients = ()) -> Reply:
        """Make a request of the queue; on rank 0 raise its error, if there is one."""
        if self._remote is not None:
            return self._remote.call(request, gradients)
        assert self.queue is not None, "rank 0 has made it"
        on_cpu = [None if gradient is None else gradient.cpu() for gradient in gradients]
        reply = self.queue.handle(SERVER_RANK, request, on_cpu)
        if reply.lost_rank != NO_RANK and self.queue.error is not None:
            raise self.queue.error
        return reply

    def _train_on(self, copied: PackedTensors) -> None:
        """Bring a copy of the parameters into the model."""
        is_new, self._current = copied is not self._current, copied
        for parameter, tensor in zip(self._trained, copied.tensors, strict=True):
            if parameter.device.type != "cpu":
                parameter.data.copy_(tensor)
            elif is_new:
                parameter.data = tensor

    def _leave_memory(self) -> None:
        """Give the parameters memory of their own again."""
        if self._current is not None:
            self._current = None
            for parameter in self._trained:
                if parameter.device.type == "cpu":
                    parameter.data = parameter.data.clone()


def _host_key(rank: int) -> str:
    return f"host-{rank}"
