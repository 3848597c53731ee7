"""Averages of two workers' weights in shared memory, without a server (ranks).

Each worker's weights lie in shared memory, and a worker reads or writes them only under their
lock.  A worker that needs two locks takes the lower rank's first, so that no circle of waits
can arise.  A lock is a locked byte of the file: the operating system releases it when the
process dies, even if its children live on.  A worker that dies in the middle of an average
leaves each number either as it was or as the mean.
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
class SharedWeights:
    """The weights of all workers.

    Args:
        path: the file that they lie in.
        copies: one for each rank, mapped from that file.
        timeout_seconds: how long to wait for one lock.
        cancellation: frees this rank from waiting.

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
            RankLostError: here and below: a lock was not free in time.
        """
        with contextlib.ExitStack() as held:
            for rank in sorted(ranks):
                self._lock(rank)
                held.callback(self._unlock, rank)  # no effect where it is unlocked already
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
                self._unlock(peer)
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
        deadline = time.monotonic() + self._timeout
        while not self._try_lock(rank):
            self._cancellation.check()
            if time.monotonic() > deadline:
                raise RankLostError(rank)
            time.sleep(_POLL_SECONDS)

    def _try_lock(self, rank: int) -> bool:
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)
        except (BlockingIOError, PermissionError):  # which of the two depends on the system
            return False
        return True

    def _unlock(self, rank: int) -> None:
        fcntl.lockf(self._descriptor, fcntl.LOCK_UN, 1, rank)
