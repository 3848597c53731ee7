"""The parameter server: when workers may go on, and with what (rank 0).

Each worker's requests block until it may go on.  Rank 0's own worker makes them directly; for
each worker of another rank, a thread of a transport does.  Requests and replies are a few numbers
of fixed size, never a pickle; tensors travel beside them.
"""

import contextlib
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, NamedTuple

from torch import Tensor

from ddpnb.rank.comm.parameter_store import ParameterStore
from ddpnb.rank.comm.rendezvous import NO_RANK, RankLostError

Gradients = Sequence[Tensor | None]
"""One for each parameter; None: none."""

SERVER_RANK = 0
NO_BOUND = -1
_POLL_SECONDS = 0.1
"""How often a wait checks for failures and deaths that no transport reports."""
REQUEST, REPLY = struct.Struct("<qd"), struct.Struct("<qqqqdqq?")
"""The fields of ``WorkerRequest`` and ``Reply`` as bytes."""


class RequestKind(IntEnum):
    """What a worker requests."""

    BEGIN = 1
    """The first parameters and shards, once all workers have arrived."""
    PUSH = 2
    """The next parameters and shard, in exchange for a gradient."""
    DONE = 3
    """The final parameters: the worker has made its last step."""
    LEAVE = 4
    """Nothing: the worker has the final parameters, or has failed."""


class WorkerRequest(NamedTuple):
    """A worker's request, without its tensors."""

    kind: RequestKind
    weight: float = 0.0
    """Of the pushed gradient: the worker's share of the global batch."""


class Reply(NamedTuple):
    """The server's reply, without the parameters."""

    staleness: int = 0
    """Updates by others between this worker's pull and the use of its gradient."""
    first_shard: int = 0
    num_shards: int = 0
    stride: int = 1
    """Numbers of the next shards: this many, this far apart; none at the end."""
    waited_seconds: float = 0.0
    """How long the reply had to wait for other workers."""
    lost_rank: int = NO_RANK
    """The lost rank that ended the run; then there are no parameters."""
    copy: int = 0
    """The copy of the parameters to train on, for a worker that shares the server's memory."""
    is_complete: bool = True
    """Whether no worker has been lost so far."""

    @property
    def shards(self) -> range:
        """Numbers of the shards to train on, after those handed out before."""
        end = self.first_shard + self.num_shards * self.stride
        return range(self.first_shard, end, self.stride)


@dataclass(slots=True, kw_only=True)
class _Worker:
    """A living worker."""

    incarnation: object
    clock: int
    """Number of shards that it has pushed the gradients of."""
    first_shards: range = range(0)
    """What it was handed out at the start."""
    shards: deque[int] = field(default_factory=deque)
    """What it holds and has not trained on, in order."""
    heard_at: float = field(default_factory=time.monotonic)
    is_done: bool = False


