"""What happens to the shared parameters when a gradient arrives?  (Rank 0.)

There are as many copies of them as workers.  Each worker trains on one, as old as its last
read; the latest is the one with the last update.  Where another worker than the one whose
gradient has come trains on that, the update is made in a copy of it that nobody trains on;
else in place.  So no parameters change while a gradient of them is computed.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from ddpnb.rank.tasks.base import OptimizerFactory
from ddpnb.rank.transport.packed import Packed
from ddpnb.rank.transport.quick_step import make_step

WHOLE_ROUND = 0
"""The period of a server that waits to be told: it makes its update in ``Master.apply``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """One read of the parameters by a worker, or the arrival of its gradient."""

    rank: int
    is_write: bool
    version: int
    """Updates that the parameters have seen, one that this write has caused included."""


Log = Callable[[Access], None]
"""Is told of every access, in the order in which they happen."""


def no_log(access: Access) -> None:
    """Keep no log."""


class Master:
    """The parameters, their one optimizer, and how many updates they have seen.

    Not thread-safe: the server calls it under its lock.

    Args:
        initial: the parameters to begin with, on any device.
        copies: memory for parameters like these: one for each worker, all on the CPU.
        optimizer: makes the optimizer.
        log: is told of every access.
        period: gradients whose sum makes one update, or ``WHOLE_ROUND``.
        is_damped: whether an update's learning rate is divided by 1 + staleness (the mean
            over its gradients), after Zhang et al., IJCAI 2016.
    """

    def __init__(
        self,
        initial: Sequence[Tensor],
        optimizer: OptimizerFactory,
        log: Log = no_log,
        *,
        copies: Sequence[Packed],
        period: int = 1,
        is_damped: bool = False,
    ) -> None:
        self.copies = copies
        self._latest = 0
        self._trained_on: dict[int, int] = {}
        """The number of the copy that each worker trains on, by rank."""
        for mine, theirs in zip(self.tensors, initial, strict=True):
            mine.copy_(theirs.detach())
        self._parameters = [nn.Parameter(tensor) for tensor in self.tensors]
        self._optimizer = optimizer(self._parameters)
        self._period = period
        self._log = None if log is no_log else log
        self._version = 0
        self._version_read: dict[int, int] = {}
        self._staleness: list[int] = []
        if is_damped:  # after the factory's own hooks: a warm-up sets the rate, this divides it
            _damp(self._optimizer, lambda: 1 + fmean(self._staleness))

    @property
    def tensors(self) -> list[Tensor]:
        """The parameters as they are now."""
        return self.copies[self._latest].tensors

    def read(self, rank: int) -> int:
        """Give a worker the parameters as they are now.

        Returns:
            The number of the copy that it may train on, until ``leave`` or its next gradients.
        """
        self._trained_on[rank] = self._latest
        self._version_read[rank] = self._version
        self._note(rank, is_write=False)
        return self._latest

    def leave(self, rank: int) -> None:
        """Note that a worker trains on no copy any more; may be called twice."""
        self._trained_on.pop(rank, None)

    def write(self, rank: int, gradients: Sequence[Tensor | None]) -> int:
        """Take a worker's gradients; make an update when there are enough.

        Returns:
            Their staleness: updates since the worker's last read.  It does not grow while
            they wait for the next update, for they are part of it.
        """
        self.leave(rank)
        staleness = self._version - self._version_read[rank]
        self._staleness.append(staleness)
        if self._period == 1:
            for parameter, gradient in zip(self._parameters, gradients, strict=True):
                parameter.grad = gradient
        else:
            self._gather(gradients)
        if len(self._staleness) == self._period:
            self.apply()
        self._note(rank, is_write=True)
        return staleness

    def apply(self) -> None:
        """Make an update with what has been gathered, if anything has."""
        if not self._staleness:
            return
        if self._latest in self._trained_on.values():
            self._go_on_in_another()
        make_step(self._optimizer)
        self._version += 1
        self._staleness.clear()
        for parameter in self._parameters:
            parameter.grad = None

    def snapshot(self) -> tuple[list[Tensor], dict[str, Any]]:
        """Return copies of the parameters and of the optimizer's state."""
        parameters = [tensor.clone() for tensor in self.tensors]
        return parameters, copy.deepcopy(self._optimizer.state_dict())

    def _note(self, rank: int, *, is_write: bool) -> None:
        if self._log is not None:
            self._log(Access(rank=rank, is_write=is_write, version=self._version))

    def _go_on_in_another(self) -> None:
        """Leave the latest copy to those who train on it."""
        copied, used = self.copies[self._latest], set(self._trained_on.values())
        # there is one: of as many copies as workers, that of the one who writes is not used
        self._latest = next(number for number in range(len(self.copies)) if number not in used)
        self.copies[self._latest].raw.copy_(copied.raw)
        for parameter, tensor in zip(self._parameters, self.tensors, strict=True):
            parameter.data = tensor

    @torch.no_grad()
    def _gather(self, gradients: Sequence[Tensor | None]) -> None:
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            if gradient is None:
                continue
            if parameter.grad is None:
                parameter.grad = gradient.clone()
            else:
                parameter.grad.add_(gradient)


def _damp(optimizer: torch.optim.Optimizer, divisor: Callable[[], float]) -> None:
    """Have every step of an optimizer made at a divided learning rate."""
    rates: list[Any] = []

    def before_step(*_: object) -> None:
        rates[:] = [group["lr"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] / divisor()

    def after_step(*_: object) -> None:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate

    optimizer.register_step_pre_hook(before_step)
    optimizer.register_step_post_hook(after_step)
