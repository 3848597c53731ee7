"""The samples of a split, whatever ``data(split)`` returns (ranks)."""

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, final

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)

from ddpnb.protocol.errors import UserError, kind_of, summary_of
from ddpnb.rank.tasks.batches import Draw, Tree, leaves, mapped

Collate = Callable[[list[Any]], Tree]
"""Makes one batch of some items of a data set."""

DataCache = dict[object, Any]
"""Keeps what the runs of one comparison load once: one value, under one key."""

_READ_NOTE = "The IterableDataset of data(split) was read whole into memory, once on each rank."


class Items(NamedTuple):
    """Items of a data set, collated only once it is known which go into one batch."""

    items: list[Any]
    collate: Collate

    def batch(self) -> Tree:
        """Return the items as one batch."""
        return self.collate(self.items)


class Samples(ABC):
    """A split of a data set, fetched by sample numbers."""

    notes: tuple[str, ...] = ()
    """Shown beside every result."""
    draw: Draw | None = None
    """How an epoch's samples are drawn, if not each one once."""
    has_own_collate = False
    """Whether parts of a batch must be collated one by one: it need not have rows."""

    @property
    def num_per_epoch(self) -> int:
        """Samples of an epoch."""
        return len(self) if self.draw is None else self.draw.num_samples

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of samples."""

    @abstractmethod
    def fetch(self, indices: Tensor) -> Tree:
        """Return the samples with these numbers (int64), as one batch."""

    def fetch_items(self, indices: Tensor) -> Items:
        """Return the samples with these numbers, to be collated later."""
        raise NotImplementedError("its rows are stacked already")


@final
class TensorSamples(Samples):
    """Samples held in tensors, one row for each sample.

    Args:
        *tensors: the parts of each batch, e.g. inputs and targets.
        tree: a tree of tensors, in place of a tuple.
    """

    def __init__(self, *tensors: Tensor, tree: Tree = None) -> None:
        self._tree = tensors if tree is None else tree
        self._num_samples = len(next(leaves(self._tree))[1])

    def __len__(self) -> int:
        return self._num_samples

    def fetch(self, indices: Tensor) -> Tree:
        """Index all tensors at once."""
        return mapped(lambda leaf: leaf[indices], self._tree)


@final
class DatasetSamples(Samples):
    """Samples of a map-style data set with items of any kind.

    Args:
        dataset: has ``__len__`` and ``__getitem__``.
        collate: makes a batch of some items; None: torch's ``default_collate``.
        num_workers: processes that fetch, if no other number is asked for.
        draw: how an epoch's samples are drawn, if not each one once.
        notes: shown beside every result.
    """

    def __init__(
        self,
        dataset: Any,
        collate: Collate | None = None,
        *,
        num_workers: int = 0,
        draw: Draw | None = None,
        notes: tuple[str, ...] = (),
    ) -> None:
        self.dataset = dataset
        self.has_own_collate = collate is not None
        self.collate = collate or _stack
        self.num_workers = num_workers
        self.draw = draw
        self.notes = notes

    def __len__(self) -> int:
        return len(self.dataset)

    def fetch(self, indices: Tensor) -> Tree:
        """Fetch the items as torch's ``DataLoader`` does, and collate them."""
        return self.fetch_items(indices).batch()

    def fetch_items(self, indices: Tensor) -> Items:
        """Fetch the items, to be collated later."""
        numbers, dataset = indices.tolist(), self.dataset
        if callable(fetch_all := getattr(dataset, "__getitems__", None)):
            return Items(list(fetch_all(numbers)), self.collate)
        return Items([dataset[number] for number in numbers], self.collate)


def _stack(items: list[Any]) -> Tree:
    """Collate items as torch's ``DataLoader`` does by default."""
    try:
        return default_collate(items)
    except (TypeError, RuntimeError, KeyError) as error:
        raise UserError(
            f"The items of data(split) cannot be stacked into a batch ({summary_of(error)}): let "
            "all have the same shape and type, or define collate_fn(items)."
        ) from error


def as_samples(data: object, split: str, collate: Collate | None = None) -> Samples:
    """Return the result of ``data(split)`` as ``Samples``.

    Args:
        data: tensors or arrays in a tree, a map-style data set, a list of items, or a
            ``DataLoader`` of one.
        split: ``"train"`` or ``"test"``, for the error message.
        collate: the cell's own ``collate_fn``.

    Raises:
        UserError: it is none of these, or it is empty.
    """
    if isinstance(data, TensorDataset) and collate is None:
        data = data.tensors
    if isinstance(data, Tensor | np.ndarray | Mapping | tuple):
        if collate is not None:
            raise UserError(
                f"data({split!r}) returned {kind_of(data)}, whose rows are stacked already: leave "
                "collate_fn out, or return a list of items or a Dataset."
            )
        samples: Samples = TensorSamples(tree=_as_tensors(data, split))
    elif isinstance(data, DataLoader):
        samples = _from_loader(data, split, collate)
    else:
        samples = _from_dataset(data, split, collate)
    if len(samples) == 0:
        raise UserError(f"data({split!r}) returned no samples; return at least one.")
    return samples