class ParameterServer:
    """Hands out parameters and shards, and takes gradients, until all workers are done.

    A worker that dies, or is silent for too long, costs the shards it holds.  One that fails ends
    the run for all, and so does the end of rank 0.

    Args:
        store: the parameters.
        num_workers: ranks 0, 1, 2 ... that begin together.
        num_shards: shards to hand out, in order, to the next worker that asks.
        num_prefetched: shards that a worker holds besides the one that it trains on.
        bound: steps that a worker may be ahead of the slowest; ``NO_BOUND``: any number.
            At 0 one update is made of a whole round.
        timeout_seconds: how long it may be that no worker at all makes progress.
    """

    def __init__(
        self,
        *,
        store: ParameterStore,
        num_workers: int,
        num_shards: int,
        timeout_seconds: float,
        num_prefetched: int = 0,
        bound: int = NO_BOUND,
    ) -> None:
        self.store = store
        self.error: Exception | None = None
        """What went wrong in a thread of this rank, if anything did."""
        self.find_dead_ranks: Callable[[], Sequence[int]] = lambda: ()
        """Returns dead workers, for a transport that does not notice them."""
        self.find_failed_rank: Callable[[], int] = lambda: NO_RANK
        """Returns a rank that failed before the run began, or ``NO_RANK``."""
        self.lost_shards: list[int] = []
        """What lost workers held."""
        self._num_workers = num_workers
        self._num_shards = num_shards
        self._shards = range(num_shards)
        """What has not been handed out."""
        self._num_prefetched = num_prefetched
        self._bound = bound
        self._timeout = timeout_seconds
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._workers: dict[int, _Worker] = {}
        self._has_begun = False
        self._is_rehearsal = False
        """Whether no gradient stands for a shard."""
        self._is_complete = True
        """Whether no worker has been lost."""
        self._failed_rank = NO_RANK
        self._progress_at = time.monotonic()

    def handle(
        self,
        rank: int,
        request: WorkerRequest,
        gradients: Gradients = (),
        incarnation: object = None,
    ) -> Reply:
        """Carry out a request; an error in it ends the run for all, and rank 0 raises it.

        Args:
            rank: of the worker.
            request: what it asks for.
            gradients: with a push.
            incarnation: here and below: distinguishes its process from one that has died.
        """
        try:
            match request.kind:
                case RequestKind.BEGIN:
                    return self.begin(rank, incarnation)
                case RequestKind.PUSH:
                    return self.push(rank, gradients, request.weight, incarnation)
                case RequestKind.DONE:
                    return self.finish(rank, incarnation)
                case RequestKind.LEAVE:
                    return self.leave(rank)
        except RankLostError as lost:
            return Reply(lost_rank=lost.rank)
        except Exception as error:  # noqa: BLE001  # the thread's edge
            self.fail(SERVER_RANK, error)
            return Reply(lost_rank=SERVER_RANK)

    def begin(self, rank: int, incarnation: object = None) -> Reply:
        """Wait for all workers; return the first parameters and shards.

        A worker that comes later joins, at the clock of the slowest.

        Raises:
            RankLostError: here and below: the run is over, or goes on without this worker.
        """
        with self._lock:
            self._check()
            if rank in self._workers:  # its death has not been noticed yet
                self._lose(rank)
            self._workers[rank] = _Worker(incarnation=incarnation, clock=self._slowest_clock())
            if not self._has_begun and len(self._workers) == self._num_workers:
                self._has_begun = True
                self._hand_out_first_shards()
            self._note_progress()
            self._wait(lambda: self._has_begun)
            worker = self._living(rank, incarnation)
            shards = worker.first_shards or self._take(1 + self._num_prefetched)
            return self._reply(rank, worker, shards)

    def push(
        self,
        rank: int,
        gradients: Gradients,
        weight: float = 1.0,
        incarnation: object = None,
    ) -> Reply:
        """Take gradients; return parameters and the next shard as soon as the bound allows.

        Args:
            rank: of the worker.
            gradients: of its mean loss.
            weight: its share of the global batch.
            incarnation: as above.
        """
        asked_at = time.perf_counter()
        with self._lock:
            waited_seconds = time.perf_counter() - asked_at
            worker = self._living(rank, incarnation)
            staleness = self.store.write(rank, gradients, weight)
            worker.clock += 1
            if not self._is_rehearsal:
                worker.shards.popleft()
            worker.heard_at = self._progress_at = time.monotonic()
            if self._bound != NO_BOUND:  # else no worker waits for this
                self._note_progress()
                waited_seconds += self._wait(lambda: self._is_within_bound(rank, worker))
                self._living(rank, incarnation)  # it may have died in its wait
            shards = self._take(0 if self._is_rehearsal else 1)
            return self._reply(rank, worker, shards, staleness, waited_seconds)

    def finish(self, rank: int, incarnation: object = None) -> Reply:
        """Wait until all workers are done; return the final parameters."""
        with self._lock:
            worker = self._living(rank, incarnation)
            self.store.release(rank)
            worker.is_done = True
            worker.shards.clear()
            self._note_progress()
            waited_seconds = self._wait(lambda: not self._training_clocks())
            self.store.apply()
            return Reply(
                waited_seconds=waited_seconds,
                copy=self.store.read(rank),
                is_complete=self._is_complete,
            )

    @contextlib.contextmanager
    def rehearsal(self) -> Iterator[None]:
        """Take gradients without handing out shards; in the end nothing has happened.

        All workers have begun, and each makes as many steps in it.
        """
        initial = self.store.tensors_packed().clone()
        self._is_rehearsal = True
        yield
        with self._lock:
            self._is_rehearsal = False
            for worker in self._workers.values():
                worker.clock = 0
            self.store.rewind(initial)

    def parameters(self, reply: Reply) -> Tensor:
        """Return a reply's parameters, packed; they stay until that worker's next request."""
        return self.store.copies[reply.copy].raw

    def snapshot(self) -> tuple[list[Tensor], dict[str, Any]]:
        """Return copies of the parameters and of the optimizer's state, between two updates."""
        with self._lock:
            return self.store.snapshot()

    def copied_parameters(self) -> list[Tensor]:
        """Return copies of the parameters alone, between two updates."""
        with self._lock:
            return [tensor.clone() for tensor in self.store.tensors]

    @property
    def num_shards_done(self) -> int:
        """Shards with gradients that have come."""
        with self._lock:
            held = sum(len(worker.shards) for worker in self._workers.values())
            return self._num_shards - len(self._shards) - held - len(self.lost_shards)

    def leave(self, rank: int) -> Reply:
        """Note that a worker has the final parameters; one that is not done has failed."""
        with self._lock:
            worker = self._workers.get(rank)
            if worker is not None and worker.is_done:
                del self._workers[rank]
                self._changed.notify_all()
            else:
                self._fail(rank)
            return Reply()

    def wait_until_all_have_left(self) -> bool:
        """Wait until every living worker of another rank has left; return whether none was lost."""
        with self._lock:
            self._wait(lambda: self._workers.keys() <= {SERVER_RANK})
            return self._is_complete

    def lose(self, rank: int, incarnation: object = None) -> Reply:
        """Note that a worker's process has died: the others go on without it.

        Returns:
            The reply to a worker that is alive and no longer served.
        """
        with self._lock:
            worker = self._workers.get(rank)
            if worker is None or worker.incarnation is incarnation:  # else it is replaced already
                self._lose(rank)
            return Reply(lost_rank=rank if self._failed_rank == NO_RANK else self._failed_rank)

    def fail(self, rank: int, error: Exception | None = None) -> None:
        """End the run for all: a worker has failed, or the server itself has."""
        with self._lock:
            self._fail(rank)
            self.error = self.error or error

    # From here on: under the lock.

    def _check(self) -> None:
        if self._failed_rank != NO_RANK:
            raise RankLostError(self._failed_rank)

    def _living(self, rank: int, incarnation: object) -> _Worker:
        self._check()
        worker = self._workers.get(rank)
        if worker is None or worker.incarnation is not incarnation:
            raise RankLostError(rank)  # given up though alive, or replaced
        return worker

    def _hand_out_first_shards(self) -> None:
        """Hand out the first shards in turns: whole batches, as many as a worker holds."""
        first = self._take(self._num_workers * (1 + self._num_prefetched))
        for number, (_, worker) in enumerate(sorted(self._workers.items())):
            worker.first_shards = first[number :: self._num_workers]

    def _take(self, most: int) -> range:
        shards, self._shards = self._shards[:most], self._shards[most:]
        return shards

    def _reply(
        self,
        rank: int,
        worker: _Worker,
        shards: range,
        staleness: int = 0,
        waited_seconds: float = 0.0,
    ) -> Reply:
        worker.shards.extend(shards)
        parts = shards.start, len(shards), shards.step
        return Reply(staleness, *parts, waited_seconds, copy=self.store.read(rank))

    def _is_within_bound(self, rank: int, worker: _Worker) -> bool:
        """Return whether a worker may go on; a lost one need not wait either."""
        is_lost = self._workers.get(rank) is not worker
        return is_lost or worker.clock - self._slowest_clock() <= self._bound

    def _slowest_clock(self) -> int:
        """Return the clock of the slowest worker that still trains."""
        return min(self._training_clocks(), default=0)

    def _training_clocks(self) -> list[int]:
        return [worker.clock for worker in self._workers.values() if not worker.is_done]

    def _note_progress(self) -> None:
        """Wake the workers that may go on now; at bound 0, make the update of a full round."""
        self._progress_at = time.monotonic()
        if self._bound == 0 and len(set(self._training_clocks())) < 2:
            self.store.apply()
        self._changed.notify_all()

    def _wait(self, is_so: Callable[[], bool]) -> float:
        """Wait until a condition holds; return for how many seconds."""
        began = time.perf_counter()
        while not is_so():
            left = self._progress_at + self._timeout - time.monotonic()
            if left <= 0:
                self._give_up()
            elif not self._has_begun and (failed := self.find_failed_rank()) != NO_RANK:
                self._fail(failed)
            else:
                self._changed.wait(min(left, _POLL_SECONDS))
                for rank in self.find_dead_ranks():
                    self._lose(rank)
            self._check()
        return time.perf_counter() - began

    def _give_up(self) -> None:
        """Lose the one of the awaited workers that has been silent for longest."""
        if not self._has_begun:
            self._fail(min(set(range(self._num_workers)) - self._workers.keys()))
            return
        working = [rank for rank, worker in self._workers.items() if not worker.is_done]
        awaited = working or self._workers.keys() - {SERVER_RANK}  # to finish, or to leave
        self._lose(min(awaited, key=lambda rank: self._workers[rank].heard_at))

    def _lose(self, rank: int) -> None:
        if not self._has_begun or rank == SERVER_RANK:
            self._fail(rank)
        elif (worker := self._workers.pop(rank, None)) is not None:
            self._is_complete = False
            self.store.release(rank)
            self.lost_shards.extend(worker.shards)
            self._note_progress()

    def _fail(self, rank: int) -> None:
        if self._failed_rank == NO_RANK:
            self._failed_rank = rank
        self._changed.notify_all()
