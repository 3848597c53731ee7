"""Fetch shards in other processes before they are needed, by torch's ``DataLoader`` (ranks)."""

import contextlib
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, final

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from ddpnb.compat.torch_internals import end_data_workers
from ddpnb.protocol.processes import die_with_parent
from ddpnb.rank.tasks.batches import Shard, Tree

NUM_PREFETCHED = 2
"""Shards that each process fetches or has ready while this worker trains on one."""

Request = tuple[Shard, Tensor]
"""A shard and its sample numbers."""


@contextlib.contextmanager
def prefetching(
    fetch: Callable[[Tensor], Tree], requests: Iterable[Request], num_processes: int, *, seed: int
) -> Iterator[Iterator[tuple[Shard, Tree]]]:
    """Yield shards, each with what ``fetch`` has returned in another process.

    The processes live as long as the context.  They fetch nothing before the first shard is asked
    for, so that no strategy has samples ready when the clock starts.

    Args:
        fetch: returns the samples with these numbers.
        requests: all that will be trained on, in order; taken early, ``NUM_PREFETCHED`` for each
            process, also from a queue that others take from.
        num_processes: how many processes fetch.
        seed: of the random numbers in these processes.
    """
    num_first = NUM_PREFETCHED * num_processes  # what the loader takes at once
    batches = iter(
        DataLoader(
            _Fetched(fetch),
            sampler=itertools.chain(itertools.repeat(None, num_first), requests),
            batch_size=None,
            collate_fn=_as_it_is,
            num_workers=num_processes,
            prefetch_factor=NUM_PREFETCHED,
            worker_init_fn=_end_with_rank,
            # Other start methods pickle the data set, and a class from a cell cannot be.
            multiprocessing_context="fork" if sys.platform == "linux" else None,
            generator=torch.Generator().manual_seed(seed),  # leaves the global state alone
        )
    )
    try:
        yield itertools.islice(batches, num_first, None)
    finally:  # at once, for an exception's traceback may keep the iterator alive
        end_data_workers(batches)


@final
class _Fetched(Dataset[Any]):
    """A data set of whole shards; asked for None, a process only starts."""

    def __init__(self, fetch: Callable[[Tensor], Tree]) -> None:
        self._fetch = fetch

    def __getitem__(self, request: Request | None) -> tuple[Shard, Tree] | None:
        return request and (request[0], self._fetch(request[1]))


def _as_it_is(content: Tree) -> Tree:
    return content


def _end_with_rank(_: int) -> None:
    die_with_parent()
