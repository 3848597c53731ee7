"""Who may go on, with which parameters, on which share?  (Rank 0, a thread for each worker.)

Each worker's calls block until it may go on.  Rank 0's own worker calls directly; those of
the other ranks are called for by the threads of a transport.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ddpnb.rank.comm.messages import NOBODY, RankLostError, Reply
from ddpnb.rank.comm.parameter_store import ParameterStore

SERVER_RANK = 0
NO_BOUND = -1
_LOOK_SECONDS = 0.1
"""How often a wait looks for failures and deaths that nobody reports."""


@dataclass(slots=True, kw_only=True)
class _Worker:
    """What the server knows of one living worker."""

    life: object
    """Which of the rank's processes it is: one that is started anew has another."""
    clock: int
    """Shares whose gradients have arrived."""
    dealt: range = range(0)
    """What it was dealt when all began."""
    shards: deque[int] = field(default_factory=deque)
    """What it has been handed out and not trained on, in order."""
    heard_at: float = field(default_factory=time.monotonic)
    is_done: bool = False


class Server:
    """Hands out parameters and shares, and takes gradients, until all workers are done.

    A worker that dies, or is silent for too long, costs its own share; one that failed ends
    the run for all, and so does the end of rank 0.

    Args:
        master: the parameters.
        num_workers: ranks 0, 1, 2 ... that begin together.
        num_shares: shares to hand out, in order, to whoever asks next.
        num_ahead: how many more a worker has in hand than the one that it trains on.
        bound: steps that a worker may be ahead of the slowest; ``NO_BOUND``: any number.
            At 0 the updates are made for whole rounds.
        timeout_seconds: how long it may be that no worker at all makes progress.
        absent: tells which rank has failed before it came, or ``NOBODY``.
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
        absent: Callable[[], int] = lambda: NOBODY,
    ) -> None:
        self.store = store
        self.error: Exception | None = None
        """What went wrong in a thread of this rank, if anything did."""
        self.dead: Callable[[], Sequence[int]] = lambda: ()
        """Returns the workers that have died, where the transport does not notice it."""
        self.lost_shards: list[int] = []
        """What was handed out to workers that are lost."""
        self._num_workers = num_workers
        self._shards = range(num_shards)
        """What has not been handed out."""
        self._num_prefetched = num_prefetched
        self._bound = bound
        self._timeout = timeout_seconds
        self._absent = absent
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._workers: dict[int, _Worker] = {}
        self._has_begun = False
        self._is_complete = True
        """Whether no worker has been lost."""
        self._failed_rank = NOBODY
        self._progress_at = time.monotonic()

    def begin(self, rank: int, life: object = None) -> Reply:
        """Wait until all workers are there; give the first parameters and share.

        Who comes later joins, at the clock of the slowest.

        Args:
            rank: the worker.
            life: by this and the following: what tells its process from one that has died.

        Raises:
            RankLostError: by this and the following: the run is over, or goes on without
                this worker.
        """
        with self._lock:
            self._check()
            if rank in self._workers:  # its death has not been noticed yet
                self._lose(rank)
            self._workers[rank] = _Worker(life=life, clock=self._slowest())
            if not self._has_begun and len(self._workers) == self._num_workers:
                self._has_begun = True
                self._deal()
            self._note_progress()
            self._wait(lambda: self._has_begun)
            worker = self._living(rank, life)
            return self._answer(rank, worker, worker.dealt or self._take(1 + self._num_prefetched))

    def push(
        self,
        rank: int,
        gradients: Sequence[Tensor | None],
        weight: float = 1.0,
        life: object = None,
    ) -> Reply:
        """Take gradients; give parameters and the next share as soon as the bound allows.

        Args:
            rank: the worker.
            gradients: of its mean loss, one for each parameter; None: none.
            weight: its share of the global batch.
            life: its process.
        """
        asked = time.perf_counter()
        with self._lock:
            waited_seconds = time.perf_counter() - asked
            self._check()
            worker = self._living(rank, life)
            staleness = self.store.write(rank, gradients, weight)
            worker.clock += 1
            worker.shards.popleft()
            worker.heard_at = self._progress_at = time.monotonic()
            if self._bound != NO_BOUND:  # else nobody waits for this
                self._note_progress()
                waited_seconds += self._wait(
                    lambda: (
                        worker.clock - self._slowest() <= self._bound
                        or self._workers.get(rank) is not worker
                    )
                )
                self._living(rank, life)  # it may have died in its wait
            return self._answer(rank, worker, self._take(1), staleness, waited_seconds)

    def finish(self, rank: int, life: object = None) -> Reply:
        """Wait until all workers are done; give the final parameters."""
        with self._lock:
            self._check()
            worker = self._living(rank, life)
            self.store.leave(rank)
            worker.is_done = True
            worker.shards.clear()
            self._note_progress()
            waited_seconds = self._wait(self._all_are_done)
            self.store.apply()
            return Reply(
                waited_seconds=waited_seconds,
                copy=self.store.read(rank),
                is_complete=self._is_complete,
            )

    def parameters(self, reply: Reply) -> Tensor:
        """Return the parameters of an answer, packed; they stay until that worker asks again."""
        return self.store.copies[reply.copy].raw

    def snapshot(self) -> tuple[list[Tensor], dict[str, Any]]:
        """Return copies of the parameters and of the optimizer's state, between two updates."""
        with self._changed:
            return self.store.snapshot()

    def leave(self, rank: int) -> Reply:
        """Note that a worker has the final parameters; one that has not has failed."""
        with self._lock:
            worker = self._workers.get(rank)
            if worker is not None and worker.is_done:
                del self._workers[rank]
                self._changed.notify_all()
            else:
                self._fail(rank)
            return Reply()

    def wait_until_all_have_left(self) -> bool:
        """Wait until every living worker of another rank has left; return whether all lived."""
        with self._lock:
            self._wait(lambda: self._workers.keys() <= {SERVER_RANK})
            return self._is_complete

    def lose(self, rank: int, life: object = None) -> None:
        """Note that a worker's process has died: the others go on without it."""
        with self._lock:
            worker = self._workers.get(rank)
            if worker is None or worker.life is life:  # else another is in its place already
                self._lose(rank)

    def fail(self, rank: int, error: Exception | None = None) -> None:
        """End the run for all: a worker has failed, or the server itself has."""
        with self._lock:
            self._fail(rank)
            self.error = self.error or error

    def reason(self, rank: int) -> int:
        """Return whose loss ends the run for a worker that is no longer served."""
        return rank if self._failed_rank == NOBODY else self._failed_rank

    # From here on: under the lock.

    def _check(self) -> None:
        if self._failed_rank != NOBODY:
            raise RankLostError(self._failed_rank)

    def _living(self, rank: int, life: object) -> _Worker:
        worker = self._workers.get(rank)
        if worker is None or worker.life is not life:
            raise RankLostError(rank)  # given up, but alive after all; or another is in its place
        return worker

    def _deal(self) -> None:
        """Hand out the first shares in turns, as many batches as a worker has in hand."""
        first = self._take(self._num_workers * (1 + self._num_prefetched))
        for place, (_, worker) in enumerate(sorted(self._workers.items())):
            worker.dealt = first[place :: self._num_workers]

    def _take(self, most: int) -> range:
        shards, self._shards = self._shards[:most], self._shards[most:]
        return shards

    def _answer(
        self,
        rank: int,
        worker: _Worker,
        shards: range,
        staleness: int = 0,
        waited_seconds: float = 0.0,
    ) -> Reply:
        worker.shards.extend(shards)
        return Reply(
            staleness=staleness,
            first_shard=shards.start,
            num_shards=len(shards),
            stride=shards.step,
            waited_seconds=waited_seconds,
            copy=self.store.read(rank),
        )

    def _slowest(self) -> int:
        """Return the clock of the slowest worker that still trains."""
        clocks = [worker.clock for worker in self._workers.values() if not worker.is_done]
        return min(clocks, default=0)

    def _all_are_done(self) -> bool:
        return all(worker.is_done for worker in self._workers.values())

    def _note_progress(self) -> None:
        """Wake who may go on now; with a bound of 0, make the update of a full round."""
        self._progress_at = time.monotonic()
        if self._bound == 0:
            clocks = {worker.clock for worker in self._workers.values() if not worker.is_done}
            if len(clocks) < 2:
                self.store.apply()
        self._changed.notify_all()

    def _wait(self, is_so: Callable[[], bool]) -> float:
        """Wait until a condition holds; return for how many seconds."""
        began = time.perf_counter()
        while not is_so():
            left = self._progress_at + self._timeout - time.monotonic()
            if left <= 0:
                self._give_up()
            elif not self._has_begun and (absent := self._absent()) != NOBODY:
                self._fail(absent)
            else:
                self._changed.wait(min(left, _LOOK_SECONDS))
                for rank in self.dead():
                    self._lose(rank)
            self._check()
        return time.perf_counter() - began

    def _give_up(self) -> None:
        """Go on without the worker not heard of for longest, of those waited for."""
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
            self.store.leave(rank)
            self.lost_shards.extend(worker.shards)
            self._note_progress()

    def _fail(self, rank: int) -> None:
        if self._failed_rank == NOBODY:
            self._failed_rank = rank
        self._changed.notify_all()
