"""What asynchronous workers read and write: the parameters, and the updates made of them (rank 0).

There are as many copies of the parameters as workers.  Each worker trains on the copy that was
the latest when it last read.  A gradient updates the latest copy in place; where another worker
trains on that, the update is made in a copy that no worker trains on.  So no parameters change
while a gradient of them is computed.

Gradients come with weights: shares of a global batch.  An update is made with their weighted
mean, at the learning rate times the sum of their weights.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn

from ddpnb.rank.servers.memory import Gradients, PackedTensors
from ddpnb.rank.tasks.base import OptimizerFactory

_ROUNDING = 1e-9
"""Weights with a sum this close to 1 make up a whole batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterAccess:
    """One read of the parameters by a worker, or the arrival of its gradient."""

    rank: int
    is_write: bool
    version: int
    """Updates that the parameters have seen, including one caused by this write."""


AccessLog = Callable[[ParameterAccess], None]
"""Called with every access, in the order in which they happen."""


def ignore_access(access: ParameterAccess) -> None:
    """Keep no log."""


class UpdateCounter:
    """Counts the updates that workers make themselves, in the one copy that they share.

    The queue calls it under its lock.

    Args:
        log: called with every access.
    """

    def __init__(self, log: AccessLog = ignore_access) -> None:
        self._log = log
        self._version = 0
        """Updates so far."""
        self._version_read: dict[int, int] = {}

    def read(self, rank: int) -> int:
        """Return the copy that a worker trains on until its ``write``; note its updates so far."""
        self._version_read[rank] = self._version
        self._note(rank, is_write=False)
        return 0

    def write(self, rank: int, gradients: Gradients, weight: float) -> int:
        """Count an update; return how many others were made since the worker's last read."""
        staleness = self._version - self._version_read[rank]
        self._version += 1
        self._note(rank, is_write=True)
        return staleness

    def release(self, rank: int) -> None:
        """Note that a worker no longer trains on any copy; may be called twice."""

    def apply(self) -> None:
        """Make an update with the gradients that have come since the last one, if any."""

    def _note(self, rank: int, *, is_write: bool) -> None:
        self._log(ParameterAccess(rank=rank, is_write=is_write, version=self._version))


