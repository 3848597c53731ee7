"""The work queue: gives shards to workers, and tracks which workers are alive.  Runs on rank 0.

Asynchronous workers wait for each other only at the start and at the end. With a bound, the fastest
workers also wait during the run. A worker's request blocks until the worker may continue. Rank 0's
worker calls the queue directly. For each other worker, a thread on rank 0 receives requests and
calls the queue. Tensors are sent separately from requests and replies.

If a worker dies or is silent for too long, its unfinished shards are lost, and the worker may join
again. If a worker raises an error or rank 0 dies, the run ends for all workers.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Literal, NamedTuple, final

from torch import Tensor

from ddpnb.rank.cancellation import RankLostError
from ddpnb.rank.emulation.order import SERVER_RANK, VirtualOrder

NO_BOUND = -1
NO_RANK = -1

Gradients = Sequence[Tensor | None]
"""List with the gradient of each parameter, or None for a parameter without a gradient."""

WorkerRequest = Literal["begin", "step", "finish", "fail"]
"""A worker's request: get the first shards and parameters after all workers have joined; report a
step and get the next shard and parameters; get the final parameters after the last step of all
workers; report that the worker has failed (without a reply)."""


class Reply(NamedTuple):
    """The reply to a request, without the parameters."""

    staleness: int = 0
    """Number of updates by other workers between this worker's last pull and its update."""
    version: int = 0
    """Number of the update that contains this worker's gradient, or of the first that it pulled."""
    shards: tuple[int, ...] = ()
    """Numbers of the shards that the worker gets with this reply."""
    waited_seconds: float = 0.0
    """Number of seconds that the worker waited for other workers."""
    lost_rank: int = NO_RANK
    """Number of the lost rank that ended the run (no parameters follow). Otherwise ``NO_RANK``."""
    now: float = 0.0
    """Virtual time at which an emulated worker receives the reply."""


class UpdateCounter:
    """Counts updates that workers make themselves, in parameters that all workers share.

    The queue holds its lock when it calls the counter.
    """

    def __init__(self) -> None:
        self.version = 0
        """Number of updates so far."""
        self._pulled: dict[int, int] = {}

    def pull(self, rank: int) -> None:
        """Note that a worker gets the current parameters. A subclass also copies them."""
        self._pulled[rank] = self.version

    def push(self, rank: int, gradients: Gradients, weight: float) -> int:
        """Count an update. Return how many other updates occurred since the worker's last pull."""
        staleness = self.version - self._pulled[rank]
        self.version += 1
        return staleness

    def update(self) -> None:
        """Make one update with the gradients that arrived since the last update, if any arrived."""


@dataclass(slots=True)
class _Worker:
    """A worker that is alive."""

    incarnation: object
    clock: int
    """Number of steps that the worker has taken."""
    shards: deque[int]
    """Shards that the worker holds and has not trained on, in order."""
    heard_at: float = field(default_factory=time.monotonic)
    is_done: bool = False
    """True if the worker has taken its last step."""
    is_leaving: bool = False
    """True if the worker waits for the final parameters."""
    is_held: bool = False
    """True if the worker waits because of the bound."""


