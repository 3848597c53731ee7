"""Workers on shared memory, without a server: a work queue, and averages of weights (ranks).

A ``WorkQueue`` is one file of numbers, which all workers map.  Whatever must stay whole, or be seen
in order on any processor, is read and written under a lock.  A worker also holds a lock of its own
for as long as it lives.  ``SharedWeights`` are one copy of the weights for each worker, which are
read and written only under their lock.

A lock is a locked byte of the file: the operating system releases it when its process dies, even if
that process's children live on.
"""

import contextlib
import fcntl
import mmap
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from enum import IntEnum
from pathlib import Path
from typing import final

import torch
from torch import Tensor

from ddpnb.rank.comm.flat_buffers import PackedTensors, create_shared_file
from ddpnb.rank.comm.rendezvous import NO_RANK, RankLostError, RunOverError, WorkerConfig

_NEXT_SHARD, _NUM_UPDATES, _FAILED_RANK, _FIRST_RANK = range(4)
"""The file's numbers; after them the state of each rank, then a byte for each shard."""
_NUMBER_BYTES = 8
_SUFFIX = "q"
_POLL_SECONDS = 0.002
_LOCK_POLL_SECONDS = 0.0001
_CHECK_SECONDS = 0.5
"""How often a worker that trains checks whether it is still part of the run."""


class WorkerState(IntEnum):
    """How far a worker is."""

    ABSENT = 0
    TRAINING = 1
    DONE = 2
    LOST = 3
    """Dead, or silent for too long."""