@final
class ParameterStore(UpdateCounter):
    """The parameters and their one optimizer.

    Args:
        copies: memory for the parameters, on the CPU: one copy for each worker.  The first one
            holds the first parameters.
        optimizer: makes the optimizer.
        log: called with every access.
        in_rounds: whether gradients are gathered until ``apply`` makes one update of them.
        compensation: the lambda of delay compensation, see ``compensated``; 0: none.
    """

    def __init__(
        self,
        copies: Sequence[PackedTensors],
        optimizer: OptimizerFactory,
        log: AccessLog = ignore_access,
        *,
        in_rounds: bool = False,
        compensation: float = 0.0,
    ) -> None:
        super().__init__(log)
        self.copies = copies
        self._latest = 0
        self._trained_on: dict[int, int] = {}
        """Number of the copy that each worker trains on, by rank."""
        self._parameters = [nn.Parameter(tensor) for tensor in self.tensors]
        self._optimizer = optimizer(self._parameters)
        self._in_rounds = in_rounds
        self._compensation = compensation
        self._num_waiting = 0
        """Gradients that have come since the last update."""
        self._weight = 0.0
        """Sum over them."""

    @property
    def tensors(self) -> list[Tensor]:
        """The parameters as they are now."""
        return self.copies[self._latest].tensors

    def read(self, rank: int) -> int:
        """Give a worker the parameters as they are now, until ``release`` or its ``write``."""
        self._trained_on[rank] = self._latest
        super().read(rank)
        return self._latest

    def release(self, rank: int) -> None:
        """Note that a worker no longer trains on any copy; may be called twice."""
        self._trained_on.pop(rank, None)

    def write(self, rank: int, gradients: Gradients, weight: float = 1.0) -> int:
        """Take a worker's gradients; make an update unless they are gathered for a round.

        Args:
            rank: of the worker.
            gradients: of its mean loss, one for each parameter; None: none.
            weight: the worker's share of the global batch.

        Returns:
            Their staleness: updates since the worker's last read.
        """
        trained_on = self._trained_on.pop(rank, self._latest)
        staleness = self._version - self._version_read[rank]
        if self._compensation and staleness > 0:
            old, now = self.copies[trained_on].tensors, self.tensors
            gradients = compensated(gradients, old, now, self._compensation)
        self._num_waiting += 1
        self._weight += weight
        if self._in_rounds:
            self._gather(gradients, weight)
        else:
            for parameter, gradient in zip(self._parameters, gradients, strict=True):
                parameter.grad = gradient
            self.apply()
        self._note(rank, is_write=True)
        return staleness

    def apply(self) -> None:
        """Make an update with the gradients that have come since the last one, if any."""
        if not self._num_waiting:
            return
        if self._latest in self._trained_on.values():
            self._move_to_unused_copy()
        weight = 1.0 if abs(self._weight - 1) < _ROUNDING else self._weight
        if self._in_rounds and weight != 1.0:  # gathered: from their weighted sum to their mean
            for gradient in (p.grad for p in self._parameters if p.grad is not None):
                gradient.div_(weight)
        with scaled_rate(self._optimizer, weight):
            self._optimizer.step()
        self._version += 1
        self._num_waiting, self._weight = 0, 0.0
        for parameter in self._parameters:
            parameter.grad = None

    def _move_to_unused_copy(self) -> None:
        """Leave the latest copy to the workers that train on it."""
        previous, used = self.copies[self._latest], set(self._trained_on.values())
        # One is unused: there are as many copies as workers, and the one that writes uses none.
        self._latest = next(number for number in range(len(self.copies)) if number not in used)
        self.copies[self._latest].raw.copy_(previous.raw)
        for parameter, tensor in zip(self._parameters, self.tensors, strict=True):
            parameter.data = tensor

    @torch.no_grad()
    def _gather(self, gradients: Gradients, weight: float) -> None:
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            if gradient is None:
                continue
            if parameter.grad is None:
                parameter.grad = gradient * weight
            else:
                parameter.grad.add_(gradient, alpha=weight)


def compensated(
    gradients: Gradients, old: Sequence[Tensor], now: Sequence[Tensor], strength: float
) -> list[Tensor | None]:
    """Return gradients of old parameters, corrected towards those of the parameters as they are.

        g  +  lambda * g * g * (w_now - w_old)

    A Taylor expansion whose Hessian is replaced by the diagonal of g g^T: Zheng et al.,
    "Asynchronous Stochastic Gradient Descent with Delay Compensation", ICML 2017 (DC-ASGD-c).
    """
    return [
        None if g is None else torch.addcmul(g, g * g, mine - theirs, value=strength)
        for g, mine, theirs in zip(gradients, now, old, strict=True)
    ]


@contextlib.contextmanager
def scaled_rate(optimizer: torch.optim.Optimizer, fraction: float) -> Iterator[None]:
    """Have the optimizer's step in this context made at a fraction of its learning rate.

    This scales the whole update, including weight decay and Adam's division by the gradient's
    size.  To scale the gradient would leave those as they are.  A hook of the optimizer may set
    the learning rate in the step itself, so that it is scaled in a hook behind all others.
    """
    groups = optimizer.param_groups
    rates: list[Any] = [None] * len(groups)
    scaled: list[Any] = [None] * len(groups)

    def scale(*_: object) -> None:
        for n, group in enumerate(groups):
            if group["lr"] is not scaled[n]:  # torch calls hooks again in super().step
                rates[n] = group["lr"]
                group["lr"] = scaled[n] = group["lr"] * fraction

    hook = optimizer.register_step_pre_hook(scale)
    try:
        yield
    finally:
        hook.remove()
        for group, rate, used in zip(groups, rates, scaled, strict=True):
            if group["lr"] is used:  # the step was made
                group["lr"] = rate
