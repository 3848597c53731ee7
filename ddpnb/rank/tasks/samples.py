"""Fetches samples from ``data(split)``, here or in other processes.  Runs on the ranks."""

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, cast, final

import cloudpickle
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
from ddpnb.protocol.processes import die_with_parent, portable
from ddpnb.rank.tasks.batches import Shard, Tree, mapped, shape_of, tensors_of

Collate = Callable[[list[Any]], Tree]
"""Function that makes one batch from several items of a data set."""

NUM_PREFETCHED = 2
"""Number of shards that each data process prepares while this worker trains on one shard."""

Request = tuple[Shard, Tensor]
"""A shard and the indices of its samples."""


@final
class TensorSamples:
    """Samples in a tree of tensors, with one row for each sample."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self._num_samples = len(next(tensors_of(tree)))

    def __len__(self) -> int:
        return self._num_samples

    def fetch(self, indices: Tensor) -> Tree:
        """Return the samples with these indices (int64) as one batch."""
        return mapped(lambda leaf: leaf[indices], self._tree)


@final
class DatasetSamples:
    """Samples of a map-style data set with items of any kind.

    ``num_workers`` processes fetch the samples, unless ``--data-workers`` sets another number.
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
        """Return the samples with these indices (int64) as one batch, like ``DataLoader``."""
        numbers, dataset = indices.tolist(), self.dataset
        if callable(fetch_all := getattr(dataset, "__getitems__", None)):
            return self._collate(list(fetch_all(numbers)))
        return self._collate([dataset[number] for number in numbers])


Samples = TensorSamples | DatasetSamples
"""One split of a data set. ``fetch`` returns the samples with given indices."""


def _stack(items: list[Any]) -> Tree:
    """Collate items in the same way as torch's ``DataLoader`` does by default."""
    try:
        return default_collate(items)
    except (TypeError, RuntimeError, KeyError) as error:
        raise UserError(
            f"The items of data(split) cannot be stacked into a batch ({summary_of(error)}). "
            "Give all items the same shape and type, or define collate_fn(items)."
        ) from error


def as_samples(data: Any, split: str, collate: Collate | None = None) -> Samples:
    """Convert the result of ``data(split)`` into ``Samples``.

    The result may be a tree of tensors or arrays, a map-style data set, a list of items, or a
    ``DataLoader`` of such data. Any other result, or an empty result, raises ``UserError``.
    ``collate`` is the cell's ``collate_fn``.
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
                f"data({split!r}) returned {kind_of(data)}, so there are no items for collate_fn. "
                "Remove collate_fn, or return a list of items or a Dataset."
            )
        samples: Samples = TensorSamples(_as_tensors(data, split))
    else:
        _check_numbered(data, split)
        samples = DatasetSamples(data, collate, num_workers=num_workers)
    if len(samples) == 0:
        raise UserError(f"data({split!r}) returned no samples. Return at least one sample.")
    return samples


def _as_tensors(tree: object, split: str) -> Tree:
    def as_tensor(leaf: Any) -> Tensor:
        if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "fiub":
            # Copy read-only arrays, because torch warns about them.
            leaf = torch.from_numpy(leaf if leaf.flags.writeable else leaf.copy())
        if not isinstance(leaf, Tensor) or leaf.ndim == 0:
            raise _wrong(split, f"{kind_of(tree)} that contains {kind_of(leaf)} without rows")
        return leaf.detach().cpu()

    found = mapped(as_tensor, tree)
    if len({len(tensor) for tensor in tensors_of(found)}) != 1:
        raise UserError(
            f"data({split!r}) returned tensors of shapes {shape_of(found)}. Return tensors "
            "with one row for each sample."
        )
    return found


def _dataset_of(loader: DataLoader[Any], split: str) -> Any:
    """Return a loader's data set. Raise ``UserError`` if the loader has a custom sampler."""
    sampler, dataset = loader.sampler, loader.dataset
    _check_numbered(dataset, split)
    is_drawn = getattr(sampler, "replacement", False)
    is_usual = type(loader.batch_sampler) in (BatchSampler, type(None)) and not is_drawn
    if is_usual and type(sampler) in (SequentialSampler, RandomSampler, DistributedSampler):
        return dataset
    raise UserError(
        f"data({split!r}) returned a DataLoader with a custom sampler. ddpnb cannot use this "
        "sampler, because --batch-size and --seed define the batches. Return the data set, or a "
        "Subset, for example  Subset(dataset, list(WeightedRandomSampler(weights, n)))."
    )


def _check_numbered(dataset: Any, split: str) -> None:
    """Reject a stream, because strategies could not use its samples in the same order."""
    has_numbers = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    if not has_numbers or isinstance(dataset, IterableDataset | str):
        raise _wrong(split, kind_of(dataset))


def _wrong(split: str, what: str) -> UserError:
    return UserError(
        f"data({split!r}) returned {what}. Return tensors or arrays, a dict or tuple of these, a "
        "map-style Dataset with __len__(), a DataLoader, or a list of items, for example  "
        "list(itertools.islice(stream, 10_000))."
    )


# -- prefetching ----------------------------------------------------------------------------


@contextlib.contextmanager
def prefetching(
    fetch: Callable[[Tensor], Tree], requests: Iterable[Request], num_processes: int, *, seed: int
) -> Iterator[Iterator[tuple[Shard, Tree]]]:
    """Yield shards with their samples. Other processes fetch the samples with ``fetch``.

    The processes end when the context ends. No process fetches samples before the first shard is
    requested, so that no strategy has samples ready when the run's time starts. Each process takes
    ``NUM_PREFETCHED`` requests in advance, even if other workers use the same queue of requests.
    ``seed`` is the seed of the random numbers in the processes.
    """
    num_first = NUM_PREFETCHED * num_processes  # requests that the loader takes in advance
    batches = iter(
        DataLoader(
            _Fetched(fetch),
            sampler=itertools.chain(itertools.repeat(None, 2 * num_first), requests),
            batch_size=None,
            collate_fn=_unchanged,
            num_workers=num_processes,
            prefetch_factor=NUM_PREFETCHED,
            worker_init_fn=_begin_process,
            # Forked processes share the memory of the data set.
            multiprocessing_context="spawn" if portable() else "fork",
            generator=torch.Generator().manual_seed(seed),  # not the global generator
        )
    )
    try:
        for _ in range(num_first):  # wait until all processes have started
            next(batches)
        yield itertools.islice(batches, num_first, None)
    finally:  # end the processes now, because a traceback may keep the iterator alive
        end_data_workers(batches)


@final
class _Fetched(Dataset[Any]):
    """A data set with shards as items. If a request is None, it only starts the process.

    A process that is not forked gets ``fetch`` by cloudpickle, which accepts classes from a cell.
    """

    def __init__(self, fetch: Callable[[Tensor], Tree]) -> None:
        self._fetch = fetch

    def __getitem__(self, request: Request | None) -> tuple[Shard, Tree] | None:
        return request and (request[0], self._fetch(request[1]))

    def __getstate__(self) -> bytes:
        try:
            return cast(bytes, cloudpickle.dumps(self._fetch))
        except Exception as error:
            raise UserError(
                f"Other processes cannot load the result of data(split) ({summary_of(error)}). "
                "Remove --data-workers and num_workers."
            ) from error

    def __setstate__(self, pickled: bytes) -> None:
        self._fetch = cloudpickle.loads(pickled)


def _unchanged(shard: object) -> object:
    return shard


def _begin_process(_: int) -> None:
    die_with_parent()
