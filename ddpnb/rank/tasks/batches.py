"""Select the samples of each step and worker, and handle batches as trees of tensors.

For each epoch, ddpnb shuffles the training split with the seed and cuts it into global batches.
Each global batch is divided into shards, one for each worker. Together, the shards of a step
contain each sample of the global batch once. So every strategy sees the same samples in the same
order.

If the workers share a global batch evenly, the order is the same as with torch's
``DistributedSampler(seed=seed, drop_last=True)`` and ``set_epoch``. ddpnb does not call a data
set's ``set_epoch``. Every worker has a shard of each batch, so all synchronous workers take the
same number of steps, and torch's ``Join`` is not needed. If shards differ in size, averages of
gradients are weighted by the shards' sizes.

A batch is a tree: tensors in dicts, tuples, lists and objects with fields, such as dataclasses,
nested in any way. A tree may also contain strings, numbers and other objects. In batches from
torch's ``default_collate``, a list of strings has one string for each sample.  Runs on the ranks.
"""

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import KW_ONLY, dataclass, is_dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from ddpnb.protocol.errors import UserError, kind_of

Tree = Any
"""A tensor, or a dict, tuple, list or object with fields of trees."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One worker's part of one global batch."""

    step: int
    index: int
    num_shards: int


def every_step(num_steps: int, *, index: int, num_shards: int) -> Iterator[Shard]:
    """Yield the shards of a synchronous worker, which gets the same index in every global batch."""
    for step in range(num_steps):
        yield Shard(step=step, index=index, num_shards=num_shards)


@dataclass(eq=False)
class BatchSchedule:
    """The global batches of a run. Batches are the same on every rank and for every strategy.

    If the N ranks cannot share an epoch's samples evenly, the last samples are left out. The
    epoch's last batch may be smaller. A batch of fewer than N samples is left out, so that every
    shard has a sample.

    Raises:
        UserError: The batch is smaller than the number of ranks or larger than the split.
    """

    num_in_split: int
    _: KW_ONLY
    batch_size: int
    num_epochs: float
    """Number of passes over the training split. The last pass may be a fraction of an epoch."""
    num_ranks: int
    """Number of ranks in the whole group, even if a strategy uses fewer ranks."""
    seed: int

    def __post_init__(self) -> None:
        num_samples, num_ranks, batch_size = self.num_in_split, self.num_ranks, self.batch_size
        if batch_size < num_ranks:
            raise UserError(
                f"A global batch of {batch_size} is too small for {num_ranks} ranks. "
                f"Use --batch-size {num_ranks} or more."
            )
        if batch_size > num_samples:
            raise UserError(
                f"A global batch of {batch_size} is larger than the training split "
                f"({num_samples} samples). Use a smaller --batch-size or --batch-per-worker."
            )
        self._num_used = num_samples - num_samples % num_ranks
        num_full, rest = divmod(self._num_used, batch_size)
        self.steps_per_epoch = num_full + (rest >= num_ranks)
        self.num_steps = max(1, round(self.num_epochs * self.steps_per_epoch))

    @property
    def num_samples(self) -> int:
        """Number of samples that all workers together train on in the whole run."""
        return self.num_samples_before(self.num_steps)

    def num_samples_before(self, step: int) -> int:
        """Return the number of samples that the run trains on before a step."""
        num_epochs, num_left = divmod(step, self.steps_per_epoch)
        num_per_epoch = min(self._num_used, self.steps_per_epoch * self.batch_size)
        return num_epochs * num_per_epoch + num_left * self.batch_size

    def size(self, step: int) -> int:
        """Return the number of samples in the global batch of a step."""
        start = step % self.steps_per_epoch * self.batch_size
        return min(self.batch_size, self._num_used - start)

    def num_in(self, shard: Shard) -> int:
        """Return the number of samples in a shard."""
        least, num_larger = divmod(self.size(shard.step), shard.num_shards)
        return least + (shard.index < num_larger)

    def indices(self, shard: Shard) -> Tensor:
        """Return the indices of a shard's samples in the training split, as int64.

        A shard has every ``num_shards``-th sample of its global batch. Sizes of shards differ by at
        most one sample.
        """
        epoch, batch = divmod(shard.step, self.steps_per_epoch)
        start = batch * self.batch_size
        end = start + self.size(shard.step)
        order = permutation(self.num_in_split, self.seed + epoch)
        return order[start + shard.index : end : shard.num_shards]

    def smallest_shard(self, num_shards: int) -> Shard:
        """Return one of the run's smallest shards."""
        last = min(self.num_steps, self.steps_per_epoch) - 1
        step = min((0, last), key=self.size)
        return Shard(step=step, index=num_shards - 1, num_shards=num_shards)


