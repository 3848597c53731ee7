"""Describes torch.distributed's collectives and this rank's calls.  Runs on the ranks."""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import lru_cache
from typing import Any, Literal

import torch.distributed as dist
from torch import Tensor

from ddpnb.protocol.costs import Cost, algorithm_of

NO_ROOT = -1


@dataclass(frozen=True, slots=True)
class Collective:
    """A method of ``ProcessGroup``, and the operation that it calls in torch's dispatcher."""

    name: str
    operation: str
    num_tensors: int
    """Number of arguments of the operation before the argument for the group."""
    _: KW_ONLY
    tensor: int | None = 0
    """Index of the argument with the input tensors, or with the output tensors if a rank may have
    no input.  None if the collective has no tensors."""
    root: int | None = None
    """Index of the root among the arguments after the group, or None if there is no root."""
    root_is: Literal["from", "to", ""] = ""
    equal: Literal["always", "on CPUs", "unless split", "never"] = "always"
    """Cases in which all ranks' tensors need equal sizes.  NCCL has fewer such cases than gloo."""
    is_message: bool = False
    """True if only two ranks take part: this rank and the rank in the call's second argument."""

    @property
    def is_from_any(self) -> bool:
        """True if the call receives a message from any rank, so no argument names the sender."""
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
"""Dict from the name of each ``ProcessGroup`` method to the method's collective."""

METHODS |= {
    "recv_anysource": METHODS.pop("recv_any_source"),
    "all_gather_single": METHODS["_allgather_base"],
    "all_gather_single_coalesced": METHODS["allgather_into_tensor_coalesced"],
    "reduce_scatter_single": METHODS["_reduce_scatter_base"],
    "reduce_scatter_single_coalesced": METHODS["reduce_scatter_tensor_coalesced"],
    "all_to_all_single": METHODS["alltoall_base"],
}
"""Methods with a name that differs from the operation's name in at least one torch version."""


@dataclass(slots=True, eq=False)
class CollectiveCall:
    """One call that this rank makes.  ``intercept`` passes the call to the listeners."""

    collective: Collective
    group: Any
    arguments: Sequence[Any]
    """All arguments of the method, or all arguments of the operation except the group."""
    root: int
    """The root's number in the group, or ``NO_ROOT`` if there is no root."""
    _: KW_ONLY
    is_blocking: bool
    """True if the caller immediately waits for the end of the call."""
    is_in_cpp: bool = False
    """True if torch's C++ code makes the call, such as DDP's code in the backward pass."""
    is_ended: bool = False
    notes: dict[object, Any] = field(default_factory=dict)
    """Data that the listeners store about this call, with the listener as the key."""

    @property
    def name(self) -> str:
        """Name of the function that users call."""
        return self.collective.name

    @property
    def tensors(self) -> list[Tensor]:
        """This rank's input tensors, or its output tensors if a rank may have no input."""
        place = self.collective.tensor
        return [] if place is None else tensors_in(self.arguments[place])

    @property
    def num_bytes(self) -> int:
        """Total size of ``tensors`` in bytes."""
        return sum(each.numel() * each.element_size() for each in self.tensors)

    @property
    def are_sizes_equal(self) -> bool:
        """True if all ranks must pass the same number of elements."""
        when = self.collective.equal
        if when == "on CPUs":
            return all(tensor.device.type == "cpu" for tensor in self.tensors)
        if when == "unless split":
            return not any(self.arguments[2:4])
        return when == "always"

    @property
    def ranks(self) -> tuple[int, ...]:
        """The group's ranks, numbered as in the default group.  Empty if the ranks are unknown."""
        try:
            return tuple(dist.get_process_group_ranks(self.group))
        except KeyError:
            return ()

    def cost(self, scale: float = 1.0, backend: str = "") -> Cost:
        """Return the call's messages and this rank's bytes, if all tensors were ``scale`` larger.

        Without a backend, the cost is that of the usual algorithm.
        """
        num_ranks, root = self.group.size(), max(self.root, 0)
        place = (self.group.rank() - root) % num_ranks
        return _cost(self.name, backend, scale * self.num_bytes, num_ranks, place)


@lru_cache(maxsize=1024)
def _cost(name: str, backend: str, size: float, num_ranks: int, place: int) -> Cost:
    algorithm = algorithm_of(name, backend)
    assert algorithm is not None, "each collective of METHODS has an algorithm"
    return algorithm.of(size, num_ranks, place)


def tensors_in(argument: Any) -> list[Tensor]:
    """Return the tensors in an argument that is a tensor, a list of tensors or a list of lists."""
    if isinstance(argument, Tensor):
        return [argument]
    return [tensor for each in argument for tensor in tensors_in(each)]