def _as_tensors(tree: object, split: str) -> Tree:
    def as_tensor(leaf: Any) -> Tensor:
        if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "fiub":
            # Torch warns about arrays that cannot be written to, so these are copied.
            leaf = torch.from_numpy(leaf if leaf.flags.writeable else leaf.copy())
        if not isinstance(leaf, Tensor) or leaf.ndim == 0:
            what = "a single number" if isinstance(leaf, Tensor) else kind_of(leaf)
            raise _wrong(split, f"{kind_of(tree)} with {what} in it")
        return leaf.detach().cpu()

    found = mapped(as_tensor, tree)
    sizes = {path: len(leaf) for path, leaf in leaves(found)}
    if not sizes:
        raise _wrong(split, f"an empty {type(tree).__name__}")
    if len(set(sizes.values())) > 1:
        rows = ", ".join(f"{num} in {path}" for path, num in sizes.items())
        raise UserError(
            f"data({split!r}) returned different numbers of rows ({rows}); "
            "return one row for each sample in each."
        )
    return found


def _from_loader(loader: DataLoader[Any], split: str, collate: Collate | None) -> Samples:
    if loader.batch_sampler is None:
        raise UserError(
            f"data({split!r}) returned a DataLoader that does not make its batches one by one; "
            "return its dataset, whose items are single samples."
        )
    own = None if loader.collate_fn is default_collate else loader.collate_fn
    dataset, draw = _sampled(loader.dataset, loader.sampler, loader.batch_sampler, split)
    return _from_dataset(dataset, split, collate or own, num_workers=loader.num_workers, draw=draw)


def _sampled(dataset: Any, sampler: Any, batches: Any, split: str) -> tuple[Any, Draw | None]:
    """Return what a loader's samplers leave of its data set, and how an epoch is drawn from it.

    Raises:
        UserError: the loader chooses or orders samples in a way that would be lost.
    """
    kind = type(sampler)
    if type(batches) is not BatchSampler or id(batches.sampler) != id(sampler):
        kind = type(batches)
    elif isinstance(dataset, IterableDataset):
        return dataset, None
    elif kind is SubsetRandomSampler:
        return Subset(dataset, list(sampler.indices)), None
    elif kind in (SequentialSampler, DistributedSampler):  # each rank has its part of each batch
        return dataset, None
    elif kind in (RandomSampler, WeightedRandomSampler):
        weights = getattr(sampler, "weights", None)
        if weights is None and not sampler.replacement and sampler.num_samples == len(dataset):
            return dataset, None
        if split == "train":
            return dataset, Draw(
                weights=torch.ones(len(dataset), device="cpu")
                if weights is None
                else weights.cpu(),
                num_samples=sampler.num_samples,
                with_replacement=sampler.replacement,
            )
    raise UserError(
        f"data({split!r}) returned a DataLoader with a {kind.__name__}, and its choice would be "
        "lost: --batch-size and --seed make batches. Return the data set itself, a "
        "torch.utils.data.Subset of it, or, to train, a DataLoader with a WeightedRandomSampler."
    )


def _from_dataset(
    dataset: Any,
    split: str,
    collate: Collate | None,
    *,
    num_workers: int = 0,
    draw: Draw | None = None,
) -> Samples:
    notes: tuple[str, ...] = ()
    num = _length_of(dataset)
    if isinstance(dataset, IterableDataset) and num is not None:
        dataset = list(itertools.islice(dataset, num))
        notes = (_READ_NOTE,)
    is_stream = isinstance(dataset, IterableDataset) or (
        hasattr(dataset, "__iter__") and not hasattr(dataset, "__getitem__")
    )
    if is_stream or (num is None and hasattr(dataset, "__getitem__")):
        raise UserError(
            f"data({split!r}) returned {kind_of(dataset)}, whose samples have no numbers or no "
            "__len__(), so no order of them can be the same for all strategies; return a map-style "
            "Dataset, or a list of as many items as you need, e.g.  "
            "list(itertools.islice(stream, 10_000))."
        )
    if isinstance(dataset, str | bytes) or num is None:
        raise _wrong(split, kind_of(dataset))
    samples = DatasetSamples(dataset, collate, num_workers=num_workers, draw=draw, notes=notes)
    if collate is None and len(samples) > 0:
        batch = samples.fetch(torch.tensor([0], device="cpu"))
        if not any(isinstance(leaf, Tensor) for _, leaf in leaves(batch)):
            raise UserError(
                f"data({split!r}) gives items without a number or tensor in them: let "
                "each have some, or define collate_fn(items), which makes tensors of them."
            )
    return samples


def _length_of(dataset: Any) -> int | None:
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        return None


def _wrong(split: str, what: str) -> UserError:
    return UserError(
        f"data({split!r}) returned {what}; return tensors or arrays, a dict or tuple of them, a "
        "map-style Dataset, a list of items, or a DataLoader."
    )
