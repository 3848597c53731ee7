"""The source of the samples: fetched by the training thread, or ahead of it by processes (ranks).

``PrefetchingLoader`` is torch's ``DataLoader`` over exactly the shards that this worker trains on,
in their order.  Its processes live as long as the run.  If workers take shards from a queue, it
takes them early: ``NUM_PREFETCHED`` for each process.
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

NUM_PREFETCHED = 2
"""Shards that each process fetches or has ready while this worker trains on one."""

Indices = Callable[[Shard], Tensor]


class Source(ABC):
    """Where the samples of each shard come from."""

    @abstractmethod
    def pairs(self) -> Iterator[tuple[Shard, Pair]]:
        """Yield the shards to train on, in order, each with its samples."""

    @abstractmethod
    def close(self) -> None:
        """End its processes; may be called twice."""


@final
class InlineLoader(Source):
    """Fetches each shard only when it is needed.

    Args:
        samples: the training split.
        shards: all that will be trained on, in order.
        indices: returns the sample numbers of a shard.
    """

    def __init__(self, samples: Samples, shards: Iterable[Shard], indices: Indices) -> None:
        self._samples = samples
        self._shards = shards
        self._indices = indices

    def pairs(self) -> Iterator[tuple[Shard, Pair]]:
        """Fetch each shard when it is its turn."""
        for shard in self._shards:
            yield shard, self._samples.fetch(self._indices(shard))

    def close(self) -> None:
        """Do nothing: there are no processes."""


@final
class PrefetchingLoader(Source):
    """Fetches shards in other processes before they are needed.

    Args:
        dataset: a map-style data set of (input, target) items.
        shards: all that will be trained on, in order; taken early.
        indices: returns the sample numbers of a shard.
        num_processes: how many processes fetch.
        seed: of the random numbers in these processes.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        shards: Iterable[Shard],
        indices: Indices,
        num_processes: int,
        seed: int,
    ) -> None:
        self._taken: deque[Shard] = deque()
        self._batches: Iterator[Any] | None = iter(
            DataLoader(
                dataset,
                batch_sampler=(indices(shard).tolist() for shard in self._recorded(shards)),
                num_workers=num_processes,
                prefetch_factor=NUM_PREFETCHED,
                worker_init_fn=_end_with_rank,
                # Other start methods pickle the data set, and a class from a cell cannot be.
                multiprocessing_context="fork" if sys.platform == "linux" else None,
                generator=torch.Generator().manual_seed(seed),  # leaves the global state alone
            )
        )

    def pairs(self) -> Iterator[tuple[Shard, Pair]]:
        """Wait for the samples of each shard in turn."""
        assert self._batches is not None, "closed"
        for inputs, targets in self._batches:
            yield self._taken.popleft(), Pair(inputs, targets)

    def close(self) -> None:
        """End the processes now, for an exception's traceback may keep the iterator alive."""
        batches, self._batches = self._batches, None
        if batches is not None:
            end_data_workers(batches)

    def _recorded(self, shards: Iterable[Shard]) -> Iterator[Shard]:
        for shard in shards:
            self._taken.append(shard)
            yield shard


def _end_with_rank(_: int) -> None:
    die_with_parent()
