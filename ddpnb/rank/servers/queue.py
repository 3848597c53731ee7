"""Which worker trains on which shard, and who is still there: one queue for all (rank 0).

Asynchronous workers wait for each other only to begin, to end, and where a bound holds back the
fastest.  Each worker's requests block until it may go on.  Rank 0's own worker makes them directly;
for each worker of another rank, a thread does, at the end of its connection.  Tensors travel
beside requests and replies.

A worker that dies, or is silent for too long, costs the shards that it holds, and may come back.
One that fails ends the run for all, and so does the end of rank 0.
"""

import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from enum import IntEnum
from typing import NamedTuple, final

from ddpnb.rank.cancellation import RankLostError
from ddpnb.rank.laboratory.order import SERVER_RANK, VirtualOrder
from ddpnb.rank.servers.memory import Gradients

NO_BOUND = -1
NO_RANK = -1
REQUEST, REPLY = struct.Struct("<qd"), struct.Struct("<qqqqqdqd")
"""A request's kind and weight, and the fields of ``Reply``, as bytes."""


class RequestKind(IntEnum):
    """What a worker requests."""

    BEGIN = 1
    """The first shards and parameters, once all workers have arrived."""
    STEP = 2
    """The next shard and parameters, in exchange for a gradient or an update."""
    DONE = 3
    """The final parameters, once all workers have made their last step."""
    FAIL = 4
    """Nothing, not even a reply: the worker has failed."""


class Reply(NamedTuple):
    """The reply, without the parameters."""

    staleness: int = 0
    """Updates by others between this worker's read and its write."""
    version: int = 0
    """The number of the update that it goes into."""
    first_shard: int = 0
    num_shards: int = 0
    stride: int = 1
    """Numbers of the next shards: this many, this far apart; none at the end."""
    waited_seconds: float = 0.0
    """How long the reply had to wait for other workers."""
    lost_rank: int = NO_RANK
    """The lost rank that ended the run; then there are no parameters."""
    now: float = 0.0
    """The virtual time at which an emulated worker has the reply."""

    @property
    def shards(self) -> range:
        """Numbers of the shards to train on, after those handed out before."""
        end = self.first_shard + self.num_shards * self.stride
        return range(self.first_shard, end, self.stride)


class UpdateCounter:
    """Counts the updates that workers make themselves, in the one copy that they share.

    The queue calls it under its lock.
    """

    def __init__(self) -> None:
        self.version = 0
        """Updates so far."""
        self._version_read: dict[int, int] = {}

    def read(self, rank: int) -> None:
        """Give a worker the parameters as they are now; note their updates so far."""
        self._version_read[rank] = self.version

    def write(self, rank: int, gradients: Gradients, weight: float) -> int:
        """Count an update; return how many others were made since the worker's last read."""
        staleness = self.version - self._version_read[rank]
        self.version += 1
        return staleness

    def apply(self) -> None:
        """Make an update with the gradients that have come since the last one, if any."""


@dataclass(slots=True)
class _Worker:
    """A living worker."""

    incarnation: object
    clock: int
    """Number of steps that it has made."""
    shards: deque[int]
    """What it holds and has not trained on, in order."""
    heard_at: float = field(default_factory=time.monotonic)
    is_done: bool = False
    """Whether it has made its last step."""
    is_leaving: bool = False
    """Whether it waits for the final parameters."""
    is_held: bool = False
    """Whether the bound holds it back."""


