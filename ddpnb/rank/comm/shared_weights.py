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
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import final

import torch
from torch import Tensor

from ddpnb.rank.cancellation import CancellationToken
from ddpnb.rank.comm.messages import RankLostError, RunOverError
from ddpnb.rank.comm.packed_tensors import PackedTensors

_POLL_SECONDS = 0.0001


@final
class Weights:
    """The weights of all workers.

    Args:
        path: the file that they lie in.
        copies: one for each rank, mapped from that file.
        timeout_seconds: how long to wait for one lock.
        lifeline: frees this rank from waiting.

    Raises:
        RunOverError: the file is gone, with rank 0.
    """

    def __init__(
        self,
        path: Path,
        copies: Sequence[PackedTensors],
        timeout_seconds: float,
        cancellation: CancellationToken,
    ) -> None:
        self._copies = copies
        self._timeout = timeout_seconds
        self._cancellation = cancellation
        try:
            self._descriptor = os.open(path, os.O_RDWR)
        except FileNotFoundError as error:
            raise RunOverError from error

    @contextlib.contextmanager
    def locked(self, *ranks: int) -> Iterator[None]:
        """Hold the locks of some workers' weights.

        Raises:
            RankLostError: by this and the following: a lock was not free in time.
        """
        with contextlib.ExitStack() as held:
            for rank in sorted(ranks):
                self._lock(rank)
                held.callback(self._unlock, rank)  # to unlock what is unlocked does nothing
            yield

    @torch.no_grad()
    def mean(self, ranks: Sequence[int]) -> list[Tensor]:
        """Return the mean of some workers' weights; each one's are of one moment."""
        sums = [torch.zeros_like(tensor) for tensor in self._copies[0].tensors]
        for rank in ranks:
            with self.locked(rank):
                for total, tensor in zip(sums, self._copies[rank].tensors, strict=True):
                    total.add_(tensor)
        return [total.div_(len(ranks)) for total in sums]

    @contextlib.contextmanager
    def averaged(self, mine: int, other: int | None) -> Iterator[None]:
        """Give two workers the mean of their weights; within, ``mine`` stays locked.

        Args:
            mine: rank of the one.
            other: of the other; None: there is no other, the weights stay as they are.
        """
        ranks = (mine,) if other is None else (mine, other)
        with self.locked(*ranks):
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

    def _lock(self, rank: int) -> None:
        deadline = time.monotonic() + self._timeout
        while not self._is_locked_now(rank):
            self._cancellation.check()
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