@final
class WorkQueue:
    """The queue of one run, as one of its workers sees it.

    Workers wait for each other only to begin and to end.

    Args:
        config: of this worker; the timeout is how long it may be that no worker at all makes
            progress.
        num_shards: shards to hand out, in order, to the next worker that asks.
    """

    def __init__(self, config: WorkerConfig, num_shards: int) -> None:
        self._rank = config.rank
        self._ranks = range(config.world_size)
        self._num_shards = num_shards
        self._timeout = config.timeout_seconds
        self._cancellation = config.cancellation
        self._held: deque[int] = deque()
        """Shards that this worker has taken, in the order in which it trains on them."""
        self._checked_at = time.monotonic()
        self._is_rehearsal = False
        self._is_in = False
        self._descriptor = os.open(config.path(_SUFFIX), os.O_RDWR)
        self._map = mmap.mmap(self._descriptor, _num_bytes(config, num_shards))
        num_bytes, memory = _num_bytes(config, 0), memoryview(self._map)
        self._numbers, self._is_out = memory[:num_bytes].cast("q"), memory[num_bytes:]

    @staticmethod
    def create(config: WorkerConfig, num_shards: int) -> Path:
        """Create the file of all workers; return its path."""
        create_shared_file(config.path(_SUFFIX), _num_bytes(config, num_shards))
        return config.path(_SUFFIX)

    def enter(self, find_failed_rank: Callable[[], int] | None = None) -> None:
        """Register this worker, and wait for all others.

        Args:
            find_failed_rank: as in ``Rendezvous``; None: this worker joins a run that has begun,
                and does not wait.
        """
        fcntl.lockf(self._descriptor, fcntl.LOCK_EX, 1, 1 + self._rank)
        self._set_state(self._rank, WorkerState.TRAINING)
        self._is_in = True
        if find_failed_rank is not None:
            self._wait(lambda states: WorkerState.ABSENT not in states, find_failed_rank)

    def take_shard(self) -> int | None:
        """Return the number of the next shard; None: there is none."""
        with self._locked():
            shard = self._numbers[_NEXT_SHARD]
            if shard == self._num_shards:
                return None
            self._numbers[_NEXT_SHARD] = shard + 1
            self._is_out[shard] = True
        self._held.append(shard)
        return shard

    def finish_shard(self) -> None:
        """Note that this worker has trained on the first shard that it holds."""
        if self._is_rehearsal:
            return
        self._is_out[self._held.popleft()] = False

    @contextlib.contextmanager
    def rehearsal(self) -> Iterator[None]:
        """Make steps without shards in this context; in the end no update is counted.

        No worker makes a step before all have entered it, nor after one has left it.
        """
        self._is_rehearsal = True
        yield
        self._is_rehearsal = False
        self._numbers[_NUM_UPDATES] = 0

    def count_update(self) -> int:
        """Count an update; return how many there are now."""
        with self._locked():
            self._numbers[_NUM_UPDATES] += 1
            return self._numbers[_NUM_UPDATES]

    @property
    def num_updates(self) -> int:
        """Updates by all workers so far."""
        return self._numbers[_NUM_UPDATES]

    def living(self) -> list[int]:
        """Return the ranks that have come and are not known to be dead; looks for no new deaths."""
        dead = (WorkerState.ABSENT, WorkerState.LOST)
        return [rank for rank in self._ranks if self._numbers[_FIRST_RANK + rank] not in dead]

    def lost_shards(self) -> list[int]:
        """Return the shards that were taken and neither trained on nor given back."""
        with self._locked():
            return [shard for shard, is_out in enumerate(self._is_out) if is_out]

    def check(self) -> None:
        """Raise where the run is over, or goes on without this worker."""
        if (failed := self._numbers[_FAILED_RANK] - 1) != NO_RANK:
            raise RankLostError(failed)
        self._cancellation.check()
        if time.monotonic() - self._checked_at > _CHECK_SECONDS:
            self._checked_at = time.monotonic()
            self._check_states()

    def leave(self, on_all_done: Callable[[], None] | None = None) -> None:
        """Wait until all are done; takes part: every living rank.

        Args:
            on_all_done: rank 0 calls it when all others are done, before any of them goes on.
        """
        while self._held:  # a stopped run: given back, so that they do not count as lost
            self.finish_shard()
        if on_all_done is not None and self._rank == 0:
            self._wait(lambda states: WorkerState.TRAINING not in states[1:])
            on_all_done()
            self._check_states()
        self._set_state(self._rank, WorkerState.DONE)
        self._wait(lambda states: WorkerState.TRAINING not in states)
        self._check_states()
        self._is_in = False

    def close(self) -> None:
        """Report a failure unless this worker has left; may be called twice."""
        if self._map.closed:
            return
        if self._is_in:
            with self._locked():
                self._numbers[_FAILED_RANK] = self._numbers[_FAILED_RANK] or self._rank + 1
        self._numbers.release()
        self._is_out.release()
        self._map.close()
        os.close(self._descriptor)

    def _states(self) -> list[WorkerState]:
        """Return the state of each rank, after a search for new deaths."""
        with self._locked():
            for rank in self._ranks:
                is_training = self._numbers[_FIRST_RANK + rank] == WorkerState.TRAINING
                if is_training and not self._is_alive(rank):
                    self._numbers[_FIRST_RANK + rank] = WorkerState.LOST
            return [WorkerState(self._numbers[_FIRST_RANK + rank]) for rank in self._ranks]

    def _set_state(self, rank: int, state: WorkerState) -> None:
        with self._locked():
            self._numbers[_FIRST_RANK + rank] = state

    def _check_states(self) -> None:
        """Raise where rank 0 has died, or where this worker was given up."""
        states = self._states()
        for needed in (0, self._rank):
            if states[needed] is WorkerState.LOST:
                raise RankLostError(needed)

    def _wait(
        self,
        is_so: Callable[[list[WorkerState]], bool],
        find_failed_rank: Callable[[], int] = lambda: NO_RANK,
    ) -> None:
        """Wait for other workers; give up those that make no progress."""
        seen, progress_at = self._progress(), time.monotonic()
        while not is_so(states := self._states()):
            self.check()
            if (rank := find_failed_rank()) != NO_RANK:
                raise RankLostError(rank)
            if (now := self._progress()) != seen:  # else the states are as they were
                seen, progress_at = now, time.monotonic()
            elif time.monotonic() - progress_at > self._timeout:
                self._give_up(states)
            time.sleep(_POLL_SECONDS)

    def _progress(self) -> tuple[int, list[int]]:
        """Return what changes for as long as no worker need be given up."""
        return self.num_updates, self.living()

    def _give_up(self, states: list[WorkerState]) -> None:
        """Mark workers that still train as lost; rank 0, which may wait for the others, last."""
        if WorkerState.ABSENT in states:
            raise RankLostError(states.index(WorkerState.ABSENT))
        silent = [r for r in self._ranks if states[r] is WorkerState.TRAINING and r != self._rank]
        for rank in [rank for rank in silent if rank != 0] or silent:
            self._set_state(rank, WorkerState.LOST)

    def _is_alive(self, rank: int) -> bool:
        """Return whether a worker still holds its own lock."""
        if rank == self._rank or not _try_lock(self._descriptor, 1 + rank):
            return True
        _unlock(self._descriptor, 1 + rank)
        return False

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        fcntl.lockf(self._descriptor, fcntl.LOCK_EX, 1, 0)
        try:
            yield
        finally:
            _unlock(self._descriptor, 0)


