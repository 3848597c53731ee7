"""The collectives of ``torch.distributed``, and what must match on all ranks (ranks)."""

import zlib
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor

from ddpnb.rank.collective_log import TEXT_BYTES

NO_ROOT = -1
NOT_COMPARED = -1
"""Stands for the size if tensors of different sizes may meet."""


@dataclass(frozen=True, slots=True)
class Collective:
    """A method of ``ProcessGroup``, and the operation that it calls in torch's dispatcher."""

    name: str
    """As users call it."""
    operation: str
    num_tensors: int
    """Arguments of the operation before its group."""
    _: KW_ONLY
    tensor: int | None = 0
    """The index of the argument that holds this rank's tensors; None if there are no tensors."""
    root: int | None = None
    """The index of the root among the operation's arguments after its group; None without one."""
    root_is: Literal["from", "to", ""] = ""
    sizes: Literal["equal", "equal on CPUs", "equal without splits", "free"] = "equal"
    """NCCL accepts tensors of different sizes in some calls that gloo does not."""

    def text(self, arguments: Sequence[Any], root: int) -> tuple[bytes, int]:
        """Return the text by which a call is compared, and the text's checksum.

        Args:
            arguments: of the method, or of the operation without its group.
            root: the root's number in the group; ``NO_ROOT`` without one.
        """
        if self.tensor is None:
            return _text(self.name, None, root, NOT_COMPARED, ())
        part = arguments[self.tensor]
        first = part if isinstance(part, Tensor) else part[0] if part else None
        if first is None:
            return _text(self.name, None, root, NOT_COMPARED, ())
        if self.sizes != "equal" and not self._is_sized(first, arguments):
            size = NOT_COMPARED
        elif part is first or len(part) == 1:
            size = first.numel()
        else:
            size = sum(each.numel() for each in part)
        return _text(self.name, first.dtype, root, size, first.shape)

    def _is_sized(self, tensor: Tensor, arguments: Sequence[Any]) -> bool:
        if self.sizes == "equal on CPUs":
            return tensor.device.type == "cpu"
        return self.sizes == "equal without splits" and not any(arguments[2:4])


_ALL_GATHER_SINGLE = Collective("all_gather_single", "_allgather_base_", 2, tensor=1)
_REDUCE_SCATTER_SINGLE = Collective("reduce_scatter_single", "_reduce_scatter_base_", 2, tensor=1)
_ALL_TO_ALL_SINGLE = Collective(
    "all_to_all_single", "alltoall_base_", 2, tensor=1, sizes="equal without splits"
)
_ALL_GATHER_COALESCED = Collective(
    "all_gather_coalesced", "allgather_into_tensor_coalesced_", 2, tensor=1
)
_REDUCE_SCATTER_COALESCED = Collective(
    "reduce_scatter_coalesced", "reduce_scatter_tensor_coalesced_", 2, tensor=1
)

METHODS = {
    "allreduce": Collective("all_reduce", "allreduce_", 1),
    "allreduce_coalesced": Collective("all_reduce_coalesced", "allreduce_coalesced_", 1),
    "broadcast": Collective("broadcast", "broadcast_", 1, root=0, root_is="from"),
    "reduce": Collective("reduce", "reduce_", 1, root=1, root_is="to"),
    "allgather": Collective("all_gather", "allgather_", 2, tensor=1, sizes="equal on CPUs"),
    "allgather_coalesced": Collective("all_gather_coalesced", "allgather_coalesced_", 2, tensor=1),
    "all_gather_single": _ALL_GATHER_SINGLE,
    "_allgather_base": _ALL_GATHER_SINGLE,
    "all_gather_single_coalesced": _ALL_GATHER_COALESCED,
    "allgather_into_tensor_coalesced": _ALL_GATHER_COALESCED,
    "gather": Collective(
        "gather", "gather_", 2, tensor=1, root=0, root_is="to", sizes="equal on CPUs"
    ),
    "scatter": Collective("scatter", "scatter_", 2, root=0, root_is="from", sizes="equal on CPUs"),
    "reduce_scatter": Collective("reduce_scatter", "reduce_scatter_", 2, sizes="equal on CPUs"),
    "reduce_scatter_single": _REDUCE_SCATTER_SINGLE,
    "_reduce_scatter_base": _REDUCE_SCATTER_SINGLE,
    "reduce_scatter_single_coalesced": _REDUCE_SCATTER_COALESCED,
    "reduce_scatter_tensor_coalesced": _REDUCE_SCATTER_COALESCED,
    "alltoall": Collective("all_to_all", "alltoall_", 2, tensor=1, sizes="free"),
    "all_to_all_single": _ALL_TO_ALL_SINGLE,
    "alltoall_base": _ALL_TO_ALL_SINGLE,
    "barrier": Collective("barrier", "barrier", 1, tensor=None),
    "monitored_barrier": Collective("monitored_barrier", "monitored_barrier_", 1, tensor=None),
}
"""By their names in ``ProcessGroup``.  Calls between two ranks are not compared."""

ROOT_WORDS = {each.name: each.root_is for each in METHODS.values()}


def is_match(one: bytes, other: bytes) -> bool:
    """Return whether two ranks' calls may meet: ``[4]`` and ``[2, 2]`` may, as flat memory."""
    if one == other:
        return True
    *alike, size, _ = one.split(b"\t")
    *other_alike, other_size, _ = other.split(b"\t")
    not_compared = str(NOT_COMPARED).encode()
    return alike == other_alike and (size == other_size or not_compared in (size, other_size))


def spelled(text: bytes, ranks: Sequence[int], *, in_backward: bool = False) -> str:
    """Return a call in words: ``"broadcast from rank 0 with Float [3]"``.

    Args:
        text: what ``Collective.text`` returned.
        ranks: the group's ranks, as the default group numbers them.
        in_backward: whether DDP's backward pass calls it.
    """
    name, kind, root, _, shape = text.decode().split("\t")
    words = [f"{name} of DDP's backward" if in_backward else name]
    if int(root) != NO_ROOT:
        words.append(f"{ROOT_WORDS[name]} rank {ranks[int(root)]}")
    if kind:
        words.append(f"with {kind} {shape}")
    return " ".join(words)


@lru_cache(maxsize=1024)
def _text(
    name: str, dtype: torch.dtype | None, root: int, size: int, shape: tuple[int, ...]
) -> tuple[bytes, int]:
    kind = "" if dtype is None else _kind(dtype)
    text = f"{name}\t{kind}\t{root}\t{size}\t{list(shape)}".encode()[:TEXT_BYTES]
    return text, zlib.crc32(text)


def _kind(dtype: torch.dtype) -> str:
    """Return a type's name as torch's errors spell it: ``"Float"``."""
    return torch.empty(0, dtype=dtype).type().split(".")[-1].removesuffix("Tensor")
