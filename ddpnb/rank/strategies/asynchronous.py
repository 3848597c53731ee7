"""The base class of asynchronous strategies: a worker's end of the server.  Runs on the ranks."""

import contextlib
import os
import pickle
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, answer_challenge, deliver_challenge
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ddpnb.compat import torch_internals
from ddpnb.protocol.messages import Memory, RankState
from ddpnb.protocol.processes import limit_waits
from ddpnb.rank.cancellation import RankLostError
from ddpnb.rank.collectives.flat import num_bytes
from ddpnb.rank.connections import shut_down
from ddpnb.rank.emulation.order import SERVER_RANK, VirtualOrder
from ddpnb.rank.servers.queue import (
    NO_BOUND,
    NO_RANK,
    Gradients,
    Reply,
    UpdateCounter,
    WorkerRequest,
    WorkQueue,
)
from ddpnb.rank.servers.server import (
    STALLED_SECONDS,
    PackedTensors,
    Server,
    limit_seconds,
    mapped,
    pack,
    received,
)
from ddpnb.rank.strategies.base import Plan, Strategy
from ddpnb.rank.tasks.batches import Shard
from ddpnb.rank.worker import Worker

MakeUpdates = Callable[[Sequence[PackedTensors]], UpdateCounter]
"""Function that creates the ``UpdateCounter`` on rank 0, from the copies of the parameters."""


class RunOverError(Exception):
    """Raised if a worker cannot join, because the run has ended."""