@lru_cache(maxsize=1)
def permutation(num: int, seed: int) -> Tensor:
    """Return the numbers from 0 to ``num - 1`` in random order. Only the last result is cached."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(num, generator=generator, device="cpu")


def mapped(
    function: Callable[[Any], Any],
    tree: Tree,
    *,
    is_leaf: Callable[[Any], bool] = lambda _: False,
    copies: tuple[tuple[object, object], ...] = (),
) -> Tree:
    """Apply a function to each leaf of a tree. Return a tree with the same structure.

    ``is_leaf`` returns True for further leaves. ``copies`` has the nodes above, with their copies.
    """
    for node, copied_node in copies:
        if node is tree:
            return copied_node
    if is_leaf(tree) or (branches := _branches(tree)) is None:
        return function(tree)
    is_fixed = isinstance(tree, tuple | Mapping) and not isinstance(tree, MutableMapping)
    made: Any = None if is_fixed else copy.copy(tree)  # keeps the class, e.g. a ModelOutput
    copies = (*copies, (tree, made))
    results = {k: mapped(function, v, is_leaf=is_leaf, copies=copies) for k, v in branches.items()}
    if hasattr(tree, "_make"):
        return tree._make(results.values())
    if is_fixed:
        return type(tree)(results if isinstance(tree, Mapping) else results.values())
    for key, each in results.items():
        if isinstance(tree, Mapping | list):
            made[key] = each
        else:
            object.__setattr__(made, key, each)  # also in a frozen dataclass
    return made


def leaves(
    tree: Tree, path: str = "", inside: tuple[object, ...] = ()
) -> Iterator[tuple[str, Any]]:
    """Yield each leaf of a tree with its path, for example ``"['image'][0]"``."""
    if (branches := _branches(tree, inside)) is None:
        yield path, tree
        return
    for key, each in branches.items():
        yield from leaves(each, f"{path}[{key!r}]", (*inside, tree))


def _branches(tree: Tree, inside: tuple[object, ...] = ()) -> dict[Any, Any] | None:
    """Return the branches of a tree by key, number or field. Return None for a leaf.

    A list of strings is a leaf. An object that refers to a node above it is a leaf there. An object
    with a method ``to``, such as a ``PackedSequence``, is a leaf unless it is a dataclass.
    """
    if isinstance(tree, Mapping):
        return dict(tree)
    can_move = callable(getattr(tree, "to", None)) and not is_dataclass(tree)
    if can_move or isinstance(tree, nn.Module | Dataset | type | torch.Size):
        return None
    if isinstance(tree, list | tuple):
        return None if tree and isinstance(tree[0], str | bytes) else dict(enumerate(tree))
    if any(tree is each for each in inside):
        return None
    fields, inside = _fields(tree), (*inside, tree)
    found = (leaf for field in fields.values() for _, leaf in leaves(field, "", inside))
    return fields if any(isinstance(leaf, Tensor) for leaf in found) else None


def _fields(value: object) -> dict[str, Any]:
    """Return the attributes of an object, in its ``__dict__`` or in slots."""
    found = dict(getattr(value, "__dict__", {}))
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            is_private = name.startswith("__") and not name.endswith("__")
            stored = f"_{kind.__name__.lstrip('_')}{name}" if is_private else name
            if name not in ("__dict__", "__weakref__") and hasattr(value, stored):
                found[stored] = getattr(value, stored)
    return found


def tensors_of(tree: Tree) -> Iterator[Tensor]:
    """Yield the tensors in a tree."""
    return (leaf for _, leaf in leaves(tree) if isinstance(leaf, Tensor))


def copied(tree: Tree) -> Tree:
    """Return a tree with copies of all tensors, so that a forward pass may change the copies."""

    def copy_of(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return leaf.detach().clone().requires_grad_(leaf.requires_grad)

    return mapped(copy_of, tree)


def moved(tree: Tree, device: torch.device) -> Tree:
    """Return a tree with all tensors on a device. Copies to a GPU are asynchronous."""

    def move(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            if not callable(getattr(leaf, "to", None)):
                return leaf
            on_device = leaf.to(device)  # e.g. a PackedSequence
            return leaf if on_device is None else on_device  # None: it has moved itself
        if device.type == "cuda" and leaf.device.type == "cpu":
            leaf = leaf.pin_memory()  # otherwise, this thread would wait for the copy
        return leaf.to(device, non_blocking=True)

    return mapped(move, tree)


def rows(tree: Tree, begin: int, end: int, num_samples: int) -> Tree:
    """Return the samples from ``begin`` to ``end`` of a batch with ``num_samples`` samples.

    Leaves without samples, such as a number, stay unchanged.

    Raises:
        UserError: A leaf, such as a ``PackedSequence``, does not have one row for each sample.
    """

    def cut(leaf: Any) -> Any:
        can_move = callable(getattr(leaf, "to", None)) and getattr(leaf, "ndim", 1) > 0
        if _length(leaf) == num_samples and (isinstance(leaf, Tensor) or not can_move):
            try:
                return leaf[begin:end]
            except (TypeError, RuntimeError, KeyError):  # e.g. a set or a sparse tensor
                can_move = True
        if can_move:
            raise UserError(
                f"A batch of {num_samples} samples contains {shape_of(leaf)}, so it cannot be "
                "split. Return tensors with one row for each sample, or remove --accumulate and dp."
            )
        return leaf

    def is_list_of_samples(node: Any) -> bool:
        is_plain = isinstance(node, list | tuple) and not hasattr(node, "_make")
        return is_plain and len(node) == num_samples and num_samples not in map(_length, node)

    return mapped(cut, tree, is_leaf=is_list_of_samples)


def num_rows(tree: Tree, num_items: int) -> int:
    """Return the number of samples in a batch that ``collate_fn`` made of ``num_items`` items.

    ``collate_fn`` may drop items, add items, or cut items into windows. If no branch of the batch
    has ``num_items`` rows, the length that most branches share is the number of samples.
    """
    is_list = isinstance(tree, list | tuple) and not hasattr(tree, "_make")
    nodes = [*(_branches(tree) or {0: tree}).values()]
    if is_list and len(nodes) != 2 and not any(isinstance(e, Tensor | list | tuple) for e in nodes):
        return len(nodes)  # a list of items
    counts = [count for each in reversed(nodes) if (count := _count(each)) >= 0]
    return num_items if num_items in counts or not counts else Counter(counts).most_common(1)[0][0]


def _count(tree: Tree) -> int:
    """Return the probable number of samples in a branch of a batch; -1 if it has no length."""
    if not isinstance(tree, list | tuple) or hasattr(tree, "_make"):
        return next((n for _, leaf in leaves(tree) if (n := _length(leaf)) >= 0), -1)
    is_flat = bool(tree) and isinstance(tree[0], str | bytes | int | float)
    counts = set() if is_flat else {_count(each) for each in tree} - {-1}
    return max(len(tree), *counts) if len(counts) == 1 else len(tree)


def _length(value: object) -> int:
    """Return the length of a tensor, tuple or list; -1 for a string, a dict or a number."""
    try:
        return -1 if isinstance(value, str | bytes | Mapping) else len(value)  # type: ignore[arg-type]
    except (TypeError, RuntimeError):  # a nested tensor raises RuntimeError
        return -1


def shape_of(tree: Tree) -> str:
    """Return a string with the shapes in a tree, such as ``"(5, 3)"`` or ``"{'x': (5, 3)}"``."""
    if isinstance(tree, Tensor):
        return "a nested tensor" if tree.is_nested else str(tuple(tree.shape))
    if isinstance(tree, tuple | list) and _branches(tree) is not None:
        inside = ", ".join(map(shape_of, tree))
        return f"[{inside}]" if isinstance(tree, list) else f"({inside}{',' * (len(tree) == 1)})"
    if isinstance(tree, Mapping):
        return "{" + ", ".join(f"{key!r}: {shape_of(each)}" for key, each in tree.items()) + "}"
    shapes = ", ".join(map(shape_of, tensors_of(tree)))
    return f"{kind_of(tree)} of {shapes}" if shapes else kind_of(tree)
