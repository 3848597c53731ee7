"""Which calls of ``torch.distributed`` are there, and which collective is each?  (ranks)"""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Literal

import torch.distributed as dist
from torch import Tensor

from ddpnb.protocol.costs import Messages, algorithm_of
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
    """The index of the argument with what this rank gives, or gets if it need not give anything;
    None if there are no tensors."""
    root: int | None = None
    """The index of the root among the operation's arguments after its group; None without one."""
    root_is: Literal["from", "to", ""] = ""
    equal: Literal["always", "on CPUs", "unless split", "never"] = "always"
    """When the ranks' tensors must have one size: NCCL takes others in some calls, gloo not."""
    is_message: bool = False
    """Whether only two ranks take part: this one, and the one that its second argument names."""

    @property
    def is_from_any(self) -> bool:
        """Whether the second argument names no rank: it is a message from whoever sends first."""
        return self.operation == "recv_any_source_"


_COLLECTIVES = (
    Collective("all_reduce", "allreduce_", 1),
    Collective("all_reduce_coalesced", "allreduce_coalesced_", 1),
    Collective("broadcast", "broadcast_", 1, root=0, root_is="from"),
    Collective("reduce", "reduce_", 1, root=1, root_is="to"),
    Collective("all_gather", "allgather_", 2, tensor=1, equal="on CPUs"),
    Collective("all_gather_coalesced", "allgather_coalesced_", 2, tensor=1),
    Collective("all_gather_single", "_allgather_base_", 2, tensor=1),
    Collective("all_gather_coalesced", "allgather_into_tensor_coalesced_", 2, tensor=1),
    Collective("gather", "gather_", 2, tensor=1, root=0, root_is="to", equal="on CPUs"),
    Collective("scatter", "scatter_", 2, root=0, root_is="from", equal="on CPUs"),
    Collective("reduce_scatter", "reduce_scatter_", 2, tensor=1, equal="on CPUs"),
    Collective("reduce_scatter_single", "_reduce_scatter_base_", 2, tensor=1),
    Collective("reduce_scatter_coalesced", "reduce_scatter_tensor_coalesced_", 2, tensor=1),
    Collective("all_to_all", "alltoall_", 2, tensor=1, equal="never"),
    Collective("all_to_all_single", "alltoall_base_", 2, tensor=1, equal="unless split"),
    Collective("barrier", "barrier", 1, tensor=None),
    Collective("send", "send", 1, is_message=True),
    Collective("recv", "recv_", 1, is_message=True),
    Collective("recv", "recv_any_source_", 1, is_message=True),
)

METHODS = {each.operation.removesuffix("_"): each for each in _COLLECTIVES}
"""By their names in ``ProcessGroup``."""

METHODS |= {
    "recv_anysource": METHODS.pop("recv_any_source"),
    "all_gather_single": METHODS["_allgather_base"],
    "all_gather_single_coalesced": METHODS["allgather_into_tensor_coalesced"],
    "reduce_scatter_single": METHODS["_reduce_scatter_base"],
    "reduce_scatter_single_coalesced": METHODS["reduce_scatter_tensor_coalesced"],
    "all_to_all_single": METHODS["alltoall_base"],
}
"""As all or newer versions of torch call them."""


@dataclass(slots=True, eq=False)
class Call:
    """One call of this rank, as the listeners of ``intercept`` hear of it."""

    collective: Collective
    group: Any
    arguments: Sequence[Any]
    """Of the method, or of the operation without its group."""
    root: int
    """Its number in the group; ``NO_ROOT`` without one."""
    _: KW_ONLY
    is_blocking: bool
    """Whether the caller waits for the end at once."""
    is_in_cpp: bool = False
    """Whether torch's own C++ code calls, as DDP's in the backward pass."""
    is_ended: bool = False
    """Whether the backend is done with it."""
    notes: dict[object, Any] = field(default_factory=dict)
    """What listeners keep of it, each under itself."""

    @property
    def name(self) -> str:
        """As users call it."""
        return self.collective.name

    @property
    def tensors(self) -> list[Tensor]:
        """What this rank gives, or gets if it need not give anything."""
        place = self.collective.tensor
        return [] if place is None else tensors_in(self.arguments[place])

    @property
    def num_bytes(self) -> int:
        """Bytes of these tensors."""
        return num_bytes(self.tensors)

    @property
    def are_sizes_equal(self) -> bool:
        """Whether all ranks must give equally many numbers."""
        when = self.collective.equal
        if when == "on CPUs":
            return all(tensor.device.type == "cpu" for tensor in self.tensors)
        if when == "unless split":
            return not any(self.arguments[2:4])
        return when == "always"

    @property
    def ranks(self) -> tuple[int, ...]:
        """The group's ranks, as the default group numbers them; empty if not known."""
        try:
            return tuple(dist.get_process_group_ranks(self.group))
        except KeyError:
            return ()

    @property
    def messages(self) -> Messages:
        """What follows each other on the busiest link; nothing where only one rank takes part."""
        algorithm, num_ranks = algorithm_of(self.name), self.group.size()
        assert algorithm is not None, "each collective of METHODS has one"
        return algorithm.cost(self.num_bytes, num_ranks) if num_ranks > 1 else Messages(0)

    @property
    def traffic(self) -> tuple[int, int]:
        """Bytes that this rank sends and receives, by the usual algorithms.

        They are what the busiest link carries.  Where one rank has another part than the others, as
        the root of a broadcast has, the others count the bytes of their own tensors.
        """
        collective, carried = self.collective, round(self.messages.num_bytes)
        if collective.is_message:
            return (carried, 0) if collective.name == "send" else (0, carried)
        if collective.root is None or not carried:
            return carried, carried
        is_root, own = self.group.rank() == self.root, self.num_bytes
        if collective.root_is == "from":
            return (carried, 0) if is_root else (0, own)
        return (0, carried) if is_root else (own, 0)


def tensors_in(argument: Any) -> list[Tensor]:
    """Return a tensor, all in a list, or all in a list of lists."""
    if isinstance(argument, Tensor):
        return [argument]
    return [tensor for each in argument for tensor in tensors_in(each)]
