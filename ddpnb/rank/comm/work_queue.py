"""How do processes that share memory hand out work, count updates and notice deaths?  (Rank side.)

One file of numbers, which all of them map.  What must not be torn apart, or must be seen in
order on any processor, is done under a lock.  A worker also holds a lock of its own for as long
as it lives: the operating system lifts both when their holder dies, whatever children it leaves.
"""

import contextlib
import fcntl
import mmap
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from enum import IntEnum
from pathlib import Path
from typing import final

from ddpnb.rank.cancellation import CancellationToken
from ddpnb.rank.comm.messages import NOBODY, RankLostError
from ddpnb.rank.comm.packed_tensors import create_shared

_NEXT_SHARE, _NUM_UPDATES, _FAILED_RANK, _FIRST_RANK = range(4)
_WORD_BYTES = 8
_POLL_SECONDS = 0.002
_LOOK_SECONDS = 0.5
"""How often a worker that trains looks whether it is still needed."""


class WorkerState(IntEnum):
    """How far a worker is."""

    NOT_HERE = 0
    TRAINING = 1
    DONE = 2
    GONE = 3
    """Dead, or silent for too long."""


WorkerStates = list[WorkerState]
"""How far each rank is."""


@final
class WorkQueue:
    """The numbers of one run, as one of its workers reads and writes them.

    Nobody waits for anybody but to begin and to end.

    Args:
        path: the file that ``create`` made.
        rank: this worker.
        world_size: number of ranks.
        num_shares: shares to hand out, in order, to whoever asks next.
        timeout_seconds: how long it may be that no worker at all makes progress.
        lifeline: frees this worker from waiting.
    """

    def __init__(
        self,
        path: Path,
        *,
        rank: int,
        world_size: int,
        num_shards: int,
        timeout_seconds: float,
        cancellation: CancellationToken,
    ) -> None:
        self._rank = rank
        self._ranks = range(world_size)
        self._num_shards = num_shards
        self._timeout = timeout_seconds
        self._cancellation = cancellation
        self._taken: deque[int] = deque()
        """Shares that are this worker's, the one it trains on first."""
        self._looked_at = time.monotonic()
        self._is_in = False
        self._descriptor = os.open(path, os.O_RDWR)
        self._map = mmap.mmap(self._descriptor, _size(world_size, num_shards))
        words, view = (_FIRST_RANK + world_size) * _WORD_BYTES, memoryview(self._map)
        self._words, self._is_out = view[:words].cast("q"), view[words:]

    @staticmethod
    def create(path: Path, *, world_size: int, num_shards: int) -> None:
        """Make the file."""
        create_shared(path, _size(world_size, num_shards))

    def enter(self, absent: Callable[[], int] | None = None) -> None:
        """Note that this worker is here and lives, and wait for all others.

        Args:
            absent: returns which rank has failed before it came, or ``NOBODY``; None: this worker
                joins those that train already, and waits for nobody.
        """
        fcntl.lockf(self._descriptor, fcntl.LOCK_EX, 1, 1 + self._rank)
        self._stand(self._rank, WorkerState.TRAINING)
        self._is_in = True
        if absent is not None:
            self._wait(lambda at: WorkerState.NOT_HERE not in at, absent)

    def take(self) -> int | None:
        """Return the number of the next share; None: there is none."""
        with self._locked():
            shard = self._words[_NEXT_SHARE]
            if shard == self._num_shards:
                return None
            self._words[_NEXT_SHARE] = shard + 1
            self._is_out[shard] = True
        self._taken.append(shard)
        return shard

    def settle(self) -> None:
        """Note that this worker has trained on the first share that it took."""
        self._is_out[self._taken.popleft()] = False

    def count_update(self) -> int:
        """Count an update; return how many there are now."""
        with self._locked():
            self._words[_NUM_UPDATES] += 1
            return self._words[_NUM_UPDATES]

    @property
    def num_updates(self) -> int:
        """Updates by all workers so far."""
        return self._words[_NUM_UPDATES]

    def living(self) -> list[int]:
        """Return who has come and is not known to have died: nobody looks for it now."""
        dead = (WorkerState.NOT_HERE, WorkerState.GONE)
        return [rank for rank in self._ranks if self._words[_FIRST_RANK + rank] not in dead]

    def lost_shards(self) -> list[int]:
        """Return what was handed out and has never been trained on nor given back."""
        with self._locked():
            return [shard for shard, is_out in enumerate(self._is_out) if is_out]

    def check(self) -> None:
        """Raise where the run is over, or goes on without this worker."""
        if (failed := self._words[_FAILED_RANK] - 1) != NOBODY:
            raise RankLostError(failed)
        self._cancellation.check()
        if time.monotonic() - self._looked_at > _LOOK_SECONDS:
            self._looked_at = time.monotonic()
            self._check_needed()

    def part(self, sum_up: Callable[[], None] | None = None) -> None:
        """Wait until all are done; takes part: every living rank.

        Args:
            sum_up: called by rank 0 when all others are done, before any of them goes on.
        """
        while self._taken:  # stopped: nobody trained on it, nobody died
            self.settle()
        if sum_up is not None and self._rank == 0:
            self._wait(lambda at: WorkerState.TRAINING not in at[1:])
            sum_up()
            self._check_needed()
        self._stand(self._rank, WorkerState.DONE)
        self._wait(lambda at: WorkerState.TRAINING not in at)
        self._check_needed()
        self._is_in = False

    def close(self) -> None:
        """Say that this worker failed, if it has not parted; may be called twice."""
        if self._map.closed:
            return
        if self._is_in:
            with self._locked():
                self._words[_FAILED_RANK] = self._words[_FAILED_RANK] or self._rank + 1
        self._words.release()
        self._is_out.release()
        self._map.close()
        os.close(self._descriptor)

    def _states(self) -> WorkerStates:
        """Return how far all are; find out who has died."""
        with self._locked():
            for rank in self._ranks:
                is_training = self._words[_FIRST_RANK + rank] == WorkerState.TRAINING
                if is_training and not self._is_alive(rank):
                    self._words[_FIRST_RANK + rank] = WorkerState.GONE
            return [WorkerState(self._words[_FIRST_RANK + rank]) for rank in self._ranks]

    def _stand(self, rank: int, state: WorkerState) -> None:
        with self._locked():
            self._words[_FIRST_RANK + rank] = state

    def _check_needed(self) -> None:
        """Raise where rank 0 has died, or where this worker was given up."""
        states = self._states()
        for needed in (0, self._rank):
            if states[needed] is WorkerState.GONE:
                raise RankLostError(needed)

    def _wait(
        self, is_so: Callable[[WorkerStates], bool], absent: Callable[[], int] = lambda: NOBODY
    ) -> None:
        """Wait for other workers; those without whom nothing moves are given up."""
        seen, progress_at = self._progress(), time.monotonic()
        while not is_so(states := self._states()):
            self.check()
            if (rank := absent()) != NOBODY:
                raise RankLostError(rank)
            if (now := self._progress()) != seen:  # else the standings are no older
                seen, progress_at = now, time.monotonic()
            elif time.monotonic() - progress_at > self._timeout:
                self._give_up(states)
            time.sleep(_POLL_SECONDS)

    def _progress(self) -> tuple[int, list[int]]:
        """Return what changes as long as there is no need to give anybody up."""
        return self.num_updates, self.living()

    def _give_up(self, states: WorkerStates) -> None:
        """Count who still trains as dead; rank 0, which may wait for the others, last of all."""
        if WorkerState.NOT_HERE in states:
            raise RankLostError(states.index(WorkerState.NOT_HERE))
        silent = [r for r in self._ranks if states[r] is WorkerState.TRAINING and r != self._rank]
        for rank in [rank for rank in silent if rank != 0] or silent:
            self._stand(rank, WorkerState.GONE)

    def _is_alive(self, rank: int) -> bool:
        """Return whether a worker still holds its own lock."""
        if rank == self._rank:
            return True
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 1 + rank)
        except (BlockingIOError, PermissionError):  # which of them, depends on the system
            return True
        fcntl.lockf(self._descriptor, fcntl.LOCK_UN, 1, 1 + rank)
        return False

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        fcntl.lockf(self._descriptor, fcntl.LOCK_EX, 1, 0)
        try:
            yield
        finally:
            fcntl.lockf(self._descriptor, fcntl.LOCK_UN, 1, 0)


def _size(world_size: int, num_shards: int) -> int:
    return (_FIRST_RANK + world_size) * _WORD_BYTES + num_shards
