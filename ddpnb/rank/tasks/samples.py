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
    get_worker_info,
)

from ddpnb.compat.torch_internals import end_data_workers
from ddpnb.protocol.errors import UserError, kind_of, summary_of
from ddpnb.protocol.processes import die_with_parent, portable
from ddpnb.rank.tasks.batches import Shard, Tree, mapped, shape_of, tensors_of

Collate = Callable[[list[Any]], Tree]
"""Function that makes one batch from several items of a data set."""

NUM_PREFETCHED = 2
"""Default number of shards that each data process prepares while this worker trains on one."""

ShardRequest = tuple[Shard, Tensor]
"""A shard and the indices of its samples."""


@final
class TensorSamples:
    """Samples in a tree of tensors, with one row for each sample."""

    notes: tuple[str, ...] = ()

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

    ``num_workers`` processes fetch the samples, unless ``--data-workers`` sets another number. The
    processes have the settings of ``loader``.
    """

    notes: tuple[str, ...] = ()

    def __init__(
        self, dataset: Any, collate: Collate | None = None, loader: DataLoader[Any] | None = None
    ) -> None:
        self.dataset = dataset
        self._collate = collate or _stack
        self.num_workers: int = getattr(loader, "num_workers", 0)
        self.num_prefetched: int = getattr(loader, "prefetch_factor", None) or NUM_PREFETCHED
        self.timeout: float = getattr(loader, "timeout", 0)
        self.begin_worker: Callable[[int], None] | None = getattr(loader, "worker_init_fn", None)
        context = getattr(loader, "multiprocessing_context", None)
        self.start_method = context and context.get_start_method()

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
        if isinstance(error, RuntimeError) and "equal size" not in str(error):
            raise
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
    loader = None
    if isinstance(data, DataLoader):
        if data.collate_fn is not default_collate:
            collate = collate or data.collate_fn
        data, loader = _dataset_of(data, split), data
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
        samples = DatasetSamples(data, collate, loader)
    if len(samples) == 0:
        raise UserError(f"data({split!r}) returned no samples. Return at least one sample.")
    if loader is not None:
        samples.notes = _notes_on(loader, is_in_memory=isinstance(samples, TensorSamples))
    return samples


def _notes_on(loader: DataLoader[Any], *, is_in_memory: bool) -> tuple[str, ...]:
    """Return a note that names the loader's settings that ddpnb does not use."""
    of_processes = "num_workers", "worker_init_fn", "timeout", "multiprocessing_context"
    names = ("generator", "drop_last", *(of_processes if is_in_memory else ()))
    ignored = [name for name in names if getattr(loader, name)]
    ignored += [] if getattr(loader, "in_order", True) else ["in_order"]
    if not ignored:
        return ()
    why = "data in memory needs no processes, and " * is_in_memory
    return (
        f"ddpnb ignores {', '.join(ignored)} of the DataLoader, because {why}--batch-size and "
        "--seed define the batches.",
    )


def _as_tensors(tree: object, split: str) -> Tree:
    def as_tensor(leaf: Any) -> Tensor:
        _check_convertible(leaf, split)
        if isinstance(leaf, np.ndarray):
            kind = leaf.dtype.newbyteorder("=")
            try:  # astype copies read-only arrays and arrays with negative strides
                is_usual = leaf.flags.c_contiguous and leaf.flags.writeable and leaf.dtype == kind
                leaf = torch.from_numpy(leaf if is_usual else leaf.astype(kind, order="C"))
            except TypeError:
                raise UserError(
                    f"data({split!r}) returned an array of type {leaf.dtype}, which torch does not "
                    "have. Convert the array to numbers."
                ) from None
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


def _check_convertible(value: Any, split: str) -> None:
    """Reject data of pandas and scipy, masked arrays and sparse tensors, and name the method."""
    if isinstance(value, Tensor):
        is_dense = value.layout == torch.strided and not value.is_nested
        methods = [] if is_dense else ["to_padded_tensor" if value.is_nested else "to_dense"]
    else:
        methods = [each for each in ("to_numpy", "toarray", "filled") if hasattr(value, each)]
    for method in methods:
        raise UserError(
            f"data({split!r}) returned {kind_of(value)} that is no dense tensor or array. Return "
            f"the result of its method {method}() instead."
        )


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
    _check_convertible(dataset, split)
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
    samples: DatasetSamples, requests: Iterable[ShardRequest], num_processes: int, *, seed: int
) -> Iterator[Iterator[tuple[Shard, Tree]]]:
    """Yield shards with their samples. Other processes fetch the samples.

    The processes end when the context ends. No process fetches samples before the first shard is
    requested, so that no strategy has samples ready when the run's time starts. Each process takes
    ``num_prefetched`` requests in advance, even if other workers use the same queue of requests.
    ``seed`` is the seed of the random numbers in the processes.
    """
    num_first = samples.num_prefetched * num_processes  # requests that the loader takes in advance
    batches = iter(
        DataLoader(
            _Fetched(samples),
            sampler=itertools.chain(itertools.repeat(None, 2 * num_first), requests),
            batch_size=None,
            collate_fn=_unchanged,
            num_workers=num_processes,
            prefetch_factor=samples.num_prefetched,
            worker_init_fn=_begin_process,
            timeout=samples.timeout,
            # Forked processes share the memory of the data set.
            multiprocessing_context=samples.start_method or ("spawn" if portable() else "fork"),
            generator=torch.Generator().manual_seed(seed),  # not the global generator
        )
    )
    try:
        for _ in range(num_first):  # wait until all processes have started
            next(batches)
        yield map(_raised, itertools.islice(batches, num_first, None))
    finally:  # end the processes now, because a traceback may keep the iterator alive
        end_data_workers(batches)


@final
class _Fetched(Dataset[Any]):
    """A data set with shards as items. If a request is None, it only starts the process.

    A process that is not forked gets them by cloudpickle, which accepts classes from a cell.
    """

    def __init__(self, samples: DatasetSamples) -> None:
        self.samples = samples

    def __getitem__(self, request: ShardRequest | None) -> tuple[Shard, Tree] | UserError | None:
        if request is None:
            return None
        try:
            tree = self.samples.fetch(request[1])
            for tensor in tensors_of(tree):
                if tensor.layout == torch.strided:
                    tensor.share_memory_()  # the loader would wait forever if this failed later
            return request[0], tree
        except UserError as error:
            return error  # because torch adds a traceback to errors that are raised here
        except RuntimeError as error:
            if "No space left" not in str(error):
                raise
            return UserError(
                f"/dev/shm is full, so processes cannot send batches ({summary_of(error)}). Use "
                "--data-workers 0, or give the container more shared memory (--shm-size=2g)."
            )

    def __getstate__(self) -> bytes:
        try:
            return cast(bytes, cloudpickle.dumps(self.samples))
        except Exception as error:
            raise UserError(
                f"Other processes cannot load the result of data(split) ({summary_of(error)}). "
                "Remove --data-workers and num_workers."
            ) from error

    def __setstate__(self, pickled: bytes) -> None:
        self.samples = cloudpickle.loads(pickled)


def _raised(fetched: tuple[Shard, Tree] | UserError) -> tuple[Shard, Tree]:
    if isinstance(fetched, UserError):
        raise fetched
    return fetched


def _unchanged(shard: object) -> object:
    return shard


def _begin_process(number: int) -> None:
    die_with_parent()
    info: Any = get_worker_info()
    samples = info.dataset.samples
    object.__setattr__(info, "dataset", samples.dataset)  # the user's functions read it
    if samples.begin_worker is not None:
        samples.begin_worker(number)
