"""How do processes that share memory hand out work and count updates?  (Rank side.)

One file of numbers that all of them map.  What must not be torn apart is done under a file
lock, which the operating system lifts when its holder dies.
"""

import contextlib
import fcntl
import mmap
import os
from collections.abc import Iterator
from enum import IntEnum
from pathlib import Path
from typing import final

from ddpnb.processes import is_alive, process_id
from ddpnb.rank.transport.message import NOBODY
from ddpnb.rank.transport.packed import create_shared

NO_SHARE = -1
_NEXT_SHARE, _NUM_UPDATES, _FAILED_RANK, _FIRST_RANK = range(4)
_PER_RANK = 3
_WORD_BYTES = 8


class Standing(IntEnum):
    """How far a worker is."""

    NOT_HERE = 0
    TRAINING = 1
    DONE = 2
    GONE = 3
    """Dead, or silent for too long."""
    LAST = 4
    """Trains no more; has something to do when all others are done."""


class Fate(IntEnum):
    """What became of a share."""

    NOT_HANDED_OUT = 0
    HANDED_OUT = 1
    TRAINED = 2
    RETURNED = 3


@final
class Board:
    """The numbers of one run.

    Args:
        path: the file that ``create`` made.
        world_size: number of ranks.
        num_shares: shares to hand out, in order, to whoever asks next.
    """

    def __init__(self, path: Path, *, world_size: int, num_shares: int) -> None:
        self._world_size = world_size
        self._num_shares = num_shares
        self._descriptor = os.open(path, os.O_RDWR)
        self._map = mmap.mmap(self._descriptor, _size(world_size, num_shares))
        words = (_FIRST_RANK + _PER_RANK * world_size) * _WORD_BYTES
        view = memoryview(self._map)
        self._words, self._fates = view[:words].cast("q"), view[words:]

    @staticmethod
    def create(path: Path, *, world_size: int, num_shares: int) -> None:
        """Make the file."""
        create_shared(path, _size(world_size, num_shares))

    def enter(self, rank: int) -> None:
        """Note that a worker is here, as this process."""
        pid, began = process_id()
        with self._locked():
            at = self._at(rank)
            self._words[at + 1] = pid
            self._words[at + 2] = round(began * 1000)
            self._words[at] = Standing.TRAINING

    def take(self) -> int:
        """Return the number of the next share, ``NO_SHARE`` at the end."""
        with self._locked():
            share = self._words[_NEXT_SHARE]
            if share == self._num_shares:
                return NO_SHARE
            self._words[_NEXT_SHARE] = share + 1
            self._fates[share] = Fate.HANDED_OUT
            return share

    def settle(self, share: int, fate: Fate) -> None:
        """Note what became of a share."""
        self._fates[share] = fate

    def count_update(self) -> int:
        """Count an update; return how many there are now."""
        with self._locked():
            self._words[_NUM_UPDATES] += 1
            return self._words[_NUM_UPDATES]

    @property
    def num_updates(self) -> int:
        """Updates by all workers so far."""
        return self._words[_NUM_UPDATES]

    def stand(self, rank: int, standing: Standing) -> None:
        """Note how far a worker is."""
        self._words[self._at(rank)] = standing

    def standing(self, rank: int) -> Standing:
        """Return how far a worker is; find out whether it has died."""
        noted = Standing(self._words[self._at(rank)])
        if noted not in (Standing.TRAINING, Standing.LAST) or self._is_alive(rank):
            return noted
        with self._locked():
            if not self._is_alive(rank):  # nobody has taken its place meanwhile
                self.stand(rank, Standing.GONE)
        return Standing(self._words[self._at(rank)])

    def living(self) -> list[int]:
        """Return who has come and is not known to have died: nobody looks for it now."""
        dead = (Standing.NOT_HERE, Standing.GONE)
        return [r for r in range(self._world_size) if self._words[self._at(r)] not in dead]

    def fail(self, rank: int) -> None:
        """Note that a worker has failed, which ends the run for all."""
        with self._locked():
            if self.failed_rank == NOBODY:
                self._words[_FAILED_RANK] = rank + 1

    @property
    def failed_rank(self) -> int:
        """Who has failed, or ``NOBODY``."""
        return self._words[_FAILED_RANK] - 1

    def lost_shares(self) -> list[int]:
        """Return what was handed out and has never been trained on nor returned."""
        return [n for n, fate in enumerate(self._fates) if fate == Fate.HANDED_OUT]

    def close(self) -> None:
        """Unmap the file; may be called twice."""
        if not self._map.closed:
            self._words.release()
            self._fates.release()
            self._map.close()
            os.close(self._descriptor)

    def _at(self, rank: int) -> int:
        return _FIRST_RANK + _PER_RANK * rank

    def _is_alive(self, rank: int) -> bool:
        _, pid, created_ms = self._words[self._at(rank) :][:_PER_RANK]
        return is_alive((pid, created_ms / 1000))

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)


def _size(world_size: int, num_shares: int) -> int:
    return (_FIRST_RANK + _PER_RANK * world_size) * _WORD_BYTES + num_shares
