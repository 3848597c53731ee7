"""What happens to the shared parameters when a gradient arrives?  (Rank 0, server thread.)"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from ddpnb.rank.tasks.base import OptimizerFactory
from ddpnb.rank.transport.packed import Packed, pack


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """One read or write of the parameters by a worker."""

    rank: int
    is_write: bool
    version: int
    """Updates that the parameters have seen, this one included."""


Log = Callable[[Access], None]
"""Is told of every access, in the order in which they happen."""


def no_log(access: Access) -> None:
    """Keep no log."""


class Master:
    """The parameters, their one optimizer, and how many updates they have seen.

    Args:
        initial: the parameters to begin with, on any device; copied.
        optimizer: makes the optimizer.
        log: is told of every access.
    """

    def __init__(self, initial: Sequence[Tensor], optimizer: OptimizerFactory, log: Log) -> None:
        self._packed = pack(initial)
        for mine, theirs in zip(self._packed.tensors, initial, strict=True):
            mine.copy_(theirs.detach())
        self._parameters = [nn.Parameter(tensor) for tensor in self._packed.tensors]
        self._optimizer = optimizer(self._parameters)
        self._log = log
        self._version = 0
        self._version_read: dict[int, int] = {}

    @property
    def tensors(self) -> list[Tensor]:
        """The parameters themselves, on the CPU."""
        return self._packed.tensors

    def read(self, rank: int, into: Packed) -> None:
        """Copy the parameters as they are now, for a worker."""
        into.raw.copy_(self._packed.raw)
        self._version_read[rank] = self._version
        self._log(Access(rank=rank, is_write=False, version=self._version))

    def write(self, rank: int, gradients: Packed) -> int:
        """Make one update with a worker's gradients, as old as they are.

        Returns:
            Their staleness: updates by others since the worker's last read.
        """
        staleness = self._version - self._version_read[rank]
        for parameter, gradient in zip(self._parameters, gradients.tensors, strict=True):
            parameter.grad = gradient
        self._optimizer.step()
        self._version += 1
        self._log(Access(rank=rank, is_write=True, version=self._version))
        return staleness
