"""Who fetches the samples: the training thread, or processes ahead of it?  (Every rank.)

Ahead: torch's ``DataLoader`` over exactly the shares that this worker will train on, in
their order; its processes live as long as the run.  Where shares go to whoever asks next,
it asks early: ``NUM_AHEAD`` shares for each of its processes are this worker's already.
"""

import sys
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, final

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from ddpnb.compat.torch_internals import end_data_workers
from ddpnb.protocol.processes import die_with_parent
from ddpnb.rank.tasks.base import Pair, Samples
from ddpnb.rank.tasks.batches import Shard

NUM_AHEAD = 2
"""Shares that each process has in work, or ready, while this worker trains on one."""

Indices = Callable[[Shard], Tensor]


class Source(ABC):
    """Where the samples of each share come from."""

    @abstractmethod
    def pairs(self) -> Iterator[tuple[Shard, Pair]]:
        """Yield each share to train on, in order, with its samples."""

    @abstractmethod
    def close(self) -> None:
        """End its processes; may be called twice."""


@final
class InlineLoader(Source):
    """Fetches a share when it is asked for.

    Args:
        samples: where from.
        shares: all that will be trained on, in order.
        indices: which samples a share holds.
    """

    def __init__(self, samples: Samples, shards: Iterable[Shard], indices: Indices) -> None:
        self._samples = samples
        self._shards = shards
        self._indices = indices

    def pairs(self) -> Iterator[tuple[Shard, Pair]]:
        """Fetch each share when it is its turn."""
        for shard in self._shards:
            yield shard, self._samples.fetch(self._indices(shard))

    def close(self) -> None:
        """Nothing to end."""


@final
class PrefetchingLoader(Source):
    """Fetches shares in processes, before they are asked for.

    Args:
        dataset: a map-style data set of (input, target) items.
        shares: all that will be trained on, in order; asked for ahead.
        indices: which samples a share holds.
        num_processes: how many fetch.
        seed: what their own random numbers are made from.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        shards: Iterable[Shard],
        indices: Indices,
        num_processes: int,
        seed: int,
    ) -> None:
        self._asked: deque[Shard] = deque()
        self._batches: Iterator[Any] | None = iter(
            DataLoader(
                dataset,
                batch_sampler=(indices(shard).tolist() for shard in self._noted(shards)),
                num_workers=num_processes,
                prefetch_factor=NUM_AHEAD,
                worker_init_fn=_end_with_rank,
                # A class from a notebook cell cannot be pickled, which other ways need.
                multiprocessing_context="fork" if sys.platform == "linux" else None,
                generator=torch.Generator().manual_seed(seed),  # leaves the run's numbers alone
            )
        )

    def pairs(self) -> Iterator[tuple[Shard, Pair]]:
        """Wait for the samples of each share in turn."""
        assert self._batches is not None, "closed"
        for inputs, targets in self._batches:
            yield self._asked.popleft(), Pair(inputs, targets)

    def close(self) -> None:
        """End the processes now: an exception's traceback may keep the iterator alive."""
        batches, self._batches = self._batches, None
        if batches is not None:
            end_data_workers(batches)

    def _noted(self, shards: Iterable[Shard]) -> Iterator[Shard]:
        for shard in shards:
            self._asked.append(shard)
            yield shard


def _end_with_rank(_: int) -> None:
    die_with_parent()