@final
@dataclass(eq=False)
class WorkQueue:
    """Hands out shards, in order, to the next worker that asks, until all workers are done."""

    updates: UpdateCounter
    """What workers read and write."""
    _: KW_ONLY
    num_workers: int
    """Ranks 0, 1, 2 ... that begin together."""
    num_shards: int
    """Shards to hand out."""
    timeout_seconds: float
    """How long it may be that no worker at all makes progress."""
    num_prefetched: int = 0
    """Shards that a worker holds besides the one that it trains on."""
    bound: int = NO_BOUND
    """Steps that a worker may be ahead of the slowest; ``NO_BOUND``: any number.

    At 0 one update is made of a whole round.
    """
    order: VirtualOrder | None = None
    """Of the requests of emulated workers; None: as they come."""

    def __post_init__(self) -> None:
        self.error: Exception | None = None
        """What went wrong in a thread of this rank, if anything did."""
        self.lost_shards: list[int] = []
        """What lost workers held."""
        self.num_shards_done = 0
        """Shards that workers had trained on when rank 0's own worker last read the parameters."""
        self._num_trained = 0
        """Shards that workers have trained on."""
        num_first, every = self.num_workers * (1 + self.num_prefetched), range(self.num_shards)
        self._first, self._shards = every[:num_first], every[num_first:]
        """What those who begin together are handed out, whole batches; and the rest, in order."""
        self._changed = threading.Condition()
        """Held while ``updates`` are called."""
        self._workers: dict[int, _Worker] = {}
        self._has_begun = False
        self._failed_rank = NO_RANK
        self._progress_at = time.monotonic()

    def handle(
        self,
        rank: int,
        kind: RequestKind,
        weight: float = 0.0,
        gradients: Gradients = (),
        incarnation: object = None,
    ) -> Reply:
        """Carry out a request; an error in it ends the run for all, and rank 0 raises it.

        A step has the worker's share of the global batch as its weight, and gradients of the mean
        loss; none where the worker has made the update itself.  The incarnation distinguishes its
        process from one that has died.
        """
        asked_at = self._time()
        try:
            with self._changed:
                if kind is RequestKind.BEGIN:
                    return self._begin(rank, incarnation)
                worker = self._living(rank, incarnation)
                if kind is RequestKind.DONE:
                    return self._finish(rank, worker)
                waited_seconds = 0.0 if self.order else self._time() - asked_at
                self._take_turn(rank, worker)
                version = self.updates.version + 1
                staleness = self.updates.write(rank, gradients, weight)
                waited_seconds += self._step(rank, worker)
                shards = self._take(1)
                worker.shards.extend(shards)
                return self._reply(rank, shards, staleness, version, waited_seconds)
        except RankLostError as lost:  # the run is over, or goes on without this worker
            return Reply(lost_rank=lost.rank)
        except Exception as error:  # noqa: BLE001  # the thread's edge
            self.fail(SERVER_RANK, error)
            return Reply(lost_rank=SERVER_RANK)

    def lose(self, rank: int, incarnation: object = None) -> Reply:
        """Note that a worker has died: the others go on; return a reply, should it be alive."""
        with self._changed:
            worker = self._workers.get(rank)
            if worker is None or worker.incarnation is incarnation:  # else it is replaced already
                self._lose(rank)
            return Reply(lost_rank=rank if self._failed_rank == NO_RANK else self._failed_rank)

    def fail(self, rank: int, error: Exception | None = None) -> None:
        """End the run for all: a worker has failed, or this rank has."""
        with self._changed:
            self._fail(rank)
            self.error = self.error or error

    def _time(self) -> float:
        return time.perf_counter() if self.order is None else self.order.now

    # From here on: under the lock.

    def _begin(self, rank: int, incarnation: object) -> Reply:
        """Wait for all workers.  A worker that comes later joins, at the clock of the slowest."""
        self._check()
        if rank in self._workers:  # its death has not been noticed yet
            self._lose(rank)
        joins = self._has_begun
        if joins:
            self._take_turn(rank, None)
            shards = self._take(1 + self.num_prefetched)
        else:
            shards = self._first[rank :: self.num_workers]
        self._workers[rank] = _Worker(incarnation, self._slowest_clock(), deque(shards))
        self._has_begun = self._has_begun or len(self._workers) == self.num_workers
        self._note_progress()
        self._wait(lambda: self._has_begun)
        self._living(rank, incarnation)
        return self._reply(rank, shards, is_first=not joins)

    def _take_turn(self, rank: int, worker: _Worker | None) -> None:
        """Wait until no emulated worker's request comes earlier in virtual time."""
        order = self.order
        if order is None:
            return
        self._wait(lambda: order.is_next(rank) or self._workers.get(rank) is not worker)
        if worker is not None:
            self._living(rank, worker.incarnation)
        order.arrive(rank)

    def _step(self, rank: int, worker: _Worker) -> float:
        """Note a step; wait as long as the bound demands, and return for how many seconds."""
        worker.clock += 1
        if worker.shards:  # a step may be made on a shard that was not handed out
            worker.shards.popleft()
            self._num_trained += 1
        worker.heard_at = self._progress_at = time.monotonic()
        if self.bound == NO_BOUND:  # no worker waits for this one
            return 0.0
        self._note_progress()
        began = self._time()
        was_held = worker.is_held = self._is_ahead(worker)
        self._wait(lambda: not self._is_ahead(worker) or self._workers.get(rank) is not worker)
        self._living(rank, worker.incarnation)  # it may have died in its wait
        if was_held:
            self._take_turn(rank, worker)
        return self._time() - began

    def _is_ahead(self, worker: _Worker) -> bool:
        return worker.clock - self._slowest_clock() > self.bound

    def _finish(self, rank: int, worker: _Worker) -> Reply:
        """Wait until all workers are done; what a stopped worker still holds is not lost."""
        worker.is_leaving = True
        worker.shards.clear()
        self._note_done(rank, worker)
        self._wait(lambda: all(each.is_leaving for each in self._workers.values()))
        self.updates.apply()
        self.updates.read(rank)
        return Reply(now=self.order.now if self.order else 0.0)

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
            raise RankLostError(rank)  # given up though alive, or replaced
        return worker

    def _take(self, most: int) -> range:
        shards, self._shards = self._shards[:most], self._shards[most:]
        return shards

    def _reply(
        self,
        rank: int,
        shards: range,
        staleness: int = 0,
        version: int = 0,
        waited_seconds: float = 0.0,
        *,
        is_first: bool = False,
    ) -> Reply:
        self.updates.read(rank)
        now, worker = 0.0, self._workers[rank]
        if rank == SERVER_RANK:
            self.num_shards_done = self._num_trained
        if self.order is not None:
            num = worker.shards[0] if worker.shards else None
            now = self.order.reply(rank, num, is_first=is_first)
            self._changed.notify_all()
            if num is None:  # known here and now: the request that says so may come at any time
                self._note_done(rank, worker)
        parts = shards.start, len(shards), shards.step
        return Reply(staleness, version, *parts, waited_seconds, now=now)

    def _slowest_clock(self) -> int:
        """Return the clock of the slowest worker that still trains."""
        return min(self._training_clocks(), default=0)

    def _training_clocks(self) -> list[int]:
        return [worker.clock for worker in self._workers.values() if not worker.is_done]

    def _note_progress(self) -> None:
        """Wake the workers that may go on now; at bound 0, make the update of a full round."""
        self._progress_at = time.monotonic()
        if self.bound == 0 and len(set(self._training_clocks())) < 2:
            self.updates.apply()
        for rank, worker in self._workers.items():
            if worker.is_held and not self._is_ahead(worker):
                worker.is_held = False
                if self.order is not None:
                    self.order.resume(rank)
        self._changed.notify_all()

    def _wait(self, is_so: Callable[[], bool]) -> None:
        """Wait until a condition holds."""
        while not is_so():
            left = self._progress_at + self.timeout_seconds - time.monotonic()
            if left <= 0:
                self._give_up()
            else:
                self._changed.wait(left)
            self._check()

    def _give_up(self) -> None:
        """Lose the one of the workers that train that has been silent for longest."""
        if not self._has_begun:
            self._fail(min(set(range(self.num_workers)) - self._workers.keys()))
            return
        absent = set(range(self.num_workers)) - self._workers.keys()
        if self.order is not None and self.order.abandon(absent):
            self._note_progress()
            return
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
        self._changed.notify_all()
