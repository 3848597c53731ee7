"""Which calls of ``torch.distributed`` are there, and what does each exchange?  (ranks, agent)"""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from ddpnb.rank.collectives.costs import COLLECTIVES, Messages
from ddpnb.rank.collectives.flat import num_bytes

NO_ROOT = -1


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
    is_message: bool = False
    """Whether only two ranks take part: this one, and the one that its second argument names."""

    def is_sized(self, tensor: Tensor, arguments: Sequence[Any]) -> bool:
        """Return whether all ranks' tensors must be of one size."""
        if self.sizes == "equal on CPUs":
            return tensor.device.type == "cpu"
        if self.sizes == "equal without splits":
            return not any(arguments[2:4])
        return self.sizes == "equal"

    @property
    def given(self) -> int | None:
        """The index of the argument with what a rank gives; of a scatter, what it gets."""
        if self.tensor is None:
            return None
        return 1 if self.num_tensors == 2 and self.name != "scatter" else 0


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
"""By their names in ``ProcessGroup``."""

MESSAGES = {
    "send": Collective("send", "send", 1, is_message=True),
    "recv": Collective("recv", "recv_", 1, is_message=True),
    "recv_anysource": Collective("recv", "recv_any_source_", 1, is_message=True),
}
"""Calls between two ranks, by their names in ``ProcessGroup``."""

ROOT_WORDS = {each.name: each.root_is for each in METHODS.values()}


class Call:
    """One call of this rank, as the listeners of ``intercept`` hear of it.

    Args:
        collective: what is called.
        group: whose ranks are called together.
        arguments: of the method, or of the operation without its group.
        root: the root's number in the group; ``NO_ROOT`` without one.
        is_blocking: whether the caller waits for the end at once.
        is_in_cpp: whether torch's own C++ code calls, as DDP's in the backward pass.
    """

    __slots__ = (
        *("collective", "group", "arguments", "root", "is_blocking", "is_in_cpp"),
        *("source", "is_ended", "held_until", "notes"),
    )

    def __init__(
        self,
        collective: Collective,
        group: Any,
        arguments: Sequence[Any],
        root: int,
        *,
        is_blocking: bool,
        is_in_cpp: bool = False,
    ) -> None:
        self.collective = collective
        self.group = group
        self.arguments = arguments
        self.root = root
        self.is_blocking = is_blocking
        self.is_in_cpp = is_in_cpp
        self.source: int | None = None
        """The rank in the group from which a message for ``ANY_SOURCE`` has come, once it has."""
        self.is_ended = False
        """Whether the backend is done with it."""
        self.held_until = 0.0
        """Until when, on the monotonic clock, its end is held back."""
        self.notes: dict[object, Any] = {}
        """What listeners keep of it, each under itself."""

    @property
    def name(self) -> str:
        """As users call it."""
        return self.collective.name

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensors by which calls are compared: a part of the whole, or all of it."""
        place = self.collective.tensor
        return 0 if place is None else size_of(self.arguments[place])

    @property
    def num_bytes_given(self) -> int | None:
        """Bytes of what this rank gives; None: there are no tensors."""
        place = self.collective.given
        return None if place is None else size_of(self.arguments[place])

    @property
    def ranks(self) -> tuple[int, ...]:
        """The group's ranks, as the default group numbers them; empty if not known."""
        try:
            return tuple(dist.get_process_group_ranks(self.group))
        except KeyError:
            return ()

    @property
    def peer(self) -> int | None:
        """The other rank of a message, as the default group numbers it; None: not known."""
        ranks = self.ranks
        number = self.source if self.collective is ANY_SOURCE else self.arguments[1]
        return ranks[number] if ranks and number is not None else None

    @property
    def messages(self) -> Messages:
        """What follows each other on the busiest link; nothing where only one rank takes part."""
        num_ranks, size = self.group.size(), self.num_bytes
        if self.collective.is_message:
            return Messages(1, size)
        if num_ranks == 1 or self.collective.operation not in COLLECTIVES:
            return Messages(0)
        return COLLECTIVES[self.collective.operation](size, num_ranks)


ANY_SOURCE = MESSAGES["recv_anysource"]


def size_of(tensors: Any) -> int:
    """Return the bytes of a tensor, or of all in a list, or in a list of lists."""
    if isinstance(tensors, Tensor):
        return num_bytes([tensors])
    return sum(map(size_of, tensors))


def dtype_name(dtype: torch.dtype) -> str:
    """Return a type's name as torch's errors spell it: ``"Float"``."""
    return torch.empty(0, dtype=dtype).type().split(".")[-1].removesuffix("Tensor")