class AsynchronousStrategy(Strategy):
    """The base class of strategies in which workers wait only at the start and at the end.

    The queue gives the next shard to the first worker that asks. If a worker dies, its unfinished
    shards are lost, and the restarted worker may join again. A subclass calls ``begin`` in its
    ``setup``, and ``exchange`` in each step. If the run is over, a call raises ``RankLostError``.

    Args:
        momentum: Momentum of the default optimizer, read through ``RunSpec.used_momentum``.
        timeout: Maximum number of seconds during which no worker makes progress.
    """

    def __init__(self, *, momentum: float | None = None, timeout: float = 60.0) -> None:
        self.timeout = timeout

    def plan(self, state: RankState) -> Plan:
        """Return a plan to train on every rank."""
        num = state.world_size
        return Plan(num_ranks=num, num_workers=num, synchronous=False, survives_deaths=True)

    def begin(
        self, worker: Worker, num_copies: int, make_updates: MakeUpdates, bound: int = NO_BOUND
    ) -> None:
        """Connect to the server, wait for all workers, and get parameters and the first shards.

        Every rank takes part, but a restarted worker on rank 0's host joins without the others. It
        raises ``RunOverError`` if the run has ended. CPU parameters are moved to memory that the
        server writes. There is one copy of the parameters for each worker, or one for all workers.
        See ``WorkQueue`` for ``bound``.
        """
        self.worker, self.trained = worker, worker.parameters
        self._num_bytes = num_bytes(self.trained)
        self._next_shards: deque[int] = deque()
        self._is_over = False
        address: Any = str(worker.folder / f"{worker.name}.s")
        if worker.rank == SERVER_RANK:
            self._serve(address, num_copies, make_updates, bound)
        else:
            place: list[Any] = ["", b"", worker.world_size]
            if not worker.joins:
                dist.broadcast_object_list(place, src=SERVER_RANK)
            if worker.rank >= place[2]:
                address = place[0]
            try:
                self._connect(address, place[1], num_copies)
            except (OSError, AuthenticationError) as error:
                raise RunOverError if worker.joins else RankLostError(SERVER_RANK) from error
        self.opened.callback(self._leave)
        for parameter, tensor in zip(self.trained, self._copy.tensors, strict=True):
            if parameter.device.type == "cpu":
                parameter.data = tensor
        worker.clock.wait_until(self._ask("begin").now)

    def shards(self) -> Iterator[Shard]:
        """Yield the shards that this worker gets from the queue, until no shard is left."""
        while self._next_shards:
            yield self.worker.shard(self._next_shards.popleft())

    def exchange(self, weight: float, gradients: Gradients = ()) -> None:
        """Report a step, and get parameters and the next shard.

        If the worker has already updated the shared parameters, ``gradients`` is empty.
        """
        clock = self.worker.clock
        with clock.communicating():
            asked_at = clock.moment()
            reply = self._ask("step", weight, gradients)
            clock.wait_until(reply.now)
            if isinstance(asked_at, float) and reply.waited_seconds > 0:  # not virtual time
                clock.enter("waiting", at=asked_at)
                clock.enter("communication", at=asked_at + reply.waited_seconds)
        size = clock.scale * self._num_bytes
        clock.count(sent=size, received=size)
        self.worker.staleness = reply.staleness

    def finish(self) -> nn.Module:
        """Wait for all workers, and return the final model. Every rank takes part."""
        self.worker.clock.wait_until(self._ask("finish").now)
        self._is_over = True
        for parameter in self.trained:
            if parameter.device.type == "cpu":
                parameter.data = parameter.data.clone()  # in private memory
        return self.worker.model

    def memory(self) -> Memory:
        """Return the memory that this rank uses, between two updates by the server."""
        with contextlib.nullcontext() if self.queue is None else self.queue.changed:
            return super().memory()

    def _leave(self) -> None:
        """Report that this worker has failed, unless it has finished. This ends the run for all."""
        if self._is_over:
            return
        self._is_over = True
        if self.queue is not None:
            return self.queue.fail(SERVER_RANK)
        with contextlib.suppress(OSError):  # rank 0 may no longer read
            limit_waits(self._connection, write_seconds=STALLED_SECONDS).close()
            self._connection.send(("fail", 0.0))

    def _serve(self, path: str, num_copies: int, make_updates: MakeUpdates, bound: int) -> None:
        """Start the server on rank 0, and tell the other ranks its address."""
        worker, num = self.worker, self.worker.world_size
        assert worker.local_world_size == num or num_copies > 1, "other hosts cannot share memory"
        server = Server(self.trained, num_copies, self.timeout)
        self.opened.callback(server.close)
        self._copy = server.copies[SERVER_RANK]
        self._copy.fill([parameter.detach() for parameter in self.trained])
        emulated = worker.emulation
        order = emulated and VirtualOrder(emulated, num_workers=num, shard=worker.shard)
        self.queue = queue = WorkQueue(
            make_updates(server.copies),
            num_workers=num,
            num_shards=worker.num_steps * num,
            timeout_seconds=self.timeout,
            num_prefetched=worker.num_prefetched,
            order=order,
            bound=bound,
        )
        address = server.serve(queue, path)
        if worker.local_world_size < num:
            address = server.serve(queue, (server_host(), 0))
        self.opened.enter_context(worker.cancellation.held(lambda: queue.fail(SERVER_RANK)))
        place = [address, server.key, worker.local_world_size]  # rank 0's host has the first ranks
        dist.broadcast_object_list(place, src=SERVER_RANK)

    def _connect(self, address: Any, key: bytes, num_copies: int) -> None:
        """Connect to rank 0, by TCP if it is on another host. Raises ``OSError``."""
        worker = self.worker
        self._connection = connection = self.opened.enter_context(Client(address))
        # Rank 0's queue should report a timeout first.
        is_local = limit_seconds(connection, 1.5 * self.timeout)
        end = worker.cancellation.held(lambda: shut_down(connection.fileno()))
        self.opened.enter_context(end)
        if not is_local:
            answer_challenge(connection, key)
            deliver_challenge(connection, key)
        connection.send(worker.rank)
        if is_local:
            descriptor = received(connection)
            slots = mapped(descriptor, self.trained, num_copies)
            os.close(descriptor)
            self._copy, self._gradients = slots[worker.rank % num_copies]
        else:
            self._copy, self._gradients = pack(self.trained), pack(self.trained)

    def _ask(self, request: WorkerRequest, weight: float = 0.0, gradients: Gradients = ()) -> Reply:
        """Send a request to the queue. On rank 0, raise the queue's error if there is one."""
        if self.queue is None:
            reply = self._sent(request, weight, gradients)
        else:
            on_cpu = [None if gradient is None else gradient.cpu() for gradient in gradients]
            reply = self.queue.handle(SERVER_RANK, request, weight, on_cpu)
            if reply.lost_rank != NO_RANK and self.queue.error is not None:
                raise self.queue.error
        if reply.lost_rank != NO_RANK:
            self._is_over = True
            raise RankLostError(reply.lost_rank)
        for parameter, tensor in zip(self.trained, self._copy.tensors, strict=True):
            if parameter.device.type != "cpu":
                parameter.data.copy_(tensor)
        self._next_shards.extend(reply.shards)
        self.worker.version = reply.version
        return reply

    def _sent(self, request: WorkerRequest, weight: float, gradients: Gradients) -> Reply:
        """Send a request to rank 0, and return the reply."""
        try:
            # If rank 0 has disconnected, read its last reply, which contains the reason.
            with contextlib.suppress(OSError):
                if gradients:
                    self._gradients.fill(gradients)
                self._connection.send_bytes(pickle.dumps((request, weight)))
                if gradients:
                    self._gradients.send(self._connection, lambda: False)
            reply = Reply(*self._connection.recv())
            if reply.lost_rank == NO_RANK:
                self._copy.receive(self._connection)
        except (EOFError, OSError):
            return Reply(lost_rank=SERVER_RANK)
        return reply


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


def server_host() -> str:
    """Return rank 0's address for other hosts. The address is taken from the group's store."""
    store = torch_internals.group_store()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store.host if isinstance(store, dist.TCPStore) else "127.0.0.1"
