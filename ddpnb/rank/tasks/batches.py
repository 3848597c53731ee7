"""The samples of each step and each worker, as trees of tensors (ranks).

Each epoch is one permutation of the training split, made from the seed and cut into global batches.
A global batch is dealt out in shards, one for each worker.  The shards of a step together are
exactly the global batch, so every strategy sees the same samples in the same order.

It is the order of torch's ``DistributedSampler(seed=seed, drop_last=True)`` with ``set_epoch``,
wherever the workers share a global batch evenly.  A data set's own ``set_epoch`` is not called.
Torch's ``Join`` is not needed: every worker has a shard of each batch, even of an uneven one, and
averaged gradients are weighted by the shards' sizes.  So all synchronous workers make the same
number of steps.

A batch is a tree: tensors in dicts, tuples and lists, nested in any way.  Texts, numbers and other
objects may be among the tensors.  A list of texts, as torch's ``default_collate`` makes it, has one
for each sample.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ddpnb.protocol.errors import UserError, kind_of

Tree = Any
"""A tensor, or a dict, tuple or list of trees."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One worker's part of one global batch."""

    step: int
    part: int
    num_parts: int


def every_step(num_steps: int, *, part: int, num_parts: int) -> Iterator[Shard]:
    """Yield the same part of every global batch: the shards of a synchronous worker."""
    for step in range(num_steps):
        yield Shard(step=step, part=part, num_parts=num_parts)


@dataclass(eq=False)
class BatchSchedule:
    """The global batches of a run; the same on every rank and for every strategy.

    Of the n samples of an epoch's permutation the last n mod N are left out, with N ranks.  The
    last batch may be smaller.  It is left out if it has fewer samples than there are ranks, so that
    every shard has at least one; that can be only where N does not divide the batch size.

    Raises:
        UserError: the batch is smaller than the number of ranks or larger than the split.
    """

    num_in_split: int
    """Samples of the training split."""
    _: KW_ONLY
    batch_size: int
    """Samples of a global batch."""
    num_epochs: float
    """Passes over the split; a fraction ends inside an epoch."""
    num_ranks: int
    """Ranks of the whole group, even if a strategy uses fewer."""
    seed: int
    """Of the permutations."""

    def __post_init__(self) -> None:
        num_samples, num_ranks, batch_size = self.num_in_split, self.num_ranks, self.batch_size
        if batch_size < num_ranks:
            raise UserError(
                f"A global batch of {batch_size} cannot be shared by {num_ranks} ranks; "
                f"give --batch-size {num_ranks} or more."
            )
        if batch_size > num_samples:
            raise UserError(
                f"A global batch of {batch_size} is larger than the training split "
                f"({num_samples} samples); give a smaller --batch-size, or --batch-per-worker."
            )
        self._num_used = num_samples - num_samples % num_ranks
        num_full, rest = divmod(self._num_used, batch_size)
        self.steps_per_epoch = num_full + (rest >= num_ranks)
        self.num_steps = max(1, round(self.num_epochs * self.steps_per_epoch))

    @property
    def num_samples(self) -> int:
        """Samples that the whole run trains on, over all workers."""
        return self.num_samples_before(self.num_steps)

    def num_samples_before(self, step: int) -> int:
        """Return how many samples are trained on before a step."""
        num_epochs, num_left = divmod(step, self.steps_per_epoch)
        num_per_epoch = min(self._num_used, self.steps_per_epoch * self.batch_size)
        return num_epochs * num_per_epoch + num_left * self.batch_size

    def size(self, step: int) -> int:
        """Return how many samples the global batch of a step has."""
        start = step % self.steps_per_epoch * self.batch_size
        return min(self.batch_size, self._num_used - start)

    def num_in(self, shard: Shard) -> int:
        """Return how many samples a shard has."""
        least, num_larger = divmod(self.size(shard.step), shard.num_parts)
        return least + (shard.part < num_larger)

    def indices(self, shard: Shard) -> Tensor:
        """Return the samples of a shard: int64 indices into the training split.

        The permutation is dealt out like cards; the sizes of shards differ by one at most.
        """
        epoch, batch = divmod(shard.step, self.steps_per_epoch)
        start = batch * self.batch_size
        end = start + self.size(shard.step)
        order = permutation(self.num_in_split, self.seed + epoch)
        return order[start + shard.part : end : shard.num_parts]

    def smallest_shard(self, num_parts: int) -> Shard:
        """Return one of the run's smallest shards."""
        last = min(self.num_steps, self.steps_per_epoch) - 1
        step = min((0, last), key=self.size)
        return Shard(step=step, part=num_parts - 1, num_parts=num_parts)