@final
@dataclass(eq=False)
class WorkQueue:
    """Gives the next shard to the first worker that asks, until no shard is left."""

    updates: UpdateCounter
    """The counter of updates. For a parameter server, this is the ``ParameterStore``."""
    _: KW_ONLY
    num_workers: int
    """Number of workers that start together. These workers have ranks 0, 1, 2, ..."""
    num_shards: int
    """Number of shards in the whole run."""
    timeout_seconds: float
    """Maximum number of seconds during which no worker makes progress."""
    num_prefetched: int = 0
    """Number of shards that a worker holds in addition to its current shard."""
    bound: int = NO_BOUND
    """Maximum number of steps that a worker may be ahead of the slowest worker, or ``NO_BOUND``.

    If the bound is 0, the queue makes one update in each round, with all workers' gradients.
    """
    order: VirtualOrder | None = None
    """Order of requests from emulated workers. If None, requests are handled as they arrive."""

    def __post_init__(self) -> None:
        self.error: Exception | None = None
        """The error that a thread of this rank raised, or None."""
        self.lost_shards: list[int] = []
        """Numbers of the shards that were not finished, because their workers were lost."""
        self.num_shards_done = 0
        """Number of shards that were finished when rank 0's worker last pulled the parameters."""
        self._num_trained = 0
        """Number of shards that workers have trained on."""
        num_first, every = self.num_workers * (1 + self.num_prefetched), range(self.num_shards)
        self._first, self._shards = every[:num_first], every[num_first:]
        """Numbers of the shards that workers get at the start, and numbers of all other shards."""
        self.changed = threading.Condition()
        """Condition variable of the queue. The queue holds this lock when it calls ``updates``."""
        self._workers: dict[int, _Worker] = {}
        self._has_begun = False
        self._failed_rank = NO_RANK
        self._progress_at = time.monotonic()

    def handle(
        self,
        rank: int,
        request: WorkerRequest,
        weight: float = 0.0,
        gradients: Gradients = (),
        incarnation: object = None,
    ) -> Reply:
        """Handle a request. An error ends the run for all workers, and rank 0 raises the error.

        For a step, ``weight`` is the worker's share of the global batch, and ``gradients`` are
        gradients of the mean loss. If the worker itself has updated shared parameters,
        ``gradients`` is empty. ``incarnation`` identifies the worker's process, because an earlier
        process of the same rank may have died.
        """
        asked_at = self._time()
        try:
            with self.changed:
                if request == "begin":
                    return self._begin(rank, incarnation)
                worker = self._living(rank, incarnation)
                if request == "finish":
                    return self._finish(rank, worker)
                waited_seconds = 0.0 if self.order else self._time() - asked_at
                self._take_turn(rank, worker)
                version = self.updates.version + 1
                staleness = self.updates.push(rank, gradients, weight)
                waited_seconds += self._step(rank, worker)
                shards = self._take(1)
                worker.shards.extend(shards)
                return self._reply(rank, Reply(staleness, version, shards, waited_seconds))
        except RankLostError as lost:  # the run is over, or continues without this worker
            return Reply(lost_rank=lost.rank)
        except Exception as error:  # noqa: BLE001  # the thread's edge
            self.fail(SERVER_RANK, error)
            return Reply(lost_rank=SERVER_RANK)

    def lose(self, rank: int, incarnation: object = None) -> Reply:
        """Remove a worker that seems dead. Return the reply that the worker gets if it is alive."""
        with self.changed:
            worker = self._workers.get(rank)
            if worker is None or worker.incarnation is incarnation:  # if no new process replaced it
                self._lose(rank)
            return Reply(lost_rank=rank if self._failed_rank == NO_RANK else self._failed_rank)

    def fail(self, rank: int, error: Exception | None = None) -> None:
        """End the run for all workers, because a worker or this rank has failed."""
        with self.changed:
            self._fail(rank)
            self.error = self.error or error

    def _time(self) -> float:
        return time.perf_counter() if self.order is None else self.order.now

    # The queue holds the lock when it calls any method below.

    def _begin(self, rank: int, incarnation: object) -> Reply:
        """Wait for all workers. A worker that joins later starts at the slowest worker's step."""
        self._check()
        if rank in self._workers:  # the queue has not noticed its death yet
            self._lose(rank)
        joins, shards = self._has_begun, tuple(self._first[rank :: self.num_workers])
        if joins:
            self._take_turn(rank, None)
            shards = self._take(1 + self.num_prefetched)
        self._workers[rank] = _Worker(incarnation, min(self._clocks(), default=0), deque(shards))
        self._has_begun = self._has_begun or len(self._workers) == self.num_workers
        self._note_progress()
        self._wait(lambda: self._has_begun)
        self._living(rank, incarnation)
        reply = Reply(version=self.updates.version, shards=shards)
        return self._reply(rank, reply, is_first=not joins)

    def _take_turn(self, rank: int, worker: _Worker | None) -> None:
        """Wait until this worker's request is the next request in virtual time."""
        order = self.order
        if order is None:
            return
        self._wait(lambda: order.is_next(rank) or self._workers.get(rank) is not worker)
        if worker is not None:
            self._living(rank, worker.incarnation)
        order.arrive(rank)

    def _step(self, rank: int, worker: _Worker) -> float:
        """Count a step, and wait if the bound requires it. Return the waiting time in seconds."""
        worker.clock += 1
        if worker.shards:  # empty if the step did not use a shard from the queue
            worker.shards.popleft()
            self._num_trained += 1
        worker.heard_at = self._progress_at = time.monotonic()
        if self.bound == NO_BOUND:  # no other worker waits for this worker
            return 0.0
        self._note_progress()
        began = self._time()
        was_held = worker.is_held = self._is_ahead(worker)
        self._wait(lambda: not self._is_ahead(worker) or self._workers.get(rank) is not worker)
        self._living(rank, worker.incarnation)  # the worker may have died while it waited
        if was_held:
            self._take_turn(rank, worker)
        return self._time() - began

    def _is_ahead(self, worker: _Worker) -> bool:
        return worker.clock - min(self._clocks(), default=0) > self.bound

    def _finish(self, rank: int, worker: _Worker) -> Reply:
        """Wait for all workers. Unfinished shards of a stopped worker do not count as lost."""
        worker.is_leaving = True
        worker.shards.clear()
        self._note_done(rank, worker)
        self._wait(lambda: all(each.is_leaving for each in self._workers.values()))
        self.updates.update()
        self.updates.pull(rank)
        now = self.order.now if self.order else 0.0
        return Reply(version=self.updates.version, now=now)

    def _note_done(self, rank: int, worker: _Worker) -> None:
        worker.is_done = True
        if self.order is not None:
            self.order.leave(rank)
        self._note_progress()

    def _check(self) -> None:
        if self._failed_rank != NO_RANK:
            raise RankLostError(self._failed_rank)

    def _living(self, rank: int, incarnation: object) -> _Worker:
        self._check()
        worker = self._workers.get(rank)
        if worker is None or worker.incarnation is not incarnation:
            raise RankLostError(rank)  # declared lost although alive, or replaced
        return worker

    def _take(self, most: int) -> tuple[int, ...]:
        shards, self._shards = self._shards[:most], self._shards[most:]
        return tuple(shards)

    def _reply(self, rank: int, reply: Reply, *, is_first: bool = False) -> Reply:
        self.updates.pull(rank)
        worker = self._workers[rank]
        if rank == SERVER_RANK:
            self.num_shards_done = self._num_trained
        if self.order is None:
            return reply
        num = worker.shards[0] if worker.shards else None
        now = self.order.reply(rank, num, is_first=is_first)
        self.changed.notify_all()
        if num is None:  # note it now, because the last request may arrive at any time
            self._note_done(rank, worker)
        return reply._replace(now=now)

    def _clocks(self) -> list[int]:
        """Return how many steps each worker has taken, except workers that are done."""
        return [worker.clock for worker in self._workers.values() if not worker.is_done]

    def _note_progress(self) -> None:
        """Wake the workers that may continue. If the bound is 0, make one update per full round."""
        self._progress_at = time.monotonic()
        if self.bound == 0 and len(set(self._clocks())) < 2:
            self.updates.update()
        for rank, worker in self._workers.items():
            if worker.is_held and not self._is_ahead(worker):
                worker.is_held = False
                if self.order is not None:
                    self.order.resume(rank)
        self.changed.notify_all()

    def _wait(self, is_so: Callable[[], bool]) -> None:
        """Wait until a condition is true."""
        while not is_so():
            left = self._progress_at + self.timeout_seconds - time.monotonic()
            if left <= 0:
                self._give_up()
            else:
                self.changed.wait(left)
            self._check()

    def _give_up(self) -> None:
        """Remove the training worker that has been silent for the longest time."""
        absent = set(range(self.num_workers)) - self._workers.keys()
        if not self._has_begun:
            return self._fail(min(absent))
        if self.order is not None and self.order.abandon(absent):
            return self._note_progress()
        training = [rank for rank, worker in self._workers.items() if not worker.is_done]
        self._lose(min(training, key=lambda rank: self._workers[rank].heard_at))

    def _lose(self, rank: int) -> None:
        if not self._has_begun or rank == SERVER_RANK:
            self._fail(rank)
        elif (worker := self._workers.pop(rank, None)) is not None:
            self.lost_shards.extend(worker.shards)
            if self.order is not None:
                self.order.lose(rank)
            self._note_progress()

    def _fail(self, rank: int) -> None:
        if self._failed_rank == NO_RANK:
            self._failed_rank = rank
        self.changed.notify_all()
