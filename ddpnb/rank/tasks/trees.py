"""Batches as trees: tensors in dicts, tuples and lists, nested in any way (ranks).

Texts, numbers and other objects may be among the tensors.  A list of texts, as torch's
``default_collate`` makes it, has one for each sample.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ddpnb.protocol.errors import UserError, kind_of

Tree = Any
"""A tensor, or a dict, tuple or list of trees."""


def mapped(function: Callable[[Any], Any], tree: Tree) -> Tree:
    """Return a tree of the same structure with ``function`` of each leaf."""
    if isinstance(tree, Tensor):
        return function(tree)
    if type(tree) is tuple or type(tree) is list:
        if tree and isinstance(tree[0], str | bytes):
            return function(tree)
        return type(tree)([mapped(function, each) for each in tree])
    if isinstance(tree, Mapping):
        made = copy.copy(tree)  # keeps its class
        made.update({key: mapped(function, each) for key, each in tree.items()})  # type: ignore[attr-defined]
        return made
    if isinstance(tree, tuple) and hasattr(tree, "_make") and not hasattr(tree, "to"):
        return tree._make(mapped(function, each) for each in tree)
    return function(tree)


def leaves(tree: Tree, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each leaf of a tree after its place, e.g. ``"['image'][0]"``."""
    if isinstance(tree, Mapping):
        for key, each in tree.items():
            yield from leaves(each, f"{path}[{key!r}]")
    elif isinstance(tree, tuple | list) and not (tree and isinstance(tree[0], str | bytes)):
        for number, each in enumerate(tree):
            yield from leaves(each, f"{path}[{number}]")
    else:
        yield path, tree


def moved(tree: Tree, device: torch.device) -> Tree:
    """Return a tree with its tensors on a device; to a GPU they are copied without waiting."""
    # A copy to a GPU makes this thread wait unless it comes from pinned memory.
    is_pinned = device.type == "cuda"

    def move(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            held = leaf.pin_memory() if is_pinned and leaf.device.type == "cpu" else leaf
            return held.to(device, non_blocking=True)
        return leaf.to(device) if hasattr(leaf, "to") else leaf  # such as a PackedSequence

    return mapped(move, tree)


def rows(tree: Tree, begin: int, end: int, num_samples: int) -> Tree:
    """Return the samples from ``begin`` to ``end`` of a batch of ``num_samples``.

    Leaves without samples, such as a number, stay as they are.

    Raises:
        UserError: a tensor has another number of rows.
    """

    def cut(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            if leaf.ndim == 0:
                return leaf
            if len(leaf) != num_samples:
                raise UserError(
                    f"A batch of {num_samples} samples has a tensor with {len(leaf)} rows, and "
                    "cannot be split: give each tensor a row for each sample, or define "
                    "collate_fn(items)."
                )
            return leaf[begin:end]
        return leaf[begin:end] if isinstance(leaf, list | tuple) else leaf

    return mapped(cut, tree)


def twice(tree: Tree) -> Tree:
    """Return a batch in which each sample is twice."""
    return mapped(
        lambda leaf: torch.cat([leaf, leaf]) if isinstance(leaf, Tensor) and leaf.ndim else leaf,
        tree,
    )


def shape_of(tree: Tree) -> str:
    """Return a tree's shapes for a sentence: ``"(5, 3)"``, ``"{'image': (5, 3)}"``."""
    if isinstance(tree, Tensor):
        return str(tuple(tree.shape))
    if isinstance(tree, Mapping):
        return "{" + ", ".join(f"{key!r}: {shape_of(each)}" for key, each in tree.items()) + "}"
    if type(tree) is tuple or type(tree) is list:
        return "[" + ", ".join(map(shape_of, tree)) + "]"
    return kind_of(tree)