@lru_cache(maxsize=1)
def permutation(num: int, seed: int) -> Tensor:
    """Return so many numbers in random order; the last result is kept."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(num, generator=generator, device="cpu")


def mapped(function: Callable[[Any], Any], tree: Tree) -> Tree:
    """Return a tree of the same structure with ``function`` of each leaf."""
    if isinstance(tree, Mapping):
        made: Any = copy.copy(tree)  # keeps its class, such as transformers' ModelOutput
        for key, each in tree.items():
            made[key] = mapped(function, each)
        return made
    if _is_sequence(tree):
        parts = [mapped(function, each) for each in tree]
        return tree._make(parts) if hasattr(tree, "_make") else type(tree)(parts)
    return function(tree)


def leaves(tree: Tree, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each leaf of a tree after its place, e.g. ``"['image'][0]"``."""
    if isinstance(tree, Mapping) or _is_sequence(tree):
        for key, each in tree.items() if isinstance(tree, Mapping) else enumerate(tree):
            yield from leaves(each, f"{path}[{key!r}]")
    else:
        yield path, tree


def _is_sequence(tree: Tree) -> bool:
    """Return whether a tree is a tuple or list of trees, and not of texts."""
    if hasattr(tree, "_make"):  # a PackedSequence is no batch, and moves itself
        return not hasattr(tree, "to")
    return type(tree) in (tuple, list) and not (tree and isinstance(tree[0], str | bytes))


def tensors_of(tree: Tree) -> Iterator[Tensor]:
    """Yield the tensors in a tree."""
    return (leaf for _, leaf in leaves(tree) if isinstance(leaf, Tensor))


def copied(tree: Tree) -> Tree:
    """Return a tree with tensors of its own, which a forward pass may change."""

    def copy_of(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return leaf.detach().clone().requires_grad_(leaf.requires_grad)

    return mapped(copy_of, tree)


def moved(tree: Tree, device: torch.device) -> Tree:
    """Return a tree with its tensors on a device; to a GPU they are copied without waiting."""

    def move(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf.to(device) if hasattr(leaf, "to") else leaf  # such as a PackedSequence
        if device.type == "cuda" and leaf.device.type == "cpu":
            leaf = leaf.pin_memory()  # else the copy makes this thread wait
        return leaf.to(device, non_blocking=True)

    return mapped(move, tree)


def rows(tree: Tree, begin: int, end: int, num_samples: int) -> Tree:
    """Return the samples from ``begin`` to ``end`` of a batch of ``num_samples``.

    Leaves without samples, such as a number, stay as they are.

    Raises:
        UserError: something has not one row for each sample, such as a ``PackedSequence``.
    """

    def cut(leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and leaf.ndim > 0 and len(leaf) == num_samples:
            return leaf[begin:end]
        if hasattr(leaf, "to") and getattr(leaf, "ndim", 1) > 0:
            raise UserError(
                f"A batch of {num_samples} samples holds {shape_of(leaf)}, and cannot be split: "
                "give each tensor a row for each sample, or leave --accumulate and dp out."
            )
        return leaf[begin:end] if isinstance(leaf, list | tuple) else leaf

    return mapped(cut, tree)


def shape_of(tree: Tree) -> str:
    """Return a tree's shapes for a sentence: ``"(5, 3)"``, ``"{'image': (5, 3)}"``."""

    def shape(leaf: Any) -> Any:
        return tuple(leaf.shape) if isinstance(leaf, Tensor) else kind_of(leaf)

    return str(mapped(shape, tree))
