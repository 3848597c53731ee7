"""The samples of a split, whatever ``data(split)`` returns, and who fetches them (ranks)."""

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, final

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    default_collate,
)

from ddpnb.compat.torch_internals import end_data_workers
from ddpnb.protocol.errors import UserError, kind_of, summary_of
from ddpnb.protocol.processes import die_with_parent
from ddpnb.rank.tasks.batches import Shard, Tree, mapped, shape_of, tensors_of

Collate = Callable[[list[Any]], Tree]
"""Makes one batch of some items of a data set."""

NUM_PREFETCHED = 2
"""Shards that each process fetches or has ready while this worker trains on one."""

Request = tuple[Shard, Tensor]
"""A shard and its sample numbers."""


@final
class TensorSamples:
    """Samples held in a tree of tensors, one row for each sample."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self._num_samples = len(next(tensors_of(tree)))

    def __len__(self) -> int:
        return self._num_samples

    def fetch(self, indices: Tensor) -> Tree:
        """Return the samples with these numbers (int64), as one batch."""
        return mapped(lambda leaf: leaf[indices], self._tree)


@final
class DatasetSamples:
    """Samples of a map-style data set with items of any kind.

    ``num_workers`` processes fetch them, if no other number is asked for.
    """

    def __init__(
        self, dataset: Any, collate: Collate | None = None, *, num_workers: int = 0
    ) -> None:
        self.dataset = dataset
        self._collate = collate or _stack
        self.num_workers = num_workers

    def __len__(self) -> int:
        return len(self.dataset)

    def fetch(self, indices: Tensor) -> Tree:
        """Return the samples with these numbers (int64), as one batch; as ``DataLoader`` does."""
        numbers, dataset = indices.tolist(), self.dataset
        if callable(fetch_all := getattr(dataset, "__getitems__", None)):
            return self._collate(list(fetch_all(numbers)))
        return self._collate([dataset[number] for number in numbers])


Samples = TensorSamples | DatasetSamples
"""A split of a data set, fetched by sample numbers."""


def _stack(items: list[Any]) -> Tree:
    """Collate items as torch's ``DataLoader`` does by default."""
    try:
        return default_collate(items)
    except (TypeError, RuntimeError, KeyError) as error:
        raise UserError(
            f"The items of data(split) cannot be stacked into a batch ({summary_of(error)}): let "
            "all have the same shape and type, or define collate_fn(items)."
        ) from error


def as_samples(data: Any, split: str, collate: Collate | None = None) -> Samples:
    """Return the result of ``data(split)`` as ``Samples``.

    It may be tensors or arrays in a tree, a map-style data set, a list of items, or a
    ``DataLoader`` of one; anything else is refused, and what is empty.  ``collate`` is the cell's
    own ``collate_fn``.
    """
    num_workers = 0
    if isinstance(data, DataLoader):
        if data.collate_fn is not default_collate:
            collate = collate or data.collate_fn
        data, num_workers = _dataset_of(data, split), data.num_workers
    if isinstance(data, TensorDataset) and collate is None:
        data = data.tensors
    if isinstance(data, Tensor | np.ndarray | Mapping | tuple):
        if collate is not None:
            raise UserError(
                f"data({split!r}) returned {kind_of(data)} of stacked rows: leave collate_fn out, "
                "or return a list of items or a Dataset."
            )
        samples: Samples = TensorSamples(_as_tensors(data, split))
    else:
        _check_numbered(data, split)
        samples = DatasetSamples(data, collate, num_workers=num_workers)
    if len(samples) == 0:
        raise UserError(f"data({split!r}) returned no samples; return at least one.")
    return samples


def _as_tensors(tree: object, split: str) -> Tree:
    def as_tensor(leaf: Any) -> Tensor:
        if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "fiub":
            # Torch warns about arrays that cannot be written to, so these are copied.
            leaf = torch.from_numpy(leaf if leaf.flags.writeable else leaf.copy())
        if not isinstance(leaf, Tensor) or leaf.ndim == 0:
            raise _wrong(split, f"{kind_of(tree)} with {kind_of(leaf)} in it that has no rows")
        return leaf.detach().cpu()

    found = mapped(as_tensor, tree)
    if len({len(tensor) for tensor in tensors_of(found)}) != 1:
        raise UserError(
            f"data({split!r}) returned tensors of shapes {shape_of(found)}; return one row for "
            "each sample in each."
        )
    return found


def _dataset_of(loader: DataLoader[Any], split: str) -> Any:
    """Return a loader's data set; refuse a choice or order of samples that would be lost."""
    sampler, dataset = loader.sampler, loader.dataset
    _check_numbered(dataset, split)
    is_drawn = getattr(sampler, "replacement", False)
    is_usual = type(loader.batch_sampler) in (BatchSampler, type(None)) and not is_drawn
    if is_usual and type(sampler) in (SequentialSampler, RandomSampler, DistributedSampler):
        return dataset
    raise UserError(
        f"data({split!r}) returned a DataLoader with a sampler of its own, and its choice would be "
        "lost: --batch-size and --seed make batches. Return its data set, or a Subset of it, e.g.  "
        "Subset(dataset, list(WeightedRandomSampler(weights, n)))."
    )


def _check_numbered(dataset: Any, split: str) -> None:
    """Refuse a stream: no order of its samples can be the same for all strategies."""
    has_numbers = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    if not has_numbers or isinstance(dataset, IterableDataset | str):
        raise _wrong(split, kind_of(dataset))


def _wrong(split: str, what: str) -> UserError:
    return UserError(
        f"data({split!r}) returned {what}; return tensors or arrays, a dict or tuple of them, a "
        "map-style Dataset with __len__(), a list of items, e.g.  "
        "list(itertools.islice(stream, 10_000)),  or a DataLoader."
    )


# -- fetched in advance ---------------------------------------------------------------------


@contextlib.contextmanager
def prefetching(
    fetch: Callable[[Tensor], Tree], requests: Iterable[Request], num_processes: int, *, seed: int
) -> Iterator[Iterator[tuple[Shard, Tree]]]:
    """Yield shards, each with what ``fetch`` has returned in another process.

    The processes live as long as the context.  They fetch nothing before the first shard is asked
    for, so that no strategy has samples ready when the clock starts.  Requests are taken early,
    ``NUM_PREFETCHED`` for each process, also from a queue that others take from.  The seed is that
    of the random numbers in these processes.
    """
    num_first = NUM_PREFETCHED * num_processes  # what the loader takes at once
    batches = iter(
        DataLoader(
            _Fetched(fetch),
            sampler=itertools.chain(itertools.repeat(None, num_first), requests),
            batch_size=None,
            collate_fn=lambda shard: shard,
            num_workers=num_processes,
            prefetch_factor=NUM_PREFETCHED,
            worker_init_fn=lambda _: die_with_parent(),
            # Other start methods pickle the data set, and a class from a cell cannot be.
            multiprocessing_context="fork",
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