@final
class SharedWeights:
    """The weights of all workers.

    A worker that needs two locks takes the lower rank's first, so that no circle of waits can
    arise.  One that dies in the middle of an average leaves each number either as it was or as
    the mean.

    Args:
        path: the file that they lie in.
        copies: one for each rank, mapped from that file.
        config: of this rank; the timeout is for one lock.

    Raises:
        RunOverError: the file is gone, with rank 0.
    """

    def __init__(self, path: Path, copies: Sequence[PackedTensors], config: WorkerConfig) -> None:
        self._copies = copies
        self._config = config
        try:
            self._descriptor = os.open(path, os.O_RDWR)
        except FileNotFoundError as error:
            raise RunOverError from error

    @contextlib.contextmanager
    def locked(self, *ranks: int) -> Iterator[None]:
        """Hold the locks of some workers' weights.

        Raises:
            RankLostError: here and below: a lock was not free in time.
        """
        with contextlib.ExitStack() as held:
            for rank in sorted(ranks):
                self._lock(rank)
                held.callback(
                    _unlock, self._descriptor, rank
                )  # no effect where it is unlocked already
            yield

    @torch.no_grad()
    def mean(self, ranks: Sequence[int]) -> list[Tensor]:
        """Return the mean of some workers' weights, each read at one moment."""
        sums = [torch.zeros_like(tensor) for tensor in self._copies[0].tensors]
        for rank in ranks:
            with self.locked(rank):
                for total, tensor in zip(sums, self._copies[rank].tensors, strict=True):
                    total.add_(tensor)
        return [total.div_(len(ranks)) for total in sums]

    @contextlib.contextmanager
    def averaged(self, rank: int, peer: int | None) -> Iterator[None]:
        """Replace two workers' weights by their mean; in the body, ``rank`` stays locked.

        Args:
            rank: of one worker.
            peer: of the other; None: the weights of ``rank`` stay as they are.
        """
        ranks = (rank,) if peer is None else (rank, peer)
        with self.locked(*ranks):
            if peer is not None:
                self._average(rank, peer)
                _unlock(self._descriptor, peer)
            yield

    def close(self) -> None:
        """Release all locks; may be called twice."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    @torch.no_grad()
    def _average(self, rank: int, peer: int) -> None:
        pairs = zip(self._copies[rank].tensors, self._copies[peer].tensors, strict=True)
        for mine, theirs in pairs:
            mine.lerp_(theirs, 0.5)  # one operation, so that a death never leaves a bare sum
            theirs.copy_(mine)

    def _lock(self, rank: int) -> None:
        deadline = time.monotonic() + self._config.timeout_seconds
        while not _try_lock(self._descriptor, rank):
            self._config.cancellation.check()
            if time.monotonic() > deadline:
                raise RankLostError(rank)
            time.sleep(_LOCK_POLL_SECONDS)


def _try_lock(descriptor: int, number: int) -> bool:
    """Lock a byte of a file; return False if another process has locked it."""
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, number)
    except (BlockingIOError, PermissionError):  # which of the two depends on the system
        return False
    return True


def _unlock(descriptor: int, number: int) -> None:
    fcntl.lockf(descriptor, fcntl.LOCK_UN, 1, number)


def _num_bytes(config: WorkerConfig, num_shards: int) -> int:
    return (_FIRST_RANK + config.world_size) * _NUMBER_BYTES + num_shards
