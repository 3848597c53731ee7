"""How do two workers average their weights, whatever others do meanwhile?  (Rank side.)

Each worker's weights lie in shared memory; whoever reads or writes them holds their lock, and
who needs two takes the lower rank's first, so that nobody waits in a circle.  A lock is one
byte of the file that the weights lie in, locked for this process: the operating system lifts
it when the process dies, whatever children it leaves.  What was half averaged by then stays
so: each number is the weight that it was, or the mean.
"""

import contextlib
import fcntl
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import final

import torch
from torch import Tensor

from ddpnb.rank.lifeline import Lifeline
from ddpnb.rank.transport.message import RankLostError
from ddpnb.rank.transport.packed import Packed

_POLL_SECONDS = 0.0001


@final
class Weights:
    """The weights of all workers.

    Args:
        path: the file that they lie in.
        copies: one for each rank, mapped from that file.
        timeout_seconds: how long to wait for one lock.
        lifeline: frees this rank from waiting.
    """

    def __init__(
        self, path: Path, copies: Sequence[Packed], timeout_seconds: float, lifeline: Lifeline
    ) -> None:
        self._copies = copies
        self._timeout = timeout_seconds
        self._lifeline = lifeline
        self._descriptor = os.open(path, os.O_RDWR)

    def read(self, rank: int, into: Sequence[Tensor]) -> None:
        """Copy a worker's weights, all of one moment.

        Raises:
            RankLostError: the lock was not free in time.
        """
        with self._locked(rank):
            _copy(self._copies[rank].tensors, into)

    def write(self, rank: int, values: Sequence[Tensor]) -> None:
        """Replace a worker's weights.

        Raises:
            RankLostError: the lock was not free in time.
        """
        with self._locked(rank):
            _copy(values, self._copies[rank].tensors)

    @torch.no_grad()
    def mean(self, ranks: Sequence[int]) -> list[Tensor]:
        """Return the mean of some workers' weights; each one's are of one moment.

        Raises:
            RankLostError: a lock was not free in time.
        """
        sums = [torch.zeros_like(tensor) for tensor in self._copies[0].tensors]
        for rank in ranks:
            with self._locked(rank):
                for total, tensor in zip(sums, self._copies[rank].tensors, strict=True):
                    total.add_(tensor)
        return [total.div_(len(ranks)) for total in sums]

    @contextlib.contextmanager
    def averaged(self, mine: int, other: int | None) -> Iterator[None]:
        """Give two workers the mean of their weights; within, ``mine`` stays locked.

        Args:
            mine: rank of the one.
            other: of the other; None: there is no other, the weights stay as they are.

        Raises:
            RankLostError: a lock was not free in time.
        """
        ranks = (mine,) if other is None else (mine, other)
        with self._locked(*ranks):
            if other is not None:
                self._average(mine, other)
                self._unlock(other)
            yield

    def close(self) -> None:
        """Let go of all locks; may be called twice."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    @torch.no_grad()
    def _average(self, mine: int, other: int) -> None:
        pairs = zip(self._copies[mine].tensors, self._copies[other].tensors, strict=True)
        for one, another in pairs:
            one.lerp_(another, 0.5)  # in one go: a sum must not stay behind
            another.copy_(one)

    @contextlib.contextmanager
    def _locked(self, *ranks: int) -> Iterator[None]:
        with contextlib.ExitStack() as held:
            for rank in sorted(ranks):
                self._lock(rank)
                held.callback(self._unlock, rank)  # to unlock what is unlocked does nothing
            yield

    def _lock(self, rank: int) -> None:
        deadline = time.monotonic() + self._timeout
        while not self._is_locked_now(rank):
            self._lifeline.check()
            if time.monotonic() > deadline:
                raise RankLostError(rank)
            time.sleep(_POLL_SECONDS)

    def _is_locked_now(self, rank: int) -> bool:
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)
        except (BlockingIOError, PermissionError):  # which of them, depends on the system
            return False
        return True

    def _unlock(self, rank: int) -> None:
        fcntl.lockf(self._descriptor, fcntl.LOCK_UN, 1, rank)


@torch.no_grad()
def _copy(values: Iterable[Tensor], into: Iterable[Tensor]) -> None:
    for value, tensor in zip(values, into, strict=True):
        tensor.copy_(value)
